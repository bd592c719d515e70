"""samples/: what ships is whole, small, and runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer

from tformer_deploy.api import export
from tformer_deploy.checkpoints import open_checkpoint
from tformer_deploy.reference import Decoder

SAMPLES = Path(__file__).resolve().parent.parent / "samples"
CHECKPOINT = SAMPLES / "shakespeare"


@pytest.fixture(scope="module")
def train_sample() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_sample", SAMPLES / "train_sample.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sample_bundle(tmp_path_factory) -> Path:
    return export(CHECKPOINT, tmp_path_factory.mktemp("samples") / "shakespeare.bundle", check=False)


def test_samples_when_weighed_then_are_at_most_6_mb():
    shipped = subprocess.run(["git", "ls-files", "-z", "."], cwd=SAMPLES, capture_output=True, text=True, check=True).stdout
    assert sum((SAMPLES / name).stat().st_size for name in shipped.split("\0") if name) <= 6_000_000


def test_checkpoint_when_opened_then_is_what_the_script_trains(train_sample):
    checkpoint = open_checkpoint(CHECKPOINT)
    assert checkpoint.family == "tformer"
    assert checkpoint.config == train_sample.CONFIG
    assert checkpoint.warnings == ()
    assert checkpoint.eos_token_ids == (0,)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == checkpoint.config.vocab_size
    assert tokenizer.token_to_id(train_sample.END) == 0


def test_tokenizer_when_any_text_is_encoded_then_it_comes_back():
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    for text in ("ROMEO:\nO, she doth teach", "  two  spaces \t tab", "Zwölf Jäger – é ☂ 漢字 🎭", "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_checkpoint_when_scored_on_held_out_text_then_has_the_perplexity_that_the_readme_states(train_sample):
    documents = train_sample.read_documents(SAMPLES / "text", seed=0)
    held_out = documents[len(documents) * 9 // 10 :]
    stream = train_sample.encode(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")), held_out)
    loss = train_sample.evaluate(Decoder.from_pretrained(CHECKPOINT), stream)
    perplexity = torch.tensor(loss).exp().item()
    assert f"{loss:.3f} nats a token, perplexity {perplexity:.2f}" in (SAMPLES / "README.md").read_text("utf-8")


def test_train_sample_when_run_for_a_few_steps_twice_then_writes_the_same_checkpoint_and_learns(tmp_path):
    (tmp_path / "text").mkdir()
    text = (SAMPLES / "text" / "tinyshakespeare.txt").read_text("utf-8")
    (tmp_path / "text" / "some.txt").write_text(text[:100_000], "utf-8")
    outputs = []
    for name in ("one", "two"):
        command = [
            sys.executable,
            SAMPLES / "train_sample.py",
            "--steps",
            "6",
            "--text",
            tmp_path / "text",
            "--output",
            tmp_path / name,
        ]
        outputs.append(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines())
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert files == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert [(tmp_path / "one" / f).read_bytes() for f in files] == [(tmp_path / "two" / f).read_bytes() for f in files]
    losses = [float(line.split("loss ")[1].split()[0]) for line in outputs[0] if line.startswith("step ")]
    assert losses[-1] < losses[0]


def test_prompts_when_read_then_have_ids_and_leave_room_for_a_completion():
    rows = [json.loads(line) for line in (SAMPLES / "prompts.jsonl").read_text("utf-8").splitlines()]
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    lengths = [len(tokenizer.encode(row["prompt"]).ids) for row in rows]
    assert len({row["id"] for row in rows}) == len(rows) == 40
    assert min(lengths) == 1
    assert max(lengths) + 64 <= open_checkpoint(CHECKPOINT).config.max_length
    assert len(set(lengths)) > 20


def test_python_session_when_run_on_both_backends_then_says_the_same_and_ends_texts(sample_bundle):
    prompts = ["ROMEO:", "First Citizen: We are", "Good night, good night!"]
    said = {}
    for backend in ("onnxruntime", "torch"):
        command = [sys.executable, SAMPLES / "python_session.py", sample_bundle, *prompts, "--tokens", "60", "--backend", backend]
        said[backend] = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert said["onnxruntime"] == said["torch"]
    *texts, caches = said["onnxruntime"].splitlines()
    assert len(texts) == 3
    for text, prompt in zip(texts, prompts, strict=True):
        assert text[1:].startswith(prompt)
        assert len(text) > len(prompt) + 20
        assert "endoftext" not in text
    assert caches.startswith("lengths [")
    assert len((SAMPLES / "python_session.py").read_text("utf-8").splitlines()) <= 40
