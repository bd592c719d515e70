"""The gate is tested by mutation: every fault put into a bundle must turn the metric red that it is named for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import GPT2_LIKE, hot_decoder
from onnx import TensorProto, helper, numpy_helper

import tformer_deploy
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.manifest import MANIFEST
from tformer_deploy.bundle.manifest_io import dump_manifest
from tformer_deploy.bundle.seal import seal
from tformer_deploy.errors import InputError
from tformer_deploy.parity import Report, check_bundle

WEIGHTS = ("weights", "tensors that differ from the checkpoint")
PREFILL = ("prefill, ragged batch", "max abs")
PREFILL_L2 = ("prefill, ragged batch", "relative L2, p95")
PREFILL_CACHE = ("prefill caches", "max abs")
TOUCHED = ("prefill caches", "tensors touched past the prompt")
DECODE = ("decode, teacher-forced", "max abs")
DECODE_CACHE = ("decode caches", "max abs")
STRAYED = ("decode caches", "slots changed beside the written one")
CHUNK = ("decode, several tokens at once", "max abs")
ALONE_PREFILL = ("each row alone", "prefill: max abs")
ALONE_DECODE = ("each row alone", "decode: max abs")
ONE_MORE = ("prefill n+1 against prefill n, decode 1", "max abs")
POISON = ("poisoned cache slots", "max abs")
GREEDY = ("greedy", "prompt 0: tokens agreed")

Metric = tuple[str, str]


# --- Small tools for graph surgery -----------------------------------------------------------------------------------


def nth(graph: onnx.GraphProto, kind: str, n: int = 0) -> onnx.NodeProto:
    return [node for node in graph.node if node.op_type == kind][n]


def reader(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    """The first node that reads a value."""
    return next(node for node in graph.node if name in node.input)


def constant(graph: onnx.GraphProto, value: object, dtype: type = np.int64) -> str:
    name = f"mutant_constant_{len(graph.initializer)}"
    graph.initializer.append(numpy_helper.from_array(np.array(value, dtype=dtype), name))
    return name


def before(graph: onnx.GraphProto, node: onnx.NodeProto, kind: str, inputs: list[str], **attributes: object) -> str:
    """Puts a new node before another one; returns its output."""
    name = f"mutant_{len(graph.node)}"
    index = next(i for i, n in enumerate(graph.node) if n.output[0] == node.output[0])
    graph.node.insert(index, helper.make_node(kind, inputs, [name], name, **attributes))
    return name


def through(graph: onnx.GraphProto, node: onnx.NodeProto, place: int, kind: str, *others: str, **attributes: object) -> None:
    """One input of a node goes through a new node first."""
    output, source = node.output[0], node.input[place]
    name = before(graph, node, kind, [source, *others], **attributes)
    next(n for n in graph.node if n.output[0] == output).input[place] = name


def set_attribute(node: onnx.NodeProto, name: str, value: object) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def all_of(graph: onnx.GraphProto, kind: str) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == kind]


# --- Faults in a graph, of either phase --------------------------------------------------------------------------------


def epsilon_100(graph):
    node = nth(graph, "RMSNormalization" if all_of(graph, "RMSNormalization") else "LayerNormalization", 2)
    set_attribute(node, "epsilon", 100 * next(a.f for a in node.attribute if a.name == "epsilon"))


def attention_scale(graph):
    set_attribute(nth(graph, "Attention", 1), "scale", 0.2)  # right: 1 / sqrt(16)


def attention_softcap(graph):
    set_attribute(nth(graph, "Attention", 1), "softcap", 20.0)


def gelu(kind: str) -> Callable[[onnx.GraphProto], None]:
    return lambda graph: set_attribute(nth(graph, "Gelu", 1), "approximate", kind)


def rope_interleaved(graph):
    for node in all_of(graph, "RotaryEmbedding"):
        set_attribute(node, "interleaved", 1)


def rope_frequencies(graph):
    through(graph, reader(graph, "rope.frequencies"), 0, "Mul", constant(graph, 1.02, np.float32))


def rope_without_sine_sign(graph):
    through(graph, nth(graph, "RotaryEmbedding"), 2, "Neg")


def key_value_swapped_in_attention(graph):
    node = nth(graph, "Attention", 1)
    node.input[1], node.input[2] = node.input[2], node.input[1]


def key_value_swapped_in_cache(graph):
    key, value = nth(graph, "TensorScatter", 2), nth(graph, "TensorScatter", 3)
    key.input[1], value.input[1] = value.input[1], key.input[1]
    # The key's node now reads what was made after it.
    for node in (key, value):
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        target = (
            reader(graph, key.output[0])
            if key.output[0] in {i for n in graph.node for i in n.input}
            else nth(graph, "Attention", 1)
        )
        graph.node.remove(node)
        index = next(i for i, n in enumerate(graph.node) if n.output[0] == target.output[0])
        graph.node.insert(index, copy)


def heads_swapped(graph):
    through(graph, nth(graph, "Attention"), 1, "Gather", constant(graph, [1, 0]), axis=1)


def gate_and_up_swapped(graph):
    gate, up = (reader(graph, f"blocks.1.feed_forward.{n}.weight") for n in ("gate", "up"))
    gate.input[1], up.input[1] = up.input[1], gate.input[1]


def residual_dropped(graph):
    add = reader(graph, reader(graph, "blocks.1.attention.out.weight").output[0])
    add.input[0] = constant(graph, 0.0, np.float32)


def another_layers_weight(graph):
    reader(graph, "blocks.1.attention.out.weight").input[1] = "blocks.0.attention.out.weight"


def another_layers_norm(graph):
    reader(graph, "norm.weight").input[1] = "blocks.2.norm2.weight"


def bias_dropped(graph):
    reader(graph, "blocks.2.feed_forward.down.bias").input[1] = constant(graph, 0.0, np.float32)


def bias_of_the_query_for_the_key(graph):
    reader(graph, "blocks.1.attention.key.bias").input[1] = "blocks.1.attention.query.bias"


def logit_positions_ignored(graph):
    through(graph, reader(graph, "logit_positions"), 0, "Mul", constant(graph, 0))


def logits_scaled(graph):
    set_attribute(nth(graph, "Gemm"), "alpha", 1.0005)


# --- Faults in prefill -------------------------------------------------------------------------------------------------


def causal_mask_dropped(graph):
    for node in all_of(graph, "Attention"):
        set_attribute(node, "is_causal", 0)


def prefill_positions_one_up(graph):
    positions = nth(graph, "Range").output[0]
    through(graph, reader(graph, positions), 0, "Add", constant(graph, 1))


def prefill_written_one_slot_on(graph):
    through(graph, nth(graph, "TensorScatter", 1), 2, "Add", constant(graph, 1))


def first_rows_keys_for_all(graph):
    """Every row caches the first row's key."""
    node = nth(graph, "TensorScatter", 2)
    zero = before(graph, node, "Mul", [node.input[1], constant(graph, 0.0, np.float32)])
    first = before(graph, node, "Gather", [node.input[1], constant(graph, [0])], axis=0)
    total = before(graph, node, "Add", [first, zero])
    nth(graph, "TensorScatter", 2).input[1] = total


