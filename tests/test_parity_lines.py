"""The wider lines of a model that amplifies rounding: when they apply, how wide they are, and what they never touch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import LLAMA_LIKE, hot_decoder

import tformer_deploy
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.seal import seal
from tformer_deploy.parity import Report, check_bundle, judge_again, own_lines
from tformer_deploy.parity.gates import GATES, Gates, judge
from tformer_deploy.parity.oracle import ask
from tformer_deploy.parity.plan import make_plan
from tformer_deploy.reference import Decoder

# Lines that everything finite holds, to see which checks they reach at all.
ABSURD = Gates(1e9, 1e9, -1.0, 1e9, -1.0, 1e9, False, 1e9, 1e9, 1e9)
QUICK = replace(make_plan(LLAMA_LIKE, LLAMA_LIKE.max_length, "quick"), greedy=0)
OF_LOGITS = ("prefill, ragged batch", "decode, teacher-forced", "decode, several tokens at once")


def very_hot(layers: int = 6) -> Decoder:
    """Matrices N(0, 0.6): float32 itself is off by more than the plain line."""
    decoder = hot_decoder(replace(LLAMA_LIKE, n_layers=layers))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return decoder


@pytest.fixture(scope="module")
def amplifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Bundle and checkpoint of such a model."""
    folder = tmp_path_factory.mktemp("hot")
    very_hot().save_pretrained(folder / "hot")
    return tformer_deploy.export(folder / "hot", folder / "hot.bundle", check=False), folder / "hot"


def edited(bundle: Path, path: Path, phase: str, edit) -> Path:
    """A sealed copy with one graph edited."""
    shutil.copytree(bundle, path)
    model = onnx.load(path / f"{phase}.onnx", load_external_data=False)
    edit(model.graph)
    (path / f"{phase}.onnx").write_bytes(model.SerializeToString())
    seal(path)
    return path


def mask_excludes_the_token_itself(graph: onnx.GraphProto) -> None:
    next(n for n in graph.node if n.op_type == "LessOrEqual").op_type = "Less"


def logits_scaled(graph: onnx.GraphProto) -> None:
    node = next(n for n in graph.node if n.op_type == "Gemm")
    next(a for a in node.attribute if a.name == "alpha").f *= 1.0005


def red(report: Report) -> set[tuple[str, str]]:
    return {(c.group, c.metric) for c in report.checks if c.verdict == "red"}


def gates(report: Report) -> dict[tuple[str, str], float | None]:
    return {(c.group, c.metric): c.gate for c in report.checks}


def test_check_when_float32_itself_is_off_then_wider_lines_are_used_and_printed(amplifier, llama_bundle, llama_checkpoint):
    report = check_bundle(*amplifier)
    assert report.passed, red(report)
    assert len([n for n in report.notes if "amplifies rounding" in n]) == 1
    plain, found = gates(check_bundle(llama_bundle, llama_checkpoint)), gates(report)
    assert ("decode caches", "max abs") in {k for k in found if found[k] != plain[k]}
    lines, _ = own_lines(very_hot(), "fp32", QUICK, ask(very_hot(), QUICK))
    assert found["decode caches", "max abs"] == pytest.approx(lines.cache_rows)


def test_own_lines_when_float32_itself_is_off_then_are_4_times_its_distance_from_float64():
    """The same figures, worked out by another path: float32 and float64 side by side, in torch."""
    lines, _ = own_lines(very_hot(), "fp32", QUICK, ask(very_hot(), QUICK))
    decoder, exact = very_hot(), very_hot().double()
    relative, largest = [], 0.0
    with torch.inference_mode():
        for row in QUICK.rows:
            single, double = decoder(torch.tensor([row]))[0].double(), exact(torch.tensor([row]))[0]
            relative += (torch.linalg.vector_norm(single - double, dim=1) / torch.linalg.vector_norm(double, dim=1)).tolist()
            largest = max(largest, float((single - double).abs().max()))
    assert lines.rel_l2_p95 == pytest.approx(4 * float(np.percentile(relative, 95)), rel=1e-2)
    assert lines.max_abs == pytest.approx(4 * largest, rel=1e-2)
    assert lines.rel_l2_p95 > GATES["fp32"].rel_l2_p95
    assert lines.max_abs > GATES["fp32"].max_abs


