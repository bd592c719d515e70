"""Faults in an exported graph that any decoder can have."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from mutation.surgery import (
    Edit,
    all_of,
    attribute,
    before,
    bypass,
    constant,
    feed,
    first_row,
    nth,
    reader,
    set_attribute,
    swap_inputs,
    through,
)

# --- Either phase ------------------------------------------------------------------------------------------------------


def epsilon_100(graph: onnx.GraphProto) -> None:
    node = nth(graph, "RMSNormalization" if all_of(graph, "RMSNormalization") else "LayerNormalization", 2)
    set_attribute(node, "epsilon", 100 * attribute(node, "epsilon"))


def attention_scale(graph: onnx.GraphProto) -> None:
    set_attribute(nth(graph, "Attention", 1), "scale", 0.2)  # right: 1 / sqrt(16), or 0.3


def attention_softcap(graph: onnx.GraphProto) -> None:
    set_attribute(nth(graph, "Attention", 1), "softcap", 20.0)


def gelu(kind: str) -> Edit:
    return lambda graph: set_attribute(nth(graph, "Gelu", 1), "approximate", kind)


def rope_interleaved(graph: onnx.GraphProto) -> None:
    for node in all_of(graph, "RotaryEmbedding"):
        set_attribute(node, "interleaved", 1)


def rope_frequencies(graph: onnx.GraphProto) -> None:
    through(graph, reader(graph, "rope.frequencies"), 0, "Mul", constant(graph, 1.02, np.float32))


def rope_without_sine_sign(graph: onnx.GraphProto) -> None:
    through(graph, nth(graph, "RotaryEmbedding"), 2, "Neg")


def key_value_swapped_in_attention(graph: onnx.GraphProto) -> None:
    node = nth(graph, "Attention", 1)
    node.input[1], node.input[2] = node.input[2], node.input[1]


def key_value_swapped_in_cache(graph: onnx.GraphProto) -> None:
    key, value = nth(graph, "TensorScatter", 2), nth(graph, "TensorScatter", 3)
    swap_inputs(key, value)
    # The key's node now reads what was made after it.
    for node in (key, value):
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        read = key.output[0] in {name for n in graph.node for name in n.input}
        target = reader(graph, key.output[0]) if read else nth(graph, "Attention", 1)
        graph.node.remove(node)
        index = next(i for i, n in enumerate(graph.node) if n.output[0] == target.output[0])
        graph.node.insert(index, copy)


def heads_swapped(graph: onnx.GraphProto) -> None:
    through(graph, nth(graph, "Attention"), 1, "Gather", constant(graph, [1, 0]), axis=1)


def heads_merged_along_the_wrong_axis(graph: onnx.GraphProto) -> None:
    """Attention's output [B, H, S, D] is read as [B, S, H * D] without being turned."""
    merged = reader(graph, nth(graph, "Attention", 1).output[0])
    assert merged.op_type == "Transpose"
    bypass(graph, merged)


def keys_cached_along_the_wrong_axis(graph: onnx.GraphProto) -> None:
    """The dims of a cached key are in reverse."""
    through(graph, nth(graph, "TensorScatter", 2), 1, "Gather", constant(graph, list(range(15, -1, -1))), axis=3)


def gate_and_up_swapped(graph: onnx.GraphProto) -> None:
    swap_inputs(*(reader(graph, f"blocks.1.feed_forward.{n}.weight") for n in ("gate", "up")))


def residual_dropped(graph: onnx.GraphProto) -> None:
    add = reader(graph, reader(graph, "blocks.1.attention.out.weight").output[0])
    add.input[0] = constant(graph, 0.0, np.float32)


def another_layers_weight(graph: onnx.GraphProto) -> None:
    reader(graph, "blocks.1.attention.out.weight").input[1] = "blocks.0.attention.out.weight"


def another_layers_norm(graph: onnx.GraphProto) -> None:
    reader(graph, "norm.weight").input[1] = "blocks.2.norm2.weight"


def bias_dropped(graph: onnx.GraphProto) -> None:
    reader(graph, "blocks.2.feed_forward.down.bias").input[1] = constant(graph, 0.0, np.float32)


def bias_of_the_query_for_the_key(graph: onnx.GraphProto) -> None:
    reader(graph, "blocks.1.attention.key.bias").input[1] = "blocks.1.attention.query.bias"


def logit_positions_ignored(graph: onnx.GraphProto) -> None:
    through(graph, reader(graph, "logit_positions"), 0, "Mul", constant(graph, 0))


def logit_positions_one_back(graph: onnx.GraphProto) -> None:
    node = reader(graph, "logit_positions")
    less = before(graph, node, "Sub", ["logit_positions", constant(graph, 1)])
    capped = before(graph, node, "Max", [less, constant(graph, 0)])
    feed(graph, node.output[0], 0, capped)


def logits_scaled(graph: onnx.GraphProto) -> None:
    set_attribute(nth(graph, "Gemm"), "alpha", 1.0005)


def residual_added_the_other_way_round(graph: onnx.GraphProto) -> None:
    node = reader(graph, reader(graph, "blocks.1.attention.out.weight").output[0])
    node.input[0], node.input[1] = node.input[1], node.input[0]