# --- Faults in decode --------------------------------------------------------------------------------------------------


def written_one_slot_on(graph):
    """Past the last slot it would be written outside, so that it stops there."""
    node = nth(graph, "TensorScatter")
    one = before(graph, node, "Add", [node.input[2], constant(graph, 1)])
    shape = before(graph, node, "Shape", [node.input[0]], start=2, end=3)
    size = before(graph, node, "Shape", [node.input[1]], start=2, end=3)
    last = before(graph, node, "Sub", [shape, size])
    capped = before(graph, node, "Min", [one, last])
    nth(graph, "TensorScatter").input[2] = capped


def written_one_slot_back(graph):
    node = nth(graph, "TensorScatter", 5)
    less = before(graph, node, "Sub", [node.input[2], constant(graph, 1)])
    nth(graph, "TensorScatter", 5).input[2] = less


def written_where_the_first_row_ends(graph):
    node = nth(graph, "TensorScatter", 1)
    nth(graph, "TensorScatter", 1).input[2] = _first_row(graph, node, "past_lengths")


def mask_all_true(graph):
    through(graph, nth(graph, "Attention", 1), 3, "Or", constant(graph, True, np.bool_))


def mask_excludes_the_token_itself(graph):
    nth(graph, "LessOrEqual").op_type = "Less"


