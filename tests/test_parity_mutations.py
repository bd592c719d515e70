"""The gate is tested by mutation: every fault put into a bundle must turn the metric red that it is named for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutation import gate_table as table
from mutation.bundle_faults import point_to
from mutation.gate import MODELS, ONE_MORE, WEIGHTS, GateBench, GateMutant, edit_graph, readings, undisturbed
from mutation.mutant import judge
from mutation.surgery import nth, through

from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.seal import seal
from tformer_deploy.errors import InputError
from tformer_deploy.parity import check_bundle

_QUERY = "blocks.1.attention.query.weight"


@pytest.fixture(scope="module")
def bench(
    llama_checkpoint, llama_bundle, llama_fp16_bundle, gpt2_checkpoint, gpt2_bundle, tmp_path_factory
) -> Iterator[GateBench]:
    exported = {
        "llama": (llama_bundle, llama_checkpoint), "llama-fp16": (llama_fp16_bundle, llama_checkpoint),
        "gpt2": (gpt2_bundle, gpt2_checkpoint),
    }  # fmt: skip
    with undisturbed():
        yield GateBench(tmp_path_factory.mktemp("mutants"), exported)


@pytest.mark.parametrize("model", MODELS)
def test_control_when_nothing_is_edited_then_all_is_green(bench: GateBench, model: str):
    report = check_bundle(*bench.bundle(model))
    assert report.passed
    assert report.verdict == "green"
    assert {c.verdict for c in report.checks} <= {"green", "reported"}
    assert {m for mutant in table.GATE if mutant.model == model for m in mutant.red} <= set(readings(report))


@pytest.mark.parametrize("mutant", table.GATE, ids=str)
def test_mutant_when_checked_then_its_metrics_are_red(bench: GateBench, mutant: GateMutant):
    outcome = judge(mutant, bench.measure(mutant), bench.control(mutant))
    assert outcome.verdict == ("equivalent" if mutant.equivalent else "caught"), outcome.detail


def test_mutant_table_when_read_then_covers_every_model_and_every_metric_that_is_a_maximum():
    assert {m for mutant in table.GATE for m in mutant.red} >= {
        WEIGHTS, table.PREFILL, table.PREFILL_L2, table.PREFILL_KL, table.PREFILL_TOP1, table.PREFILL_CACHE, table.TOUCHED, table.DECODE, table.DECODE_L2,
        table.DECODE_CACHE, table.STRAYED, table.CHUNK, table.ALONE_PREFILL, table.ALONE_DECODE, ONE_MORE, table.POISON,
        table.GREEDY,
    }  # fmt: skip
    assert {mutant.model for mutant in table.GATE} == set(MODELS)
    assert len({str(m) for m in table.GATE}) == len(table.GATE)


def test_graph_when_it_points_to_another_layers_offset_then_is_refused_before_any_value(bench: GateBench, tmp_path: Path):
    bundle, checkpoint = bench.bundle("llama")
    path = tmp_path / "mutant.bundle"
    shutil.copytree(bundle, path)
    other = open_bundle(path).manifest.tensors["blocks.0.attention.query.weight"]
    point_to(path / "decode.onnx", {_QUERY: other.offset})
    with pytest.raises(InputError, match=_QUERY):
        seal(path)
    with pytest.raises(InputError, match=r"decode\.onnx"):
        check_bundle(path, checkpoint)


def test_graph_when_it_loads_and_cannot_run_then_is_red_with_the_reason(bench: GateBench, tmp_path: Path):
    bundle, checkpoint = bench.bundle("llama")
    path = tmp_path / "mutant.bundle"
    shutil.copytree(bundle, path)
    # The mask keeps one query for a whole chunk.
    edit_graph(path / "decode.onnx", lambda graph: through(graph, nth(graph, "LessOrEqual"), 1, "ReduceMax", keepdims=1))
    seal(path)
    report = check_bundle(path, checkpoint)
    assert {(c.group, c.metric) for c in report.checks if c.verdict == "red"} == {("graphs", "ran to the end")}
    assert "Attention" in next(c.detail for c in report.checks if c.verdict == "red")
