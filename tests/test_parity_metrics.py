"""The figures against independent computations, and every line from both sides."""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import LLAMA_LIKE

from tformer_deploy.parity.comparisons.logits import logit_checks
from tformer_deploy.parity.gates import GATES, Check, judge
from tformer_deploy.parity.metrics import LogitMetrics, compare_logits, margin_of, max_abs
from tformer_deploy.parity.plan import make_plan
from tformer_deploy.parity.report import Report

DTYPES = ("fp32", "fp16", "bf16")
NAMES = {
    "max_abs": "max abs",
    "rel_l2_p95": "relative L2, p95",
    "cosine_p5": "cosine, p5",
    "mean_kl": "mean KL",
    "top1_agreement": "same top-1",
}
PERFECT = LogitMetrics(
    positions=100, max_abs=0.0, rel_l2_p95=0.0, cosine_p5=1.0, mean_kl=0.0, top1_agreement=1.0, top1_positions=100
)


def pair(seed: int = 0, rows: int = 40, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    want = random.normal(0, 3, (rows, 50)).astype(np.float32)
    return want, (want + random.normal(0, noise, want.shape)).astype(np.float32)


def verdicts(metrics: LogitMetrics, dtype: str) -> dict[str, str]:
    return {c.metric: c.verdict for c in logit_checks("g", metrics, GATES[dtype])}


def test_gates_when_read_then_are_the_published_table():
    assert {d: dataclasses.astuple(GATES[d]) for d in GATES} == {
        #        max abs, rel. L2, cosine, margin, top-1, mean KL, greedy exact, cache rows, step, perplexity
        "fp32": (1e-3, 1e-5, 0.99999, 0.1, 1.0, 1e-7, True, 1e-4, 1e-4, 1e-5),
        "fp16": (0.12, 0.01, 0.999, 0.1, 0.99, 5e-4, False, 1e-2, 1e-2, 1e-3),
        "bf16": (0.5, 0.05, 0.99, 0.5, 0.99, 5e-3, False, 1.6e-2, 2e-2, 5e-3),
    }


def test_metrics_when_compared_with_torch_in_float64_then_are_equal():
    want, have = pair()
    found = compare_logits([want[:7], want[7:]], [have[:7], have[7:]], 0.1)
    w, h = torch.tensor(want).double(), torch.tensor(have).double()
    top = w.topk(2).values
    clear = top[:, 0] - top[:, 1] >= 0.1
    assert 0 < clear.sum() < len(w)
    assert found.positions == 40
    assert found.top1_positions == int(clear.sum())
    kl = torch.nn.functional.kl_div(h.log_softmax(-1), w.log_softmax(-1), log_target=True, reduction="batchmean")
    cosine = torch.nn.functional.cosine_similarity(w, h)
    relative = torch.linalg.vector_norm(h - w, dim=1) / torch.linalg.vector_norm(w, dim=1)
    assert found.max_abs == float((w - h).abs().max())
    assert found.mean_kl == pytest.approx(float(kl), rel=1e-12)
    assert found.cosine_p5 == pytest.approx(float(cosine.quantile(0.05)), rel=1e-14)
    assert found.rel_l2_p95 == pytest.approx(float(relative.quantile(0.95)), rel=1e-14)
    assert found.top1_agreement == float((w.argmax(-1) == h.argmax(-1))[clear].double().mean())


def test_metrics_when_worked_out_by_hand_then_are_equal():
    want, have = np.array([[3.0, 4.0]], np.float32), np.array([[4.0, 3.0]], np.float32)
    found = compare_logits([want], [have], 1.0)
    assert found.max_abs == 1.0
    assert found.rel_l2_p95 == pytest.approx(math.sqrt(2) / 5, rel=1e-15)
    assert found.cosine_p5 == pytest.approx(float(Fraction(24, 25)), rel=1e-15)
    p = 1 / (1 + math.e)
    assert found.mean_kl == pytest.approx(p * math.log(p / (1 - p)) + (1 - p) * math.log((1 - p) / p), rel=1e-14)
    assert (found.top1_agreement, found.top1_positions) == (0.0, 1)
    assert compare_logits([want], [have], 1.01).top1_positions == 0


def test_metrics_when_logits_are_huge_then_float64_keeps_what_float32_loses():
    want = np.array([[3e38, -3e38]], np.float32)
    found = compare_logits([want], [-want], 0.1)
    assert found.max_abs == pytest.approx(6e38, rel=1e-6)
    assert found.cosine_p5 == pytest.approx(-1.0)
    assert math.isfinite(found.mean_kl)


def test_one_bad_position_when_all_others_are_perfect_then_the_maximum_sees_it():
    want, _ = pair(rows=1000)
    have = want.copy()
    have[613, 7] += 0.5
    assert compare_logits([want], [have], 0.1).max_abs == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["wanted", "found", "both"])
