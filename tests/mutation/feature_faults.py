"""Faults in an exported graph at what only some families have: windows, ALiBi, soft caps, more norms, multipliers, layouts."""

from __future__ import annotations

import numpy as np
import onnx

from mutation.surgery import (
    Edit,
    all_of,
    before,
    bypass,
    constant,
    feed,
    nth,
    reader,
    set_attribute,
    swap_inputs,
    through,
    write_out,
)

# --- Windows: layers 0 and 2 have one, 1 and 3 see everything ------------------------------------------------------------


def window_by(more: int) -> Edit:
    """The window is so many tokens wider."""

    def edit(graph: onnx.GraphProto) -> None:
        edge = reader(graph, nth(graph, "Sub").output[0])
        assert edge.op_type == "Greater"
        through(graph, edge, 1, "Sub", constant(graph, more))

    return edit


def window_dropped_in_a_layer(graph: onnx.GraphProto) -> None:
    nth(graph, "Attention", 2).input[3] = nth(graph, "LessOrEqual").output[0]


def window_in_a_full_layer(graph: onnx.GraphProto) -> None:
    node, mask = nth(graph, "Attention", 1), nth(graph, "Attention").input[3]
    set_attribute(node, "is_causal", 0)
    feed(graph, node.output[0], 3, mask)


def window_one_layer_on(graph: onnx.GraphProto) -> None:
    window_in_a_full_layer(graph)
    nth(graph, "Attention").input[3] = nth(graph, "LessOrEqual").output[0]


def window_without_causal(graph: onnx.GraphProto) -> None:
    bypass(graph, nth(graph, "And"), 1)


def window_from_the_first_row(graph: onnx.GraphProto) -> None:
    through(graph, nth(graph, "Greater"), 1, "Gather", constant(graph, [0]), axis=0)


def rope_bases_swapped(graph: onnx.GraphProto) -> None:
    a, b = reader(graph, "rope.frequencies"), reader(graph, "window_rope.frequencies")
    swap_inputs(a, b)


def window_base_in_a_full_layer(graph: onnx.GraphProto) -> None:
    windowed, full = nth(graph, "RotaryEmbedding"), [nth(graph, "RotaryEmbedding", i) for i in (2, 3)]
    for node in full:
        node.input[1:] = windowed.input[1:]


# --- Soft caps, scales --------------------------------------------------------------------------------------------------


def softcap_constant(graph: onnx.GraphProto) -> None:
    set_attribute(nth(graph, "Attention", 1), "softcap", 5.0)  # right: 4


def softcap_dropped(graph: onnx.GraphProto) -> None:
    set_attribute(nth(graph, "Attention", 2), "softcap", 0.0)


def softcap_after_the_mask(graph: onnx.GraphProto) -> None:
    write_out(graph, 0, groups=2, cap_after_mask=True)


def attention_written_out(graph: onnx.GraphProto) -> None:
    write_out(graph, 0, groups=2)


def logit_softcap_dropped(graph: onnx.GraphProto) -> None:
    bypass(graph, nth(graph, "Tanh"))


def logit_softcap_constant(graph: onnx.GraphProto) -> None:
    reader(graph, nth(graph, "Tanh").output[0]).input[1] = constant(graph, 11.0, np.float32)  # right: 10


def default_attention_scale(graph: onnx.GraphProto) -> None:
    set_attribute(nth(graph, "Attention", 3), "scale", 0.25)  # 1 / sqrt(16); the model has 0.3


def embedding_scale_dropped(graph: onnx.GraphProto) -> None:
    bypass(graph, reader(graph, nth(graph, "Gather", _embedding(graph)).output[0]))


def embedding_scale_only_in_the_residual(graph: onnx.GraphProto) -> None:
    """The first layer's norm reads the embedding before it is scaled, which only its epsilon can tell from the right one."""
    embedding = nth(graph, "Gather", _embedding(graph)).output[0]
    reader(graph, "blocks.0.norm1.weight").input[0] = embedding


