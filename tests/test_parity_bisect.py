"""``check --bisect``: a fault put into layer k is found in layer k, and in the half where it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import GPT2_LIKE, LLAMA_LIKE, hot_decoder
from onnx import helper, numpy_helper

from tformer_deploy import api, cli
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.seal import seal
from tformer_deploy.config import RopeConfig
from tformer_deploy.exporters.onnx import graph as exporter
from tformer_deploy.parity.bisect import bisect
from tformer_deploy.parity.bisection import Bisection, Run
from tformer_deploy.parity.plan import make_plan
from tformer_deploy.reference import Decoder

LAYERS = range(LLAMA_LIKE.n_layers)
NAMES = ["blocks.input", *(f"blocks.{i}.{n}" for i in LAYERS for n in ("attention.output", "output"))]


def nodes(graph: onnx.GraphProto, kind: str) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == kind]


def reader(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    return next(node for node in graph.node if name in node.input)


def scaled(graph: onnx.GraphProto, node: onnx.NodeProto, place: int, factor: float) -> None:
    """One input of a node is multiplied first."""
    name = f"mutant_{len(graph.node)}"
    graph.initializer.append(numpy_helper.from_array(np.array(factor, np.float32), f"{name}_factor"))
    index = list(graph.node).index(node)
    graph.node.insert(index, helper.make_node("Mul", [node.input[place], f"{name}_factor"], [name], name))
    graph.node[index + 1].input[place] = name


# --- Faults of one layer: what is done to the graph, and the half that goes wrong ------------------------------------------


def attention_scale(graph, k):
    node = nodes(graph, "Attention")[k]
    others = [a for a in node.attribute if a.name != "scale"]
    del node.attribute[:]
    node.attribute.extend([*others, helper.make_attribute("scale", 0.2)])  # right: 0.25


def cached_key(graph, k):
    scaled(graph, nodes(graph, "TensorScatter")[2 * k], 1, 1.01)


def cached_value(graph, k):
    scaled(graph, nodes(graph, "TensorScatter")[2 * k + 1], 1, 1.01)


def query_weight(graph, k):
    scaled(graph, reader(graph, f"blocks.{k}.attention.query.weight"), 0, 1.05)


def output_projection(graph, k):
    scaled(graph, reader(graph, f"blocks.{k}.attention.out.weight"), 0, 1.001)


def up_projection(graph, k):
    scaled(graph, reader(graph, f"blocks.{k}.feed_forward.up.weight"), 0, 1.001)


def residual(graph, k):
    scaled(graph, reader(graph, f"blocks.{k}.attention.output"), 0, 1.001)


def first_norm(graph, k):
    node = reader(graph, f"blocks.{k}.norm1.weight")
    next(a for a in node.attribute if a.name == "epsilon").f *= 1000


def second_norm(graph, k):
    node = reader(graph, f"blocks.{k}.norm2.weight")
    next(a for a in node.attribute if a.name == "epsilon").f *= 1000


FAULTS: list[tuple[Callable[..., None], str]] = [
    (attention_scale, "attention"), (cached_key, "attention"), (cached_value, "attention"), (query_weight, "attention"),
    (output_projection, "attention"), (first_norm, "attention"), (residual, "feed-forward"), (up_projection, "feed-forward"),
    (second_norm, "feed-forward"),
]  # fmt: skip
# Every fault in both graphs, the layers in turn; two of them in every layer.
CASES = [
    *((f, half, "prefill", i % 3) for i, (f, half) in enumerate(FAULTS)),
    *((f, half, "decode", (i + 1) % 3) for i, (f, half) in enumerate(FAULTS)),
    *((f, half, "decode", k) for f, half in (FAULTS[0], FAULTS[7]) for k in LAYERS),
]


def edited(bundle: Path, path: Path, phase: str, edit: Callable[[onnx.GraphProto], object]) -> Path:
    """A sealed copy with one graph edited."""
    shutil.copytree(bundle, path)
    model = onnx.load(path / f"{phase}.onnx", load_external_data=False)
    edit(model.graph)
    (path / f"{phase}.onnx").write_bytes(model.SerializeToString())
    seal(path)
    return path


def found(bundle: Path, checkpoint: Path, suite: str = "quick") -> Bisection:
    opened = open_bundle(bundle)
    plan = make_plan(opened.manifest.config, opened.manifest.max_length, suite)
    return bisect(opened, lambda: Decoder.from_pretrained(checkpoint, torch.float32), plan)


def by_name(bisection: Bisection) -> dict[str, Run]:
    assert [run.name for run in bisection.runs] == ["prefill", "decode, one token", "decode, several tokens"]
    return {run.name: run for run in bisection.runs}


def test_bisect_when_nothing_is_wrong_then_nothing_parts_and_every_station_was_compared(
    llama_bundle, llama_checkpoint, gpt2_bundle, gpt2_checkpoint
):
    for bundle, checkpoint in ((llama_bundle, llama_checkpoint), (gpt2_bundle, gpt2_checkpoint)):
        for run in by_name(found(bundle, checkpoint)).values():
            assert run.first is None
            assert (run.missing, run.failure, run.place) == ((), "", "")
            assert len(run.stations) == 3 * LLAMA_LIKE.n_layers + 2
            assert max(s.error for s in run.stations) < 1e-5


@pytest.mark.parametrize(("fault", "half", "phase", "layer"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_bisect_when_a_layer_is_wrong_then_names_that_layer_and_half(
    llama_bundle, llama_checkpoint, tmp_path, fault, half, phase, layer
):
    path = edited(llama_bundle, tmp_path / "b", phase, lambda graph: fault(graph, layer))
    runs = by_name(found(path, llama_checkpoint))
    for name, run in runs.items():
        if name.startswith(phase):
            assert run.place == f"layer {layer}, {half} half", run.sentence()
            assert run.exact
            assert run.first is not None
            assert (run.first.layer, run.first.half) == (layer, half)
        else:  # the decode graph starts from the reference's own caches: a fault of prefill is none of its own
            assert run.first is None


LAYOUTS = {
    "parallel, one norm": replace(GPT2_LIKE, residual="parallel_shared", positions="rotary", rope=RopeConfig(dim=8)),
    "norms after": replace(LLAMA_LIKE, pre_norm=False, post_norm=True, qk_norm="width", residual_scale=0.5),
    "norms before and after": replace(
        LLAMA_LIKE, post_norm=True, window=7, window_layers=(1,), attention_softcap=20.0, logit_softcap=30.0, embedding_scale=8.0
    ),
    "alibi": replace(GPT2_LIKE, positions="alibi", embedding_norm=True),
}


# Each is an export; the default tests take the two that differ most from the bundles that they have.
@pytest.fixture(
    scope="module",
    params=[pytest.param(x, marks=() if "one norm" in x or "before and" in x else pytest.mark.slow) for x in LAYOUTS],
)
def layout(request, tmp_path_factory) -> tuple[Path, Path]:
    """Bundle and checkpoint of a model whose blocks are built in another way."""
    folder = tmp_path_factory.mktemp("layout")
    hot_decoder(LAYOUTS[request.param]).save_pretrained(folder / "c")
    return api.export(folder / "c", folder / "b", check=False), folder / "c"


def test_bisect_when_blocks_are_built_in_another_way_then_names_layer_and_half_all_the_same(layout, tmp_path):
    bundle, checkpoint = layout
    for run in by_name(found(bundle, checkpoint)).values():
        assert (run.first, run.missing) == (None, ())
    for name, half in (("attention.out", "attention"), ("feed_forward.down", "feed-forward")):
        for layer in (0, 2):
            path = tmp_path / f"{name}-{layer}"
            zeroed(shutil.copytree(bundle, path), f"blocks.{layer}.{name}.weight")
            for run in found(path, checkpoint).runs:
                assert run.place == f"layer {layer}, {half} half", run.sentence()


def zeroed(path: Path, tensor: str) -> None:
    """A bundle, sealed again, half of whose tensor is zero."""
    bundle = open_bundle(path)
    record = bundle.manifest.tensors[tensor]
    with bundle.weights_path.open("r+b") as file:
        file.seek(record.offset)
        file.write(bytes(record.size // 2))
    seal(path)


@pytest.mark.parametrize("layer", LAYERS)
def test_bisect_when_fp16_then_names_the_layer_of_a_wrong_weight(llama_fp16_bundle, llama_checkpoint, tmp_path, layer):
    path = shutil.copytree(llama_fp16_bundle, tmp_path / "b")
    assert not any(run.first for run in found(path, llama_checkpoint).runs)
    zeroed(path, f"blocks.{layer}.feed_forward.down.weight")
    for run in found(path, llama_checkpoint).runs:
        assert run.place == f"layer {layer}, feed-forward half"


@pytest.mark.slow
def test_bisect_when_bf16_then_names_the_layer_of_a_wrong_weight(llama_checkpoint, tmp_path):
    layer, path = 2, api.export(llama_checkpoint, tmp_path / "b", dtype="bf16", check=False)
    assert not any(run.first for run in found(path, llama_checkpoint).runs)
    zeroed(path, f"blocks.{layer}.feed_forward.down.weight")
    for run in found(path, llama_checkpoint).runs:
        assert run.place == f"layer {layer}, feed-forward half"


def test_bisect_when_the_embedding_or_the_head_is_wrong_then_says_so(gpt2_bundle, gpt2_checkpoint, tmp_path):
    def positions(graph):
        node = reader(graph, "positions.weight")
        graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "zero"))
        graph.node.insert(list(graph.node).index(node), helper.make_node("Mul", [node.input[1], "zero"], ["still"], "still"))
        reader(graph, "positions.weight").input[1] = "still"

    def head(graph):
        scaled(graph, nodes(graph, "Gemm")[0], 0, 1.001)

    runs = by_name(found(edited(gpt2_bundle, tmp_path / "a", "prefill", positions), gpt2_checkpoint))
    assert runs["prefill"].place == "the embedding, before layer 0"
    runs = by_name(found(edited(gpt2_bundle, tmp_path / "b", "decode", head), gpt2_checkpoint))
    assert runs["decode, one token"].place == "the final norm or the head"


def renamed(graph: onnx.GraphProto, names: set[str]) -> None:
    """What an outside tool does to a graph: values get names of its own."""
    for node in graph.node:
        node.input[:] = [f"x_{n}" if n in names else n for n in node.input]
        node.output[:] = [f"x_{n}" if n in names else n for n in node.output]


@pytest.mark.parametrize(("fault", "layer"), [(cached_key, 2), (up_projection, 1), (output_projection, 0)])
def test_bisect_when_all_names_are_lost_then_falls_back_to_the_caches_and_says_so(
    llama_bundle, llama_checkpoint, tmp_path, fault, layer
):
    def edit(graph):
        fault(graph, layer)
        renamed(graph, set(NAMES))

    run = by_name(found(edited(llama_bundle, tmp_path / "b", "prefill", edit), llama_checkpoint))["prefill"]
    seen = layer if fault is cached_key else layer + 1  # a layer's own output is seen in what the next one caches
    assert run.first is not None
    assert run.first.layer == seen
    assert run.place == f"what lies between what layer {seen - 1} caches and what layer {seen} caches"
    assert not run.exact
    assert set(run.missing) == set(NAMES)
    assert "lost 7 of the names" in run.sentence()
    assert "only the caches are left" in run.sentence()


def test_bisect_when_some_names_are_lost_then_the_others_still_name_the_layer(llama_bundle, llama_checkpoint, tmp_path):
    def edit(graph):
        up_projection(graph, 2)
        renamed(graph, {"blocks.0.output", "blocks.1.attention.output"})

    run = by_name(found(edited(llama_bundle, tmp_path / "b", "prefill", edit), llama_checkpoint))["prefill"]
    assert run.place == "layer 2, feed-forward half"
    assert run.missing == ("blocks.0.output", "blocks.1.attention.output")
    assert "the others were looked at" in run.sentence()


def test_bisect_when_a_graph_cannot_run_then_says_why_and_looks_at_the_other_one(llama_bundle, llama_checkpoint, tmp_path):
    def edit(graph):
        node = nodes(graph, "LessOrEqual")[0]
        graph.node.insert(
            list(graph.node).index(node), helper.make_node("ReduceMax", [node.input[1]], ["one"], "one", keepdims=1)
        )
        nodes(graph, "LessOrEqual")[0].input[1] = "one"

    runs = found(edited(llama_bundle, tmp_path / "b", "decode", edit), llama_checkpoint).runs
    assert runs[0].first is None
    assert any("failed in decode" in run.failure for run in runs[1:])


def test_bisect_when_a_value_is_nan_then_it_has_parted(llama_bundle, llama_checkpoint, tmp_path):
    path = edited(llama_bundle, tmp_path / "b", "prefill", lambda g: scaled(g, nodes(g, "Attention")[1], 0, float("nan")))
    run = by_name(found(path, llama_checkpoint))["prefill"]
    assert run.place == "layer 1, attention half"
    assert np.isnan(run.first.error)


def test_check_when_asked_to_bisect_then_the_report_names_the_layer(capsys, llama_bundle, llama_checkpoint, tmp_path):
    path = edited(llama_bundle, tmp_path / "b", "decode", lambda graph: up_projection(graph, 1))
    code = cli.run(["check", str(path), "--checkpoint", str(llama_checkpoint), "--bisect", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    parts = {run["run"]: run["parts"] for run in report["bisection"]}
    place = {"place": "layer 1, feed-forward half", "layer": 1, "half": "feed-forward", "exact": True}
    assert parts == {"prefill": None, "decode, one token": place, "decode, several tokens": place}
    assert any("part in layer 1, feed-forward half" in note for note in report["notes"])


def test_bisection_when_a_check_is_red_and_nothing_parts_then_says_what_that_means():
    nothing = Bisection((Run("prefill", ()),))
    assert not any("fuses" in s for s in nothing.sentences(red=False))
    assert "fuses" in nothing.sentences(red=True)[-1]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_graph_when_exported_then_the_seams_of_its_blocks_have_names(llama_bundle, gpt2_bundle, phase):
    for bundle in (llama_bundle, gpt2_bundle):
        model = onnx.load(bundle / f"{phase}.onnx", load_external_data=False)
        values = [name for node in model.graph.node for name in node.output]
        assert [name for name in values if name in NAMES] == NAMES
        assert {o.domain for o in model.opset_import} == {""}


def test_graph_when_its_values_are_named_then_no_operator_is_added(monkeypatch, gpt2_checkpoint, gpt2_bundle, tmp_path):
    monkeypatch.setattr(exporter, "mark_blocks", lambda decoder: None)
    plain = api.export(gpt2_checkpoint, tmp_path / "b", check=False)
    for phase in ("prefill", "decode"):
        one, other = (onnx.load(p / f"{phase}.onnx", load_external_data=False).graph for p in (plain, gpt2_bundle))
        new_name: dict[str, str] = {}
        for a, b in zip(one.node, other.node, strict=True):
            assert (a.op_type, list(a.attribute)) == (b.op_type, list(b.attribute))
            assert [new_name.get(i, i) for i in a.input] == list(b.input)
            new_name |= zip(a.output, b.output, strict=True)
        assert {b for a, b in new_name.items() if a != b} >= set(NAMES)