def test_metrics_when_one_value_is_not_finite_then_logits_are_red(bad, side):
    want, have = pair(noise=0.0)
    if side in ("wanted", "both"):
        want[3, 4] = bad
    if side in ("found", "both"):
        have[3, 4] = bad
    found = verdicts(compare_logits([want], [have], 0.1), "bf16")
    assert {m: v for m, v in found.items() if m != "same top-1"} == dict.fromkeys(
        ["max abs", "relative L2, p95", "cosine, p5", "mean KL"], "red"
    )


def test_metrics_when_nothing_was_compared_then_all_are_red():
    for nothing in ([], [np.zeros((0, 50), np.float32)]):
        assert set(verdicts(compare_logits(nothing, nothing, 0.1), "bf16").values()) == {"red"}


def test_metrics_when_the_candidate_gives_zeros_then_are_red():
    want, _ = pair()
    found = verdicts(compare_logits([want], [np.zeros_like(want)], 0.1), "bf16")
    assert set(found.values()) == {"red"}
    assert compare_logits([np.zeros_like(want)], [want], 0.1).cosine_p5 == 0.0


def test_metrics_when_a_row_is_missing_then_nothing_is_judged():
    want, have = pair()
    with pytest.raises(ValueError, match="zip"):
        compare_logits([want], [have, have], 0.1)
    with pytest.raises(AssertionError):
        compare_logits([want], [have[:-1]], 0.1)