def _embedding(graph: onnx.GraphProto) -> int:
    return next(i for i, node in enumerate(all_of(graph, "Gather")) if node.input[0] == "embedding.weight")


# --- Norms on queries and keys, norms after attention and feed-forward ----------------------------------------------------


def norm_dropped(name: str) -> Edit:
    """The norm with this weight lets everything through."""
    return lambda graph: bypass(graph, reader(graph, f"{name}.weight"))


def norms_swapped(a: str, b: str) -> Edit:
    """Two norms have each other's weight."""
    return lambda graph: swap_inputs(reader(graph, f"{a}.weight"), reader(graph, f"{b}.weight"))


def norm_after_the_residual(graph: onnx.GraphProto) -> None:
    """What attention returns is added first, and the sum is normed."""
    norm = reader(graph, "blocks.1.post_norm1.weight")
    add = reader(graph, norm.output[0])
    total = before(graph, norm, "Add", [add.input[0], norm.input[0]])
    feed(graph, norm.output[0], 0, total)
    bypass(graph, add, list(add.input).index(norm.output[0]))


def query_norm_after_rotation(graph: onnx.GraphProto) -> None:
    """Layer 0's queries are rotated first and normed then."""
    norm = reader(graph, "blocks.0.attention.query_norm.weight")
    weight = norm.input[1]
    attention = nth(graph, "Attention")
    rotated, output = attention.input[0], attention.output[0]
    normed = before(graph, attention, "RMSNormalization", [rotated, weight], axis=-1, epsilon=1e-5)
    feed(graph, output, 0, normed)
    bypass(graph, norm)


def one_heads_norm_for_all(graph: onnx.GraphProto) -> None:
    node = reader(graph, "blocks.0.attention.query_norm.weight")
    through(graph, node, list(node.input).index("blocks.0.attention.query_norm.weight"), "Gather", constant(graph, [0]), axis=0)


def embedding_norm_dropped(graph: onnx.GraphProto) -> None:
    bypass(graph, reader(graph, "embedding_norm.weight"))


# --- Residuals side by side, their multiplier, the head ---------------------------------------------------------------------


def parallel_read_in_sequence(graph: onnx.GraphProto) -> None:
    """Layer 1's feed-forward reads what attention has added to."""
    norm, attention = reader(graph, "blocks.1.norm2.weight"), reader(graph, "blocks.1.attention.out.weight")
    scaled = before(graph, norm, "Mul", [attention.output[0], constant(graph, 0.3, np.float32)])
    feed(graph, norm.output[0], 0, before(graph, norm, "Add", [norm.input[0], scaled]))


def parallel_read_through_one_norm(graph: onnx.GraphProto) -> None:
    """Layer 1's feed-forward reads what was normed for attention."""
    bypass(graph, reader(graph, "blocks.1.norm2.weight"))
    up, query = (reader(graph, f"blocks.1.{name}.weight") for name in ("feed_forward.up", "attention.query"))
    up.input[0] = query.input[0]


def feed_forward_dropped(graph: onnx.GraphProto) -> None:
    through(graph, reader(graph, "blocks.2.feed_forward.down.weight"), 0, "Mul", constant(graph, 0.0, np.float32))


def residual_scale_dropped(graph: onnx.GraphProto) -> None:
    bypass(graph, _residual_scale(graph, 1))


def residual_scale_on_everything(graph: onnx.GraphProto) -> None:
    """The sum is scaled, not what is added."""
    add = reader(graph, _residual_scale(graph, 1).output[0])
    through(graph, add, 0, "Mul", constant(graph, 0.3, np.float32))


def _residual_scale(graph: onnx.GraphProto, layer: int) -> onnx.NodeProto:
    """Attention and feed-forward are added first, then scaled."""
    both = reader(graph, reader(graph, f"blocks.{layer}.attention.out.weight").output[0])
    node = reader(graph, both.output[0])
    assert (both.op_type, node.op_type) == ("Add", "Mul")
    return node


