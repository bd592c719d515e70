"""What the tests of bad input share: a tiny checkpoint to spoil, the command line's promise, and sweeps over damaged bytes."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tformer_deploy.checkpoints.safetensors_file import write_safetensors
from tformer_deploy.cli import run
from tformer_deploy.errors import TformerError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QUERY = "model.layers.1.self_attn.q_proj.weight"  # [16, 16]


def llama_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of ``CONFIG`` under their stored names."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (24, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (24, 16),
    }
    for i in range(2):
        block = f"model.layers.{i}"
        shapes |= {f"{block}.{name}.weight": (16,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{block}.self_attn.{name}_proj.weight": (16, 16) for name in ("q", "o")}
        shapes |= {f"{block}.self_attn.{name}_proj.weight": (8, 16) for name in ("k", "v")}
        shapes |= {f"{block}.mlp.{name}_proj.weight": (12, 16) for name in ("gate", "up")} | {
            f"{block}.mlp.down_proj.weight": (16, 12)
        }
    return {
        name: torch.randn(shape, generator=generator) * (0.15 if len(shape) > 1 else 0.2) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def write_llama(path: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """A complete checkpoint; a change to ``KeyError`` removes the key."""
    path.mkdir(parents=True, exist_ok=True)
    write_safetensors(path / "model.safetensors", llama_tensors() if tensors is None else tensors)
    write_config(path, **changes)
    return path


def write_config(path: Path, **changes: Any) -> Path:
    """``CONFIG`` with changes."""
    config = {key: value for key, value in (CONFIG | changes).items() if value is not KeyError}
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return path


def write_shards(path: Path) -> Path:
    """The same checkpoint in two files and an index."""
    path.mkdir(parents=True, exist_ok=True)
    write_config(path)
    names = sorted(tensors := llama_tensors())
    weight_map = {}
    for number, part in enumerate((names[:10], names[10:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        write_safetensors(path / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), "utf-8")
    return path


WORDS = {f"w{i}": i for i in range(3, 24)}


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    """Words between spaces; ids 0 to 23, as ``CONFIG`` has them."""
    special = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, text in enumerate(("<unk>", "<s>", "</s>"))
    ]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "<s>": 1, "</s>": 2} | WORDS, "unk_token": "<unk>"},
    } | changes  # fmt: skip


class Console:
    """Runs commands in this process and checks what every refusal promises.

    Args:
        capsys: pytest's.
        output: A folder of its own for what the commands write.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str], output: Path) -> None:
        self.capsys, self.output = capsys, output
        output.mkdir()

    def run(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        self.capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err

    def refused(self, code: int, words: tuple[str, ...], *arguments: object) -> str:
        """The last line of stderr: it says what, where and what to do next, and nothing is left behind."""
        found, out, err = self.run(*arguments)
        last = err.rstrip("\n").split("\n")[-1]
        assert (found, out) == (code, ""), err[-2000:]
        assert last.startswith("Error: "), err[-2000:]
        assert last.isprintable()
        assert len(last) < 4000
        assert " → " in last, f"no next step: {last}"
        for word in words:
            assert word in last, last
        for trace in ("Traceback", "RecursionError", "panicked", "defect of tformer-deploy"):
            assert trace not in err, err
        assert not list(self.output.iterdir()), "something was left behind"
        return last

    def export_refused(self, checkpoint: object, *words: str) -> str:
        """``export`` refuses the checkpoint with 3."""
        return self.refused(3, words, "export", checkpoint, "-o", self.output / "bundle", "--no-check")


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Console:
    """A console of this test."""
    return Console(capsys, tmp_path / "output")


@contextlib.contextmanager
def little_memory(mib: int = 512) -> Iterator[None]:
    """No more than this on top of what the process has mapped already: what would fill the memory fails instead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (mib << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def cuts(data: bytes, step: int = 1) -> Iterator[bytes]:
    """Everything that is left when the end is missing, the shortest first."""
    return (data[:end] for end in range(0, len(data), step))


def flips(data: bytes, step: int, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """One bit flipped, every ``step``-th one of the first ``end`` bytes; a step prime to 8 meets every bit of a byte."""
    assert step % 2
    for bit in range(0, 8 * (len(data) if end is None else end), step):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(damaged)


def sweep(pieces: Iterator[Any], attempt: Callable[[Any], Any], limit_mib: int = 512) -> list[Any]:
    """What each attempt gave: a result, or the refusal; any other exception, and any explosion of memory, fails."""
    results: list[Any] = []
    with little_memory(limit_mib):
        for piece in pieces:
            try:
                results.append(attempt(piece))
            except TformerError as e:
                results.append(e)
    for refusal in (str(r) for r in results if isinstance(r, TformerError)):
        assert refusal.isprintable()
        assert len(refusal) < 8000
    return results