def test_top1_when_no_reference_margin_is_wide_enough_then_is_reported_and_not_green():
    flat = np.zeros((5, 50), np.float32)
    flat[:, 3] = 0.01
    found = verdicts(compare_logits([flat], [flat], 0.1), "fp32")
    assert found.pop("same top-1") == "reported"
    assert set(found.values()) == {"green"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("field", NAMES)
def test_gate_when_just_past_the_line_then_is_red_and_just_inside_is_green(field, dtype):
    line = getattr(GATES[dtype], field)
    above, below = np.nextafter(line, math.inf), np.nextafter(line, -math.inf)
    outside, inside = (below, above) if field in ("cosine_p5", "top1_agreement") else (above, below)
    for value, verdict in ((line, "green"), (inside, "green"), (outside, "red"), (math.nan, "red")):
        found = verdicts(dataclasses.replace(PERFECT, **{field: float(value)}), dtype)
        assert found.pop(NAMES[field]) == verdict
        assert set(found.values()) == {"green"}


@pytest.mark.parametrize(("field", "size"), [("max_abs", 0.9), ("max_abs", 1.1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_when_real_logits_cross_it_then_the_verdict_changes(field, size, dtype):
    want = np.full((10, 50), 8.0, np.float64)
    want[:, 7] = 16.0
    have = want.copy()
    have[4, 9] += size * GATES[dtype].max_abs
    found = verdicts(compare_logits([want], [have], GATES[dtype].margin), dtype)
    assert found["max abs"] == ("green" if size < 1 else "red")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("relation", ["<=", ">=", "=="])
def test_judge_when_value_or_gate_is_not_finite_then_is_red(value, relation):
    assert judge("g", "m", value, 1.0, relation).verdict == "red"
    assert judge("g", "m", value, value, relation).verdict == "red"
    assert judge("g", "m", 1.0, value, relation).verdict == "red"


@pytest.mark.parametrize(
    ("value", "relation", "verdict"),
    [
        (1.0, "<=", "green"),
        (1.0, ">=", "green"),
        (1.0, "==", "green"),
        (1.5, "<=", "red"),
        (0.5, ">=", "red"),
        (2.0, "==", "red"),
    ],
)
def test_judge_when_value_stands_to_the_gate_then_the_relation_decides(value, relation, verdict):
    assert judge("g", "m", value, 1.0, relation).verdict == verdict


def test_max_abs_when_it_cannot_be_known_then_is_nan():
    one = np.ones((2, 3), np.float32)
    assert max_abs(one, one + np.float32(0.5)) == 0.5
    for other in (np.ones((2, 4), np.float32), np.full((2, 3), np.nan, np.float32), np.full((2, 3), np.inf, np.float32)):
        assert math.isnan(max_abs(one, other))
    assert math.isnan(max_abs(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32)))
    assert math.isnan(max_abs(np.full(2, np.inf, np.float32), np.full(2, np.inf, np.float32)))


def test_margin_when_asked_then_is_the_distance_of_the_best_two():
    assert margin_of(np.array([1.0, 4.0, 3.5], np.float32)) == 0.5
    assert margin_of(np.array([2.0, 2.0], np.float32)) == 0.0
    assert margin_of(np.array([2.0], np.float32)) == math.inf


def report(*checks: Check, complete: bool = True) -> Report:
    return Report("b", "0" * 64, "fp32", "quick", "c", checks, (), complete, 1.0)


def test_report_when_verdicts_are_mixed_then_one_red_is_red():
    green, red = judge("g", "m", 0, 1), judge("g", "m", 2, 1)
    near = Check("greedy", "m", 3, 64, "==", "ambiguous")
    assert report(green, near).passed
    assert report(green, near).verdict == "green"
    assert not report(green, red).passed
    assert report(green, red).verdict == "red"
    assert report(red, complete=False).verdict == "red"


def test_report_when_nothing_was_checked_then_is_red():
    assert not report().passed
    assert report().verdict == "red"


def test_report_when_no_checkpoint_was_given_then_is_never_green():
    found = report(judge("g", "m", 0, 1), complete=False)
    assert not found.passed
    assert found.verdict == "self-consistent only"


def test_report_when_values_are_not_finite_then_its_json_is_still_json():
    checks = (judge("g", "m", math.nan, 1), judge("g", "n", math.inf, math.inf), Check("g", "o", 1.0, None, "==", "reported"))
    text = json.dumps(report(*checks).to_json(), allow_nan=False)
    found = json.loads(text)["checks"]
    assert [(c["value"], c["gate"], c["verdict"]) for c in found] == [
        (None, 1, "red"),
        (None, None, "red"),
        (1.0, None, "reported"),
    ]


@pytest.mark.parametrize("suite", ["quick", "full"])
def test_plan_when_the_model_is_short_then_rows_fit_and_stay_ragged(suite):
    for limit in range(1, 200):
        plan = make_plan(LLAMA_LIKE, limit, suite)
        assert plan.capacity == max(len(row) for row in plan.rows) <= limit
        assert [len(row) for row in plan.rows] == [n + plan.steps for n in plan.lengths]
        assert min(plan.lengths) == 1
        assert max(plan.lengths[:2]) + plan.greedy <= limit
        assert (len(set(plan.lengths)) > 1) == (limit > 2)
        assert (plan.steps > 0) == (limit > 1)
        assert max(max(row) for row in plan.rows) < LLAMA_LIKE.vocab_size
    assert (plan.steps, plan.greedy) == ({"quick": 6, "full": 16}[suite], 64)