def logit_scale_dropped(graph: onnx.GraphProto) -> None:
    scale = next(node for node in graph.node if node.output[0] == "logits")
    assert scale.op_type == "Mul"
    scale.input[1] = constant(graph, 1.0, np.float32)


def head_bias_dropped(graph: onnx.GraphProto) -> None:
    bypass(graph, reader(graph, "head.bias"))


def head_bias_after_the_scale(graph: onnx.GraphProto) -> None:
    through(graph, reader(graph, "head.bias"), 1, "Div", constant(graph, 0.25, np.float32))


# --- Partial rotary positions, layers without any -----------------------------------------------------------------------------


def rotary_over_the_whole_head(graph: onnx.GraphProto) -> None:
    """All 16 dims are rotated, by the angles of 8 twice over."""
    cos, sin = nth(graph, "RotaryEmbedding").input[1:]
    first = nth(graph, "RotaryEmbedding")
    wide = [before(graph, first, "Concat", [name, name], axis=-1) for name in (cos, sin)]
    for node in all_of(graph, "RotaryEmbedding"):
        node.input[1:] = wide
        set_attribute(node, "rotary_embedding_dim", 0)


def rotary_over_the_last_dims(graph: onnx.GraphProto) -> None:
    """The last 8 dims of layer 0's heads are rotated, not the first."""
    for place in (0, 1):
        node = nth(graph, "RotaryEmbedding", place)
        output, turned = node.output[0], constant(graph, [*range(8, 16), *range(8)])
        readers = [n.output[0] for n in graph.node if output in n.input]
        through(graph, node, 0, "Gather", turned, axis=3)
        for name in readers:
            other = next(n for n in graph.node if n.output[0] == name)
            through(graph, other, list(other.input).index(output), "Gather", turned, axis=3)


def nope_layer_rotated(graph: onnx.GraphProto) -> None:
    """Layer 1 has no positions; it gets layer 0's."""
    cos, sin = nth(graph, "RotaryEmbedding").input[1:]
    attention, scatter = nth(graph, "Attention", 1), nth(graph, "TensorScatter", 2)
    key = scatter.input[1]
    rotated = before(graph, scatter, "RotaryEmbedding", [key, cos, sin], rotary_embedding_dim=8)
    feed(graph, scatter.output[0], 1, rotated)
    if attention.input[1] == key:
        feed(graph, attention.output[0], 1, rotated)
    through(graph, nth(graph, "Attention", 1), 0, "RotaryEmbedding", cos, sin, rotary_embedding_dim=8)


def rotary_layer_left_unrotated(graph: onnx.GraphProto) -> None:
    """Layer 2's queries and keys, the last two that are rotated."""
    for node in all_of(graph, "RotaryEmbedding")[-2:]:
        bypass(graph, node)


# --- ALiBi --------------------------------------------------------------------------------------------------------------------


def alibi_slopes(kind: str, *others: object, **attributes: object) -> Edit:
    """The slopes go through an operator first."""

    def edit(graph: onnx.GraphProto) -> None:
        names = [constant(graph, other, np.float32 if isinstance(other, float) else np.int64) for other in others]
        through(graph, reader(graph, "alibi.slopes"), 0, kind, *names, **attributes)

    return edit


def alibi_lets_later_tokens_through(graph: onnx.GraphProto) -> None:
    through(graph, nth(graph, "Where"), 0, "Or", constant(graph, True, np.bool_))


def alibi_dropped_in_a_layer(graph: onnx.GraphProto) -> None:
    """Layer 1 gets the mask alone."""
    node, where = nth(graph, "Attention", 1), nth(graph, "Where")
    bias = before(graph, node, "Mul", [where.input[1], constant(graph, 0.0, np.float32)])
    feed(graph, node.output[0], 3, before(graph, node, "Where", [where.input[0], bias, where.input[2]]))


def alibi_without_the_querys_position(graph: onnx.GraphProto) -> None:
    """The bias is the slope times the key's position, not its distance from the query's."""
    bypass(graph, nth(graph, "Sub"))