def test_check_when_lines_are_wider_then_checks_that_hold_the_plain_ones_keep_them(amplifier, llama_bundle, llama_checkpoint):
    report = check_bundle(*amplifier)
    plain = gates(check_bundle(llama_bundle, llama_checkpoint))
    for c in report.checks:
        gate = plain[c.group, c.metric]
        holds = {"<=": c.value <= gate, ">=": c.value >= gate, "==": c.value == gate}[c.relation]
        assert (c.gate == gate) == holds, c
        if c.metric in ("cosine, p5", "same top-1") or "slots" in c.metric or c.group == "poisoned cache slots":
            assert c.gate == gate


@pytest.mark.parametrize(
    ("phase", "edit", "metric"),
    [
        ("decode", mask_excludes_the_token_itself, ("decode, teacher-forced", "max abs")),
        ("decode", logits_scaled, ("decode, teacher-forced", "relative L2, p95")),
        ("prefill", logits_scaled, ("prefill, ragged batch", "relative L2, p95")),
    ],
)
def test_check_when_such_a_model_has_a_wrong_graph_then_is_red_all_the_same(amplifier, tmp_path, phase, edit, metric):
    bundle, checkpoint = amplifier
    report = check_bundle(edited(bundle, tmp_path / "b", phase, edit), checkpoint)
    assert metric in red(report)


def test_check_when_a_plain_model_is_wrong_then_no_line_is_wider(llama_bundle, llama_checkpoint, tmp_path):
    right = check_bundle(llama_bundle, llama_checkpoint)
    report = check_bundle(edited(llama_bundle, tmp_path / "b", "decode", logits_scaled), llama_checkpoint)
    assert not report.passed
    assert report.notes == ()
    assert gates(report) == gates(right)


def test_judge_again_when_lines_are_absurd_then_reaches_distances_alone():
    never = [
        judge("weights", "tensors that differ from the checkpoint", 1, 0, "=="),
        judge("prefill caches", "tensors touched past the prompt", 1, 0, "=="),
        judge("decode caches", "slots changed beside the written one", 1, 0, "=="),
        judge("poisoned cache slots", "max abs", 1e-7, 0.0),
        judge("greedy", "prompt 0: tokens agreed", 63, 64, "=="),
        judge("graphs", "ran to the end", 0, 1, "=="),
        *(judge(group, "cosine, p5", 0.5, 0.99, ">=") for group in OF_LOGITS),
        *(judge(group, "same top-1", 0.5, 1.0, ">=") for group in OF_LOGITS),
    ]
    assert judge_again(never, ABSURD) == never
    wrong = [
        *(judge(group, m, 1.0, 1e-3) for group in OF_LOGITS for m in ("max abs", "relative L2, p95", "mean KL")),
        *(judge(f"{kind} caches", "max abs", 1.0, 1e-4) for kind in ("prefill", "decode", "several-token")),
        judge("each row alone", "prefill: max abs", 1.0, 1e-4),
        judge("each row alone", "decode: max abs", 1.0, 1e-4),
        judge("prefill n+1 against prefill n, decode 1", "max abs", 1.0, 1e-4),
    ]
    assert {c.verdict for c in wrong} == {"red"}
    assert {(c.verdict, c.gate) for c in judge_again(wrong, ABSURD)} == {("green", 1e9)}


def test_judge_again_when_a_check_is_green_or_not_finite_then_stays_as_it_is():
    checks = [judge("decode, teacher-forced", "max abs", v, 1e-3) for v in (1e-4, float("nan"), float("inf"))]
    found = judge_again(checks, ABSURD)
    assert found[0] == checks[0]
    assert [c.verdict for c in found] == ["green", "red", "red"]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_own_lines_when_half_precision_then_never_touch_direction_and_top1(dtype):
    lines, note = own_lines(very_hot(3), dtype, QUICK, ask(very_hot(3), QUICK))
    plain = GATES[dtype]
    assert f"amplifies {dtype} rounding" in note
    kept = ("cosine_p5", "margin", "top1_agreement", "greedy_exact")
    assert [getattr(lines, k) for k in kept] == [getattr(plain, k) for k in kept]
    assert all(getattr(lines, k) >= getattr(plain, k) for k in ("max_abs", "rel_l2_p95", "mean_kl", "cache_rows", "step"))


def test_own_lines_when_model_does_not_amplify_then_are_the_plain_gates():
    decoder = hot_decoder(LLAMA_LIKE)
    assert own_lines(hot_decoder(LLAMA_LIKE), "fp32", QUICK, ask(decoder, QUICK)) == (GATES["fp32"], "")


def test_bundle_when_opened_again_then_is_untouched_by_its_checks(amplifier):
    bundle, checkpoint = amplifier
    core = open_bundle(bundle).core_sha256
    check_bundle(bundle, checkpoint)
    assert open_bundle(bundle, verify="full").core_sha256 == core
