"""Small tools that edit an exported graph. A site is found by operator, weight or input, never by a traced name."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import helper, numpy_helper

Edit = Callable[[onnx.GraphProto], None]


def all_of(graph: onnx.GraphProto, kind: str) -> list[onnx.NodeProto]:
    """Every node of an operator, in order."""
    return [node for node in graph.node if node.op_type == kind]


def nth(graph: onnx.GraphProto, kind: str, n: int = 0) -> onnx.NodeProto:
    """The n-th node of an operator (Attention: of layer n)."""
    return all_of(graph, kind)[n]


def reader(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    """The first node that reads a value."""
    return next(node for node in graph.node if name in node.input)


def attribute(node: onnx.NodeProto, name: str) -> float:
    """A number."""
    return float(helper.get_attribute_value(next(a for a in node.attribute if a.name == name)))


def set_attribute(node: onnx.NodeProto, name: str, value: object) -> None:
    """Replaces an attribute, or adds it."""
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def constant(graph: onnx.GraphProto, value: object, dtype: type = np.int64) -> str:
    """A new constant; returns its name."""
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


def feed(graph: onnx.GraphProto, output: str, place: int, name: str) -> None:
    """The node that makes ``output`` reads ``name`` at ``place`` (nodes move when others are put before them)."""
    node = next(n for n in graph.node if n.output[0] == output)
    while len(node.input) <= place:
        node.input.append("")
    node.input[place] = name


def bypass(graph: onnx.GraphProto, node: onnx.NodeProto, place: int = 0) -> None:
    """Whatever reads a node's output reads its input instead."""
    old, new = node.output[0], node.input[place]
    for other in graph.node:
        other.input[:] = [new if name == old else name for name in other.input]


def swap_inputs(a: onnx.NodeProto, b: onnx.NodeProto, place: int = 1) -> None:
    """Two nodes exchange an input, such as their weights."""
    a.input[place], b.input[place] = b.input[place], a.input[place]


def first_row(graph: onnx.GraphProto, node: onnx.NodeProto, name: str) -> str:
    """A value [B] of which every row has the first row's; made before ``node``."""
    zero = before(graph, node, "Mul", [name, constant(graph, 0)])
    first = before(graph, node, "Gather", [name, constant(graph, [0])], axis=0)
    return before(graph, node, "Add", [zero, first])


def write_out(graph: onnx.GraphProto, layer: int, groups: int, cap_after_mask: bool = False) -> None:
    """An Attention with a mask becomes its own formula: MatMul, Mul, Tanh, mask, Softmax, MatMul.

    Args:
        graph: The graph.
        layer: Whose Attention.
        groups: Query heads of each key/value head.
        cap_after_mask: The soft cap comes after the mask, which then lets everything through.
    """
    node = nth(graph, "Attention", layer)
    query, key, value, mask = node.input[:4]
    scale, cap, output = attribute(node, "scale"), attribute(node, "softcap"), node.output[0]

    def put(kind: str, *inputs: str, **attributes: object) -> str:
        return before(graph, node, kind, list(inputs), **attributes)

    n_kv = next(i for i in graph.input if i.name.startswith("past_key_values")).type.tensor_type.shape.dim[1].dim_value
    repeated = constant(graph, np.repeat(np.arange(n_kv), groups))
    key, value = (put("Gather", name, repeated, axis=1) for name in (key, value))
    scores = put("Mul", put("MatMul", query, put("Transpose", key, perm=[0, 1, 3, 2])), constant(graph, scale, np.float32))

    def masked(scores: str) -> str:
        return put("Where", mask, scores, constant(graph, -np.inf, np.float32))

    def capped(scores: str) -> str:
        limit = constant(graph, cap, np.float32)
        return put("Mul", put("Tanh", put("Div", scores, limit)), limit) if cap else scores

    scores = capped(masked(scores)) if cap_after_mask else masked(capped(scores))
    result = put("MatMul", put("Softmax", scores, axis=-1), value)
    for other in graph.node:
        other.input[:] = [result if name == output else name for name in other.input]