def mask_one_slot_too_far(graph):
    through(graph, nth(graph, "LessOrEqual"), 1, "Add", constant(graph, 1))


def mask_from_the_first_row(graph):
    through(graph, nth(graph, "LessOrEqual"), 1, "Gather", constant(graph, [0]), axis=0)


def mask_sees_the_whole_chunk(graph):
    node = nth(graph, "LessOrEqual")
    last = before(graph, node, "ReduceMax", [node.input[1], constant(graph, [2])], keepdims=1)
    through(graph, nth(graph, "LessOrEqual"), 1, "Max", last)


def first_rows_length_for_all(graph):
    node = reader(graph, "past_lengths")
    name = _first_row(graph, node, "past_lengths")
    for other in graph.node:
        if not other.name.startswith("mutant_"):
            other.input[:] = [name if i == "past_lengths" else i for i in other.input]


def _first_row(graph, node, lengths):
    zero = before(graph, node, "Mul", [lengths, constant(graph, 0)])
    first = before(graph, node, "Gather", [lengths, constant(graph, [0])], axis=0)
    return before(graph, node, "Add", [zero, first])


def rotary_positions_one_up(graph):
    through(graph, nth(graph, "Cast"), 0, "Add", constant(graph, 1))


def learned_positions_one_up(graph):
    through(graph, reader(graph, "positions.weight"), 1, "Add", constant(graph, 1))


def positions_stand_still_in_a_chunk(graph):
    through(graph, nth(graph, "Add"), 1, "Mul", constant(graph, 0))


def stale_cache(graph):
    """A layer attends to what its cache was without the new token's value: that slot is zero."""
    node = nth(graph, "Attention", 1)
    scatter = nth(graph, "TensorScatter", 3)
    zeros = before(graph, node, "Mul", [scatter.input[1], constant(graph, 0.0, np.float32)])
    stale = before(graph, node, "TensorScatter", [scatter.output[0], zeros, "past_lengths"], axis=2, mode="linear")
    nth(graph, "Attention", 1).input[2] = stale


def another_layers_cache_is_read(graph):
    nth(graph, "Attention", 1).input[1] = nth(graph, "Attention", 0).input[1]


def another_layers_key_is_cached(graph):
    nth(graph, "TensorScatter", 4).input[1] = nth(graph, "TensorScatter", 0).input[1]


def cache_rounded_to_half(graph):
    node = nth(graph, "TensorScatter", 2)
    half = before(graph, node, "Cast", [node.input[1]], to=TensorProto.FLOAT16)
    back = before(graph, node, "Cast", [half], to=TensorProto.FLOAT)
    nth(graph, "TensorScatter", 2).input[1] = back


# --- Faults in the weights and the manifest ------------------------------------------------------------------------------


def edit_tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        bundle = open_bundle(path)
        record, old = bundle.manifest.tensors[name], bundle.tensor(name)
        data = np.ascontiguousarray(change(old.copy()), dtype=old.dtype).tobytes()
        assert len(data) == record.size
        assert data != old.tobytes()
        with bundle.weights_path.open("r+b") as file:
            file.seek(record.offset)
            file.write(data)

    return edit


def negate_one(tensor: np.ndarray) -> np.ndarray:
    tensor[3, 5] *= -1
    return tensor


def last_bit_of_one(tensor: np.ndarray) -> np.ndarray:
    tensor.view(np.uint32)[7, 7] ^= 1
    return tensor


def not_a_number(tensor: np.ndarray) -> np.ndarray:
    tensor[0, 0] = np.nan
    return tensor


def two_layers_offsets_swapped(path: Path) -> None:
    """The manifest and both graphs agree on the wrong place."""
    names = ["blocks.0.attention.query.weight", "blocks.1.attention.query.weight"]
    manifest = open_bundle(path).manifest
    a, b = (manifest.tensors[n] for n in names)
    wrong = replace(manifest, tensors=manifest.tensors | {names[0]: b, names[1]: a})
    (path / MANIFEST).write_bytes(dump_manifest(wrong))
    for phase in ("prefill", "decode"):
        point_to(path / f"{phase}.onnx", {names[0]: b.offset, names[1]: a.offset})


