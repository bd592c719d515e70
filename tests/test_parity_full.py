"""What only the full suite compares: each comparison is green on a right backend and red on one that is wrong in that point.

The backend under test is the PyTorch reference itself with one fault in it, so that nothing else can be red.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import LLAMA_LIKE, hot_decoder

from tformer_deploy import cli
from tformer_deploy.backends.onnxruntime import OnnxRuntimeBackend
from tformer_deploy.backends.torch import TorchBackend, TorchCache
from tformer_deploy.config import DType, ModelConfig
from tformer_deploy.parity import check_bundle
from tformer_deploy.parity.candidate import Candidate
from tformer_deploy.parity.comparisons import compare
from tformer_deploy.parity.comparisons.edges import edges
from tformer_deploy.parity.comparisons.greedy import judge_tokens
from tformer_deploy.parity.comparisons.levels import levels, trace
from tformer_deploy.parity.comparisons.slots import reused
from tformer_deploy.parity.comparisons.two_ways import two_turns
from tformer_deploy.parity.gates import GATES, Check
from tformer_deploy.parity.oracle import Oracle, ask
from tformer_deploy.parity.plan import Plan, make_plan

PLAN = replace(make_plan(LLAMA_LIKE, LLAMA_LIKE.max_length, "full"), greedy=0)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return ask(hot_decoder(LLAMA_LIKE), PLAN)


def candidate(backend: TorchBackend, oracle: Oracle, plan: Plan = PLAN, dtype: DType = "fp32") -> Candidate:
    return Candidate(backend, dtype, plan, oracle)


def right() -> TorchBackend:
    return TorchBackend(hot_decoder(LLAMA_LIKE))


def red(checks: Sequence[Check]) -> set[tuple[str, str]]:
    return {(c.group, c.metric) for c in checks if c.verdict == "red"}


def test_full_suite_when_the_backend_is_right_then_all_is_green(oracle):
    checks = list(compare(candidate(right(), oracle), "full"))
    assert {c.verdict for c in checks} == {"green"}
    groups = {c.group for c in checks}
    assert groups >= {"bucket edges", "two turns", "two turns against one shot", "allocated and reused slots"}
    assert not groups & {"perplexity"}


def test_quick_suite_when_run_then_leaves_the_full_ones_out(oracle):
    groups = {c.group for c in compare(candidate(right(), oracle), "quick")}
    assert not groups & {"bucket edges", "two turns", "two turns against one shot", "allocated and reused slots"}


# --- Edges of a capacity --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "lengths"),
    [
        (4096, [127, 128, 129, 255, 256, 257]),
        (256, [127, 128, 129, 255, 256]),
        (200, [127, 128, 129, 199, 200]),
        (300, [127, 128, 129, 255, 256, 257, 299, 300]),
        (128, [127, 128]),
        (40, [39, 40]),
        (2, [1, 2]),
        (1, [1]),
    ],
)
def test_plan_when_full_then_prompts_meet_every_edge_of_the_runtimes_capacities(limit, lengths):
    config = replace(LLAMA_LIKE, max_length=limit)
    plan = make_plan(config, limit, "full")
    assert [row.prompt for row in plan.edges] == lengths
    assert all(row.prompt <= len(row.ids) <= limit for row in plan.edges)
    assert all(row.steps == min(2, limit - row.prompt) for row in plan.edges)
    assert make_plan(config, limit, "quick").edges == ()


def windowed(window: int) -> ModelConfig:
    return replace(LLAMA_LIKE, window=window, window_layers=(0, 2))


@pytest.mark.parametrize(("window", "prompt"), [(8, 9), (150, 151), (255, 256), (256, None), (5000, None)])
def test_plan_when_the_model_has_windows_then_a_prompt_is_one_longer(window, prompt):
    config = windowed(window)
    lengths = [row.prompt for row in make_plan(config, config.max_length, "full").edges]
    assert (prompt in lengths) == (prompt is not None)
    assert lengths == sorted({127, 128, 129, 255, 256, *([prompt] if prompt else [])})
    long = replace(config, max_length=100_000)
    assert (window + 1 in [row.prompt for row in make_plan(long, 100_000, "full").edges]) == (window <= 4096)


def test_edges_when_a_window_is_one_too_wide_then_are_red():
    """No row of the ragged batch is as long."""
    config = windowed(150)
    plan = replace(make_plan(config, config.max_length, "full"), greedy=0)
    answers = ask(hot_decoder(config), plan)
    assert not red(edges(candidate(TorchBackend(hot_decoder(config)), answers, plan)))
    for other in (149, 151):
        wrong = candidate(TorchBackend(hot_decoder(windowed(other))), answers, plan)
        found = red(list(compare(wrong, "full")))
        assert ("bucket edges", "max abs") in found
        assert {group for group, _ in found} == {"bucket edges"}


def test_check_when_windows_are_longer_than_every_row_then_says_so(tmp_path):
    from tformer_deploy import api

    hot_decoder(windowed(100)).save_pretrained(tmp_path / "c")
    bundle = api.export(tmp_path / "c", tmp_path / "b", check=False)
    (note,) = check_bundle(bundle, tmp_path / "c").notes
    assert "Windows of 100 tokens are longer than every row here (39 at most)" in note
    assert "Run the full suite" in note
    full = check_bundle(bundle, tmp_path / "c", suite="full")
    assert full.passed
    assert full.notes == ()


class LosesTheLastSlotWhenGrown(TorchBackend):
    """A cache that is full and must grow forgets its newest token."""

    def allocate(self, batch: int, capacity: int) -> TorchCache:
        class Cache(TorchCache):
            def resize(self, rows: Sequence[int], capacity: int) -> TorchCache:
                grown = super().resize(rows, capacity)
                if capacity > self.capacity:
                    for tensor in grown.tensors:
                        tensor[:, :, self.capacity - 1] = 0
                return grown

        return Cache(super().allocate(batch, capacity).tensors)


class WrongPastABucket(TorchBackend):
    """Right in caches of the first bucket, wrong in larger ones."""

    def prefill(self, input_ids, logit_positions, cache):
        logits = super().prefill(input_ids, logit_positions, cache)
        return logits + 0.01 if cache.capacity > 128 else logits


class MixesLongRows(TorchBackend):
    """A row in a batch gets a little of its neighbour, but only in a large cache."""

    def prefill(self, input_ids, logit_positions, cache):
        logits = super().prefill(input_ids, logit_positions, cache)
        if len(logits) > 1 and cache.capacity > 128:
            logits = logits + 1e-3 * logits[::-1]
        return logits

    def decode(self, input_ids, past_lengths, logit_positions, cache):
        logits = super().decode(input_ids, past_lengths, logit_positions, cache)
        return logits + 1e-3 * logits[::-1] if len(logits) > 1 else logits


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        (LosesTheLastSlotWhenGrown, "bucket edges"),
        (WrongPastABucket, "bucket edges"),
        (MixesLongRows, "bucket edges, each row alone"),
    ],
)
def test_edges_when_the_backend_is_wrong_there_then_are_red(oracle, kind, group):
    assert (group, "max abs") in red(edges(candidate(kind(hot_decoder(LLAMA_LIKE)), oracle)))


def test_edges_when_there_is_no_row_then_are_red(oracle):
    nothing = replace(oracle, edges=[])
    found = red(edges(candidate(right(), nothing, replace(PLAN, edges=()))))
    assert {("bucket edges", "rows compared"), ("bucket edges", "max abs")} <= found


# --- Two turns ------------------------------------------------------------------------------------------------------------


class SecondTurnIsWrong(TorchBackend):
    """Several tokens at once on a cache of ragged rows start where the longest row ends."""

    def decode(self, input_ids, past_lengths, logit_positions, cache):
        if input_ids.shape[1] > 1:
            past_lengths = np.minimum(past_lengths + 1, cache.capacity - input_ids.shape[1])
        return super().decode(input_ids, past_lengths, logit_positions, cache)


def test_two_turns_when_the_second_one_is_wrong_then_are_red(oracle):
    assert not red(two_turns(candidate(right(), oracle)))
    found = red(two_turns(candidate(SecondTurnIsWrong(hot_decoder(LLAMA_LIKE)), oracle)))
    assert found >= {
        ("two turns against one shot", "max abs"),
        ("two turns against one shot", "one token later: max abs"),
        ("two turns", "max abs"),
    }


# --- Slots ----------------------------------------------------------------------------------------------------------------


class NeverZeroed(TorchBackend):
    """Memory as it comes."""

    def allocate(self, batch: int, capacity: int) -> TorchCache:
        cache = super().allocate(batch, capacity)
        for tensor in cache.tensors:
            tensor.fill_(0.5)
        return cache


class NotANumberInMemory(TorchBackend):
    """Memory as it may come."""

    def allocate(self, batch: int, capacity: int) -> TorchCache:
        cache = super().allocate(batch, capacity)
        cache.tensors[3][:, :, -1] = math.nan
        return cache


class GrownSlotsAreDirty(TorchBackend):
    """Copies into memory as it comes."""

    def allocate(self, batch: int, capacity: int) -> TorchCache:
        class Cache(TorchCache):
            def resize(self, rows: Sequence[int], capacity: int) -> TorchCache:
                grown = super().resize(rows, capacity)
                grown.tensors[0][:, :, self.capacity :] = 1
                return grown

        return Cache(super().allocate(batch, capacity).tensors)


class SeesWhatAnotherRowLeft(TorchBackend):
    """The mask of decode ends one slot too late."""

    def decode(self, input_ids, past_lengths, logit_positions, cache):
        stale = [t[np.arange(len(past_lengths)), :, np.minimum(past_lengths + 1, cache.capacity - 1)] for t in cache.tensors]
        return super().decode(input_ids, past_lengths, logit_positions, cache) + 1e-4 * float(sum(s.sum() for s in stale))


@pytest.mark.parametrize(
    ("kind", "metrics"),
    [
        (NeverZeroed, {"slots not zero when allocated"}),
        (NotANumberInMemory, {"slots not zero when allocated", "values not finite after reuse"}),
        (GrownSlotsAreDirty, {"slots not zero when grown"}),
        (SeesWhatAnotherRowLeft, {"reused against fresh: max abs"}),
    ],
)
def test_slots_when_they_are_not_clean_then_are_red(oracle, kind, metrics):
    found = {metric for _, metric in red(reused(candidate(kind(hot_decoder(LLAMA_LIKE)), oracle)))}
    assert metrics <= found


# --- Optimisation levels ----------------------------------------------------------------------------------------------------


def test_levels_when_both_give_the_same_then_are_green_and_a_small_difference_is_red(oracle):
    plain = candidate(right(), oracle)
    deployed = trace(candidate(right(), oracle))
    assert deployed.shape == (8, 4, LLAMA_LIKE.vocab_size)
    assert not red(levels(plain, deployed))
    assert red(levels(plain, deployed + np.float32(2e-4))) == {("two optimisation levels", "max abs")}
    deployed[3, 1, 7] = np.nan
    assert red(levels(plain, deployed)) == {("two optimisation levels", "max abs")}


def test_levels_when_the_unoptimised_graph_is_wrong_then_it_is_red_against_the_oracle_too(oracle):
    class Wrong(TorchBackend):
        def decode(self, input_ids, past_lengths, logit_positions, cache):
            return super().decode(input_ids, past_lengths, logit_positions, cache) + 0.01

    found = red(levels(candidate(Wrong(hot_decoder(LLAMA_LIKE)), oracle), trace(candidate(right(), oracle))))
    assert {("two optimisation levels", "max abs"), ("runtime without optimisations", "max abs")} <= found


def test_check_when_full_then_the_runtime_really_runs_at_two_levels(monkeypatch, llama_bundle, llama_checkpoint):
    """A defect of the optimiser: what it makes of the decode graph is off; then one of the plain runtime."""
    original, seen = OnnxRuntimeBackend.decode, set()
    for spoiled in (True, False):

        def decode(self, *arguments, spoiled=spoiled):
            seen.add(self._optimised)
            logits = original(self, *arguments)
            return logits + np.float32(5e-4) if self._optimised == spoiled else logits

        monkeypatch.setattr(OnnxRuntimeBackend, "decode", decode)
        report = check_bundle(llama_bundle, llama_checkpoint, suite="full")
        assert not report.passed
        assert ("two optimisation levels", "max abs") in red(report.checks)
    assert seen == {True, False}


def test_session_when_nothing_is_optimised_then_onnxruntime_is_told_so(llama_bundle):
    from tformer_deploy.bundle import open_bundle

    levels_set = []
    for optimised in (True, False):
        backend = OnnxRuntimeBackend(open_bundle(llama_bundle), optimised=optimised)
        options = backend._session("decode").get_session_options()
        levels_set.append(str(options.graph_optimization_level))
    assert levels_set[1].endswith("ORT_DISABLE_ALL")
    assert levels_set[0].endswith("ORT_ENABLE_ALL")


# --- Greedy tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "margins", "exact", "verdict"),
    [
        (3, [1.0, 1.0, 1.0], True, "green"),
        (1, [1.0, 9e-5, 1.0], True, "ambiguous"),
        (1, [1.0, 1.1e-4, 1.0], True, "red"),
        (0, [1.0, 9e-5, 1.0], True, "red"),
        (1, [1.0, 1.0, 1.0], False, "reported"),
        (3, [1.0, math.nan, 1.0], True, "red"),
        (3, [1.0, math.nan, 1.0], False, "red"),
    ],
)
def test_greedy_when_a_token_differs_then_the_references_margin_decides(prefix, margins, exact, verdict):
    check = judge_tokens("m", prefix, margins, exact)
    assert check.verdict == verdict
    if prefix < len(margins):
        assert f"reference margin {margins[prefix]:.3g}" in check.detail


# --- An oracle that proves nothing ----------------------------------------------------------------------------------------------


def test_check_when_the_reference_fails_then_is_red_with_its_reason_and_exit_1(
    monkeypatch, capsys, llama_bundle, llama_checkpoint
):
    def fail(self, input_ids):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("tformer_deploy.reference.decoder.Decoder.forward", fail)
    code = cli.run(["check", str(llama_bundle), "--checkpoint", str(llama_checkpoint), "--json", "--bisect"])
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (code, report["verdict"], report["bisection"]) == (1, "red", None)
    (check,) = [c for c in report["checks"] if c["verdict"] == "red"]
    assert (check["group"], check["metric"]) == ("PyTorch reference", "ran to the end")
    assert check["detail"] == "RuntimeError: no such kernel"
    assert "defect" not in captured.err


def test_check_when_the_reference_runs_out_of_memory_then_exit_6(monkeypatch, capsys, llama_bundle, llama_checkpoint):
    def fail(self, input_ids):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("tformer_deploy.reference.decoder.Decoder.forward", fail)
    assert cli.run(["check", str(llama_bundle), "--checkpoint", str(llama_checkpoint)]) == 6
    assert "memory" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_suite_when_both_sides_are_nan_then_every_distance_is_red(dtype):
    """The same NaN from reference and candidate is no agreement."""
    decoder = hot_decoder(LLAMA_LIKE)
    with torch.no_grad():
        decoder.norm.weight[3] = math.nan
    plan = make_plan(LLAMA_LIKE, LLAMA_LIKE.max_length, "quick")
    answers = ask(decoder, plan)
    assert answers.not_finite > 0
    found = red(list(compare(candidate(TorchBackend(decoder), answers, plan, dtype), "quick")))
    assert found >= {
        ("prefill, ragged batch", "max abs"),
        ("decode, teacher-forced", "max abs"),
        ("each row alone", "decode: max abs"),
        ("prefill n+1 against prefill n, decode 1", "max abs"),
        ("poisoned cache slots", "max abs"),
        ("greedy", "prompt 0: tokens agreed"),
    }


def test_check_when_reference_and_graph_are_nan_alike_then_is_red(capsys, llama_bundle, tmp_path):
    """Without a checkpoint both sides have the bundle's own weights: equal, and still red."""
    from test_parity_check import spoiled

    path = spoiled(llama_bundle, tmp_path / "b", math.nan)
    code = cli.run(["check", str(path), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["verdict"]) == (1, "red")
    not_finite = next(c for c in report["checks"] if c["metric"] == "values not finite")
    assert not_finite["value"] > 0
    assert not_finite["verdict"] == "red"


def test_suite_when_the_vocabulary_is_large_then_prefill_is_compared_in_parts(monkeypatch, oracle):
    """The figures are those of one call."""
    from tformer_deploy.parity.comparisons import ragged

    whole = candidate(right(), oracle)
    checks = ragged.batch(whole)
    monkeypatch.setattr(ragged, "_LOGIT_BYTES", 4 * len(PLAN.rows) * LLAMA_LIKE.vocab_size * 10)
    calls = []

    class Counting(TorchBackend):
        def prefill(self, input_ids, logit_positions, cache):
            calls.append(logit_positions.shape[1])
            return super().prefill(input_ids, logit_positions, cache)

    parts = candidate(Counting(hot_decoder(LLAMA_LIKE)), oracle)
    assert ragged.batch(parts) == checks
    assert parts.profile == whole.profile
    assert calls == [10] * 12 + [9]


def test_suite_when_the_model_is_as_short_as_can_be_then_still_compares():
    config: ModelConfig = replace(LLAMA_LIKE, max_length=1)
    plan = make_plan(config, 1, "full")
    decoder = hot_decoder(config)
    checks = list(compare(candidate(TorchBackend(decoder), ask(decoder, plan), plan), "full"))
    assert {c.verdict for c in checks} == {"green"}
    assert {c.group for c in checks} >= {"prefill, ragged batch", "bucket edges"}


def test_gates_when_the_perplexity_line_is_zero_then_only_equal_is_green():
    from tformer_deploy.parity.gates import judge

    assert judge("g", "m", 0.0, 0.0).verdict == "green"
    assert judge("g", "m", 1e-300, 0.0).verdict == "red"
    assert GATES["fp32"].perplexity == 1e-5