# --- Prefill -----------------------------------------------------------------------------------------------------------


def causal_mask_dropped(graph: onnx.GraphProto) -> None:
    for node in all_of(graph, "Attention"):
        set_attribute(node, "is_causal", 0)


def prefill_positions_one_up(graph: onnx.GraphProto) -> None:
    positions = nth(graph, "Range").output[0]
    through(graph, reader(graph, positions), 0, "Add", constant(graph, 1))


def prefill_written_one_slot_on(graph: onnx.GraphProto) -> None:
    through(graph, nth(graph, "TensorScatter", 1), 2, "Add", constant(graph, 1))


def first_rows_keys_for_all(graph: onnx.GraphProto) -> None:
    """Every row caches the first row's key."""
    node = nth(graph, "TensorScatter", 2)
    zero = before(graph, node, "Mul", [node.input[1], constant(graph, 0.0, np.float32)])
    first = before(graph, node, "Gather", [node.input[1], constant(graph, [0])], axis=0)
    total = before(graph, node, "Add", [first, zero])
    feed(graph, node.output[0], 1, total)


# --- Decode ------------------------------------------------------------------------------------------------------------


def written_one_slot_on(graph: onnx.GraphProto) -> None:
    """Past the last slot it would be written outside, so that it stops there."""
    node = nth(graph, "TensorScatter")
    one = before(graph, node, "Add", [node.input[2], constant(graph, 1)])
    shape = before(graph, node, "Shape", [node.input[0]], start=2, end=3)
    size = before(graph, node, "Shape", [node.input[1]], start=2, end=3)
    last = before(graph, node, "Sub", [shape, size])
    capped = before(graph, node, "Min", [one, last])
    feed(graph, node.output[0], 2, capped)


def written_one_slot_back(graph: onnx.GraphProto) -> None:
    through(graph, nth(graph, "TensorScatter", 5), 2, "Sub", constant(graph, 1))


def written_where_the_first_row_ends(graph: onnx.GraphProto) -> None:
    node = nth(graph, "TensorScatter", 1)
    feed(graph, node.output[0], 2, first_row(graph, node, "past_lengths"))


def mask_all_true(graph: onnx.GraphProto) -> None:
    through(graph, nth(graph, "Attention", 1), 3, "Or", constant(graph, True, np.bool_))


def mask_excludes_the_token_itself(graph: onnx.GraphProto) -> None:
    nth(graph, "LessOrEqual").op_type = "Less"


def mask_one_slot_too_far(graph: onnx.GraphProto) -> None:
    through(graph, nth(graph, "LessOrEqual"), 1, "Add", constant(graph, 1))


def mask_from_the_first_row(graph: onnx.GraphProto) -> None:
    through(graph, nth(graph, "LessOrEqual"), 1, "Gather", constant(graph, [0]), axis=0)


def mask_sees_the_whole_chunk(graph: onnx.GraphProto) -> None:
    node = nth(graph, "LessOrEqual")
    last = before(graph, node, "ReduceMax", [node.input[1], constant(graph, [2])], keepdims=1)
    through(graph, nth(graph, "LessOrEqual"), 1, "Max", last)


def first_rows_length_for_all(graph: onnx.GraphProto) -> None:
    name = first_row(graph, reader(graph, "past_lengths"), "past_lengths")
    for other in graph.node:
        if not other.name.startswith("mutant_"):
            other.input[:] = [name if i == "past_lengths" else i for i in other.input]


def rotary_positions_one_up(graph: onnx.GraphProto) -> None:
    through(graph, nth(graph, "Cast"), 0, "Add", constant(graph, 1))


def learned_positions_one_up(graph: onnx.GraphProto) -> None:
    through(graph, reader(graph, "positions.weight"), 1, "Add", constant(graph, 1))


def positions_stand_still_in_a_chunk(graph: onnx.GraphProto) -> None:
    through(graph, nth(graph, "Add"), 1, "Mul", constant(graph, 0))


def stale_cache(graph: onnx.GraphProto) -> None:
    """A layer attends to what its cache was without the new token's value: that slot is zero."""
    node = nth(graph, "Attention", 1)
    scatter = nth(graph, "TensorScatter", 3)
    zeros = before(graph, node, "Mul", [scatter.input[1], constant(graph, 0.0, np.float32)])
    stale = before(graph, node, "TensorScatter", [scatter.output[0], zeros, "past_lengths"], axis=2, mode="linear")
    feed(graph, node.output[0], 2, stale)


def another_layers_cache_is_read(graph: onnx.GraphProto) -> None:
    nth(graph, "Attention", 1).input[1] = nth(graph, "Attention", 0).input[1]


def another_layers_key_is_cached(graph: onnx.GraphProto) -> None:
    nth(graph, "TensorScatter", 4).input[1] = nth(graph, "TensorScatter", 0).input[1]


def cache_rounded_to_half(graph: onnx.GraphProto) -> None:
    node = nth(graph, "TensorScatter", 2)
    half = before(graph, node, "Cast", [node.input[1]], to=TensorProto.FLOAT16)
    back = before(graph, node, "Cast", [half], to=TensorProto.FLOAT)
    feed(graph, node.output[0], 1, back)
