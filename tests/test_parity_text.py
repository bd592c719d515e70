"""Perplexity on a text: the figure, its gates from both sides, and texts that cannot be used."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from conftest import LLAMA_LIKE, ROOT, hot_decoder

from tformer_deploy import cli
from tformer_deploy.backends.torch import TorchBackend
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.seal import seal
from tformer_deploy.errors import InputError
from tformer_deploy.generation import load_tokenizer
from tformer_deploy.parity.candidate import Candidate
from tformer_deploy.parity.comparisons.perplexity import perplexity
from tformer_deploy.parity.gates import GATES, Check
from tformer_deploy.parity.metrics import negative_log_likelihood
from tformer_deploy.parity.oracle import ask
from tformer_deploy.parity.plan import Plan, make_plan
from tformer_deploy.parity.text import WINDOW, WINDOWS, Text, cut, read_beginning
from tformer_deploy.reference import Decoder

DECODE, PREFILL = "decode: distance of the ratio from 1", "prefill: distance of the ratio from 1"


def ids(count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(3).integers(0, LLAMA_LIKE.vocab_size, count)]


def plan_of(text: Text) -> Plan:
    quick = make_plan(LLAMA_LIKE, LLAMA_LIKE.max_length, "quick", text)
    return replace(quick, rows=quick.rows[:1], lengths=quick.lengths[:1], greedy=0)


def compared(backend: TorchBackend, text: Text, dtype: str = "fp32") -> dict[str, Check]:
    plan = plan_of(text)
    answers = ask(hot_decoder(LLAMA_LIKE), plan)
    return {c.metric: c for c in perplexity(Candidate(backend, dtype, plan, answers))}


def text(count: int = 300) -> Text:
    return cut("t", ids(count), LLAMA_LIKE, LLAMA_LIKE.max_length)


def test_likelihood_when_compared_with_torch_in_float64_then_is_equal():
    logits = np.random.default_rng(0).normal(0, 4, (30, 50)).astype(np.float32)
    targets = [int(i) for i in np.random.default_rng(1).integers(0, 50, 30)]
    wanted = torch.nn.functional.cross_entropy(torch.tensor(logits).double(), torch.tensor(targets), reduction="none")
    assert negative_log_likelihood(logits, targets) == pytest.approx(wanted.numpy(), rel=1e-12)
    logits[4, 7] = np.nan
    assert math.isnan(negative_log_likelihood(logits, targets)[4])


def test_perplexity_when_the_backend_is_right_then_is_green_and_is_torchs_own_figure():
    backend = TorchBackend(hot_decoder(LLAMA_LIKE))
    found = compared(backend, text())
    assert {c.verdict for c in found.values()} == {"green"}
    windows, likelihoods = text().windows, []
    assert [len(w) for w in windows] == [256, 44]
    with torch.inference_mode():
        for window in windows:
            logits = backend.decoder(torch.tensor([window]))[0, :-1].double()
            likelihoods.append(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="none"))
    first = torch.cat([x[: len(w) // 2] for x, w in zip(likelihoods, windows, strict=True)])
    second = torch.cat([x[len(w) // 2 :] for x, w in zip(likelihoods, windows, strict=True)])
    for metric, part in ((PREFILL, first), (DECODE, second)):
        reference = float(part.mean().exp())
        assert f"against {reference:.6g} over {len(part)} tokens" in found[metric].detail
    assert found["tokens compared"].value == 255 + 43


class Shifted(TorchBackend):
    """The token that comes is made likelier, or less likely, in one graph."""

    def __init__(self, graph: str, by: float) -> None:
        super().__init__(hot_decoder(LLAMA_LIKE))
        self.graph, self.by = graph, by
        self.following = {w[:i]: w[i] for w in text().windows for i in range(1, len(w))}

    def prefill(self, input_ids, logit_positions, cache):
        logits = super().prefill(input_ids, logit_positions, cache)
        if self.graph == "prefill":
            row = tuple(int(i) for i in input_ids[0])
            for i in range(len(row)):
                logits[0, i, self.following[row[: i + 1]]] += self.by
        self.past = tuple(int(i) for i in input_ids[0])
        return logits

    def decode(self, input_ids, past_lengths, logit_positions, cache):
        logits = super().decode(input_ids, past_lengths, logit_positions, cache)
        if self.graph == "decode":
            row = self.past + tuple(int(i) for i in input_ids[0])
            for i in range(input_ids.shape[1]):
                logits[0, i, self.following[row[: len(self.past) + i + 1]]] += self.by
        return logits


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("sign", [1, -1], ids=["better", "worse"])
@pytest.mark.parametrize("graph", ["prefill", "decode"])
def test_perplexity_when_it_is_off_to_either_side_then_is_red_and_just_inside_is_green(graph, sign, dtype):
    """A graph that sees the token it is to predict is better than the reference, and as wrong."""
    for size, verdict in ((0.8, "green"), (1.3, "red")):
        found = compared(Shifted(graph, sign * size * GATES[dtype].perplexity), text(), dtype)
        wrong, other = (PREFILL, DECODE) if graph == "prefill" else (DECODE, PREFILL)
        assert found[wrong].verdict == verdict, found[wrong]
        assert found[other].verdict == "green"


def test_perplexity_when_a_logit_is_nan_then_is_red():
    found = compared(Shifted("decode", math.nan), text())
    assert found[DECODE].verdict == "red"


@pytest.mark.parametrize("count", [0, 1])
def test_perplexity_when_there_is_nothing_to_predict_then_is_red(count):
    found = compared(TorchBackend(hot_decoder(LLAMA_LIKE)), text(count))
    assert {c.verdict for c in found.values()} == {"red"}
    assert found["tokens compared"].value == 0


def test_perplexity_when_there_are_two_tokens_then_decode_has_none_and_is_red():
    """Nothing compared is never green; a real text is longer."""
    found = compared(TorchBackend(hot_decoder(LLAMA_LIKE)), text(2))
    assert found[PREFILL].verdict == "green"
    assert found[DECODE].verdict == "red"


def test_cut_when_the_text_is_long_then_windows_are_bounded():
    found = cut("t", ids(100_000), LLAMA_LIKE, 4096)
    assert [len(w) for w in found.windows] == [WINDOW] * WINDOWS
    assert found.predicted == WINDOWS * (WINDOW - 1)
    short = cut("t", ids(25), LLAMA_LIKE, 12)
    assert [len(w) for w in short.windows] == [12, 12]
    assert sum(short.windows, ()) == tuple(ids(25)[:24])


def test_cut_when_the_tokenizer_is_larger_than_the_model_then_is_refused():
    with pytest.raises(InputError, match="the id 131 for t; the model's ids go from 0 to 130"):
        cut("t", [5, 131], LLAMA_LIKE, 256)


def test_beginning_when_the_file_is_huge_or_cut_in_a_character_then_only_whole_ones_are_read(tmp_path):
    (tmp_path / "t").write_text("a" + "é" * 400_000, "utf-8")
    found = read_beginning(tmp_path / "t")
    assert found == "a" + "é" * (256 * 1024 // 2 - 1)


@pytest.mark.parametrize(
    ("content", "words"), [(b"ab\xffc", "not UTF-8: byte 2"), (b"ab\xc3", "not UTF-8: byte 2"), (None, "is no file")]
)
def test_beginning_when_the_file_is_no_text_then_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "t"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_beginning(path)


@pytest.fixture(scope="module")
def talker(llama_bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a tokenizer: bytes below 131, one id each."""
    path = tmp_path_factory.mktemp("text") / "b"
    shutil.copytree(llama_bundle, path)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[: LLAMA_LIKE.vocab_size]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    (path / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    seal(path)
    return path


def test_check_when_a_text_is_given_then_its_perplexity_is_in_the_report(capsys, talker, llama_checkpoint):
    source = ROOT / "LICENSE"
    code = cli.run(["check", str(talker), "--checkpoint", str(llama_checkpoint), "--text", str(source), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    checks = {c["metric"]: c for c in report["checks"] if c["group"] == "perplexity"}
    assert set(checks) == {"tokens compared", PREFILL, DECODE}
    assert checks[PREFILL]["gate"] == GATES["fp32"].perplexity
    assert checks["tokens compared"]["value"] == WINDOWS * (WINDOW - 1)
    # The figure itself, from the ids and the checkpoint.
    ids = load_tokenizer(open_bundle(talker)).encode(source.read_text("utf-8"))[: WINDOW * WINDOWS]
    decoder, likelihoods = Decoder.from_pretrained(llama_checkpoint), []
    with torch.inference_mode():
        for start in range(0, len(ids), WINDOW):
            window = torch.tensor([ids[start : start + WINDOW]])
            logits = decoder(window)[0, : WINDOW // 2].double()
            likelihoods.append(torch.nn.functional.cross_entropy(logits, window[0, 1 : WINDOW // 2 + 1], reduction="none"))
    assert f"against {float(torch.cat(likelihoods).mean().exp()):.6g}" in checks[PREFILL]["detail"]


def test_check_when_the_text_is_empty_then_is_red_and_exit_1(capsys, talker, llama_checkpoint, tmp_path):
    (tmp_path / "empty.txt").touch()
    code = cli.run(["check", str(talker), "--checkpoint", str(llama_checkpoint), "--text", str(tmp_path / "empty.txt")])
    assert code == 1
    assert "tokens compared" in capsys.readouterr().out


@pytest.mark.parametrize("fault", ["no tokenizer", "no file", "a folder", "not UTF-8"])
def test_check_when_the_text_cannot_be_used_then_exit_3_and_says_why(
    capsys, llama_bundle, llama_checkpoint, talker, tmp_path, fault
):
    path = tmp_path / "t.txt"
    if fault in ("no tokenizer", "not UTF-8"):
        path.write_bytes(b"text" if fault == "no tokenizer" else b"\xff\xfe\0")
    if fault == "a folder":
        path.mkdir()
    bundle = llama_bundle if fault == "no tokenizer" else talker
    code = cli.run(["check", str(bundle), "--checkpoint", str(llama_checkpoint), "--text", str(path)])
    error = capsys.readouterr().err
    assert code == 3
    assert "tokenizer.json" in error if fault == "no tokenizer" else str(path) in error
    assert "Traceback" not in error