def point_to(file: Path, offsets: dict[str, int]) -> None:
    model = onnx.load(file, load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.name in offsets:
            next(e for e in tensor.external_data if e.key == "offset").value = str(offsets[tensor.name])
    file.write_bytes(model.SerializeToString())


def manifest_with(**changes: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        manifest = open_bundle(path).manifest
        (path / MANIFEST).write_bytes(dump_manifest(replace(manifest, config=replace(manifest.config, **changes))))

    return edit


# --- The table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """One fault: where it is put (``phase`` is a graph, or ``files``), and which metrics must go red for it."""

    edit: Callable[..., None]
    model: str
    phase: str
    red: tuple[Metric, ...]
    name: str = ""

    def __str__(self) -> str:
        return f"{self.model}-{self.phase}-{self.name or self.edit.__name__}"


ONE_WEIGHT = "blocks.1.attention.query.weight"
MUTANTS = [
    # Weights: red by the exact comparison, however little the values show.
    Mutant(edit_tensor(ONE_WEIGHT, negate_one), "llama", "files", (WEIGHTS, PREFILL, DECODE), "sign-of-one-weight"),
    Mutant(edit_tensor(ONE_WEIGHT, last_bit_of_one), "llama", "files", (WEIGHTS,), "last-bit-of-one-weight"),
    Mutant(edit_tensor(ONE_WEIGHT, not_a_number), "llama", "files", (WEIGHTS, PREFILL, DECODE, GREEDY), "nan"),
    Mutant(edit_tensor(ONE_WEIGHT, lambda t: t.T), "llama", "files", (WEIGHTS, PREFILL, DECODE), "matrix-not-transposed"),
    Mutant(
        edit_tensor("embedding.weight", lambda t: t.T.reshape(t.shape)), "gpt2", "files", (WEIGHTS, PREFILL), "head-transposed"
    ),
    Mutant(edit_tensor("blocks.0.attention.out.bias", np.zeros_like), "gpt2", "files", (WEIGHTS, PREFILL, DECODE), "bias-zero"),
    Mutant(edit_tensor("rope.frequencies", lambda t: t**1.4), "llama", "files", (WEIGHTS, PREFILL, DECODE, GREEDY), "rope-theta"),
    Mutant(two_layers_offsets_swapped, "llama", "files", (WEIGHTS, PREFILL, DECODE)),
    Mutant(manifest_with(norm_eps=1e-3), "llama", "files", (WEIGHTS,), "epsilon-in-the-manifest"),
    # Prefill.
    Mutant(causal_mask_dropped, "llama", "prefill", (PREFILL, ALONE_PREFILL, ONE_MORE)),
    Mutant(causal_mask_dropped, "gpt2", "prefill", (PREFILL, ALONE_PREFILL, ONE_MORE)),
    Mutant(rope_interleaved, "llama", "prefill", (PREFILL, PREFILL_CACHE)),
    Mutant(rope_frequencies, "llama", "prefill", (PREFILL, PREFILL_CACHE, ONE_MORE)),
    Mutant(rope_without_sine_sign, "llama", "prefill", (PREFILL,)),
    # Rotary positions are relative: the keys alone show a shift that decode does not make too.
    Mutant(prefill_positions_one_up, "llama", "prefill", (PREFILL_CACHE, ONE_MORE)),
    Mutant(prefill_positions_one_up, "gpt2", "prefill", (PREFILL, PREFILL_CACHE, ONE_MORE)),
    Mutant(prefill_written_one_slot_on, "llama", "prefill", (PREFILL_CACHE, TOUCHED, DECODE)),
    Mutant(first_rows_keys_for_all, "gpt2", "prefill", (PREFILL_CACHE, DECODE, ALONE_DECODE)),
    Mutant(key_value_swapped_in_cache, "llama", "prefill", (PREFILL_CACHE, DECODE, ONE_MORE)),
    Mutant(key_value_swapped_in_attention, "gpt2", "prefill", (PREFILL, ONE_MORE)),
    Mutant(heads_swapped, "llama", "prefill", (PREFILL, ONE_MORE)),
    Mutant(logit_positions_ignored, "llama", "prefill", (PREFILL, ONE_MORE, GREEDY)),
    Mutant(epsilon_100, "llama", "prefill", (PREFILL, ONE_MORE)),
    Mutant(epsilon_100, "gpt2", "prefill", (PREFILL_L2, ONE_MORE)),
    Mutant(attention_scale, "llama", "prefill", (PREFILL, ONE_MORE)),
    Mutant(attention_softcap, "llama", "prefill", (PREFILL, ONE_MORE)),
    Mutant(gelu("none"), "gpt2", "prefill", (PREFILL_L2,), "gelu-erf-for-tanh"),
    Mutant(gelu("tanh"), "gelu", "prefill", (PREFILL_L2,), "gelu-tanh-for-erf"),
    Mutant(gate_and_up_swapped, "llama", "prefill", (PREFILL, ONE_MORE)),
    Mutant(residual_dropped, "llama", "prefill", (PREFILL, ONE_MORE)),
    Mutant(another_layers_weight, "gpt2", "prefill", (PREFILL, ONE_MORE)),
    Mutant(another_layers_norm, "llama", "prefill", (PREFILL, ONE_MORE)),
    Mutant(bias_dropped, "gpt2", "prefill", (PREFILL, ONE_MORE)),
    Mutant(bias_of_the_query_for_the_key, "gpt2", "prefill", (PREFILL_CACHE,)),
    Mutant(logits_scaled, "llama", "prefill", (PREFILL_L2,)),
    # Decode.
    Mutant(written_one_slot_on, "llama", "decode", (DECODE, DECODE_CACHE, STRAYED)),
    Mutant(written_one_slot_back, "llama", "decode", (DECODE, DECODE_CACHE, STRAYED)),
    Mutant(written_where_the_first_row_ends, "gpt2", "decode", (DECODE, DECODE_CACHE, STRAYED, ALONE_DECODE)),
    Mutant(mask_all_true, "llama", "decode", (DECODE, POISON)),
    Mutant(mask_excludes_the_token_itself, "llama", "decode", (DECODE, ONE_MORE)),
    Mutant(mask_one_slot_too_far, "llama", "decode", (DECODE, POISON)),
    Mutant(mask_from_the_first_row, "gpt2", "decode", (DECODE, ALONE_DECODE, POISON)),
    Mutant(mask_sees_the_whole_chunk, "llama", "decode", (CHUNK,)),
    Mutant(first_rows_length_for_all, "gpt2", "decode", (DECODE, STRAYED, ALONE_DECODE)),
    Mutant(rotary_positions_one_up, "llama", "decode", (DECODE, DECODE_CACHE, ONE_MORE)),
    Mutant(learned_positions_one_up, "gpt2", "decode", (DECODE, DECODE_CACHE, ONE_MORE)),
    Mutant(positions_stand_still_in_a_chunk, "llama", "decode", (CHUNK,)),
    Mutant(positions_stand_still_in_a_chunk, "gpt2", "decode", (CHUNK,)),
    Mutant(logit_positions_ignored, "llama", "decode", (CHUNK,)),
    Mutant(stale_cache, "llama", "decode", (DECODE, CHUNK, ONE_MORE)),
    Mutant(another_layers_cache_is_read, "llama", "decode", (DECODE, ONE_MORE)),
    Mutant(another_layers_key_is_cached, "gpt2", "decode", (DECODE, DECODE_CACHE)),
    Mutant(cache_rounded_to_half, "llama", "decode", (DECODE_CACHE,)),
    Mutant(key_value_swapped_in_cache, "llama", "decode", (DECODE, DECODE_CACHE)),
    Mutant(rope_frequencies, "llama", "decode", (DECODE, DECODE_CACHE, ONE_MORE)),
    Mutant(rope_interleaved, "llama", "decode", (DECODE, DECODE_CACHE, ONE_MORE)),
    Mutant(epsilon_100, "llama", "decode", (DECODE, ONE_MORE)),
    Mutant(attention_scale, "gpt2", "decode", (DECODE, ONE_MORE)),
    Mutant(gelu("none"), "gpt2", "decode", (("decode, teacher-forced", "relative L2, p95"),), "gelu-erf-for-tanh"),
    Mutant(bias_dropped, "gpt2", "decode", (DECODE, ONE_MORE)),
]


@pytest.fixture(scope="module")
def models(llama_checkpoint, llama_bundle, gpt2_checkpoint, gpt2_bundle, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Name → bundle, checkpoint. A third model has the exact GELU."""
    folder = tmp_path_factory.mktemp("gelu")
    hot_decoder(replace(GPT2_LIKE, activation="gelu")).save_pretrained(folder / "gelu")
    exact = tformer_deploy.export(folder / "gelu", folder / "gelu.bundle", check=False)
    return {"llama": (llama_bundle, llama_checkpoint), "gpt2": (gpt2_bundle, gpt2_checkpoint), "gelu": (exact, folder / "gelu")}


def edit_graph(file: Path, edit: Callable[[onnx.GraphProto], None]) -> None:
    model = onnx.load(file, load_external_data=False)
    old = model.SerializeToString()
    edit(model.graph)
    new = model.SerializeToString()
    assert new != old
    file.write_bytes(new)


def red(report: Report) -> set[Metric]:
    return {(c.group, c.metric) for c in report.checks if c.verdict == "red"}


@pytest.mark.parametrize("model", ["llama", "gpt2", "gelu"])
def test_control_when_nothing_is_edited_then_all_is_green(models, model):
    report = check_bundle(*models[model])
    assert report.passed
    assert report.verdict == "green"
    assert {c.verdict for c in report.checks} == {"green"}
    assert {m for mutant in MUTANTS for m in mutant.red} <= {(c.group, c.metric) for c in report.checks}


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_when_checked_then_its_metrics_are_red(models, mutant, tmp_path):
    bundle, checkpoint = models[mutant.model]
    path = tmp_path / "mutant.bundle"
    shutil.copytree(bundle, path)
    if mutant.phase == "files":
        mutant.edit(path)
    else:
        edit_graph(path / f"{mutant.phase}.onnx", mutant.edit)
    seal(path)
    report = check_bundle(path, checkpoint)
    assert not report.passed
    assert report.verdict == "red"
    assert set(mutant.red) <= red(report), sorted(red(report))
    if mutant.phase == "decode":  # the fault is found where it is
        assert not {m for m in red(report) if m[0].startswith("prefill") and m != ONE_MORE}
    if mutant.phase != "files":
        assert WEIGHTS not in red(report)


def test_mutant_table_when_read_then_covers_every_metric_that_is_a_maximum():
    assert {m for mutant in MUTANTS for m in mutant.red} >= {
        WEIGHTS, PREFILL, PREFILL_L2, PREFILL_CACHE, TOUCHED, DECODE, DECODE_CACHE, STRAYED, CHUNK,
        ALONE_PREFILL, ALONE_DECODE, ONE_MORE, POISON, GREEDY,
    }  # fmt: skip
    assert len({str(m) for m in MUTANTS}) == len(MUTANTS)


def test_graph_when_it_points_to_another_layers_offset_then_is_refused_before_any_value(models, tmp_path):
    bundle, checkpoint = models["llama"]
    path = tmp_path / "mutant.bundle"
    shutil.copytree(bundle, path)
    other = open_bundle(path).manifest.tensors["blocks.0.attention.query.weight"]
    point_to(path / "decode.onnx", {ONE_WEIGHT: other.offset})
    with pytest.raises(InputError, match=ONE_WEIGHT):
        seal(path)
    with pytest.raises(InputError, match=r"decode\.onnx"):
        check_bundle(path, checkpoint)


def test_graph_when_it_loads_and_cannot_run_then_is_red_with_the_reason(models, tmp_path):
    bundle, checkpoint = models["llama"]
    path = tmp_path / "mutant.bundle"
    shutil.copytree(bundle, path)
    # The mask keeps one query for a whole chunk.
    edit_graph(path / "decode.onnx", lambda graph: through(graph, nth(graph, "LessOrEqual"), 1, "ReduceMax", keepdims=1))
    seal(path)
    report = check_bundle(path, checkpoint)
    assert red(report) == {("graphs", "ran to the end")}
    assert "Attention" in next(c.detail for c in report.checks if c.verdict == "red")
