"""The portable decode graph, rewritten for ONNX Runtime's CPU kernels. Same inputs and outputs, same numbers up to rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_deploy.bundle.signature import INPUT_IDS, PAST_LENGTHS, cache_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tformer_deploy.config import ModelConfig

_INT32 = 6  # onnx.TensorProto
_PREFIX = "cpu."  # no exported value is named so


class _Graph:
    """A graph being rebuilt node by node."""

    def __init__(self, proto: Any) -> None:
        import onnx

        self._onnx = onnx
        self.graph = proto.graph
        self.nodes: list[Any] = []

    def constant(self, name: str, value: Sequence[int]) -> str:
        """An int64 vector."""
        name = _PREFIX + name
        self.graph.initializer.append(self._onnx.numpy_helper.from_array(np.array(value, dtype=np.int64), name))
        return name

    def add(self, kind: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: Any) -> str:
        """A node with one output, whose name gets our prefix unless the graph has the name already."""
        self.nodes.append(self._onnx.helper.make_node(kind, list(inputs), [output], domain=domain, **attributes))
        return output

    def finish(self) -> None:
        """Puts the nodes in place and drops what nothing reads any more."""
        needed = {output.name for output in self.graph.output}
        kept = []
        for node in reversed(self.nodes):
            if needed & set(node.output):
                kept.append(node)
                needed |= set(node.input)
        del self.graph.node[:]
        self.graph.node.extend(reversed(kept))
        unused = [tensor for tensor in self.graph.initializer if tensor.name not in needed]
        for tensor in unused:
            self.graph.initializer.remove(tensor)


def fold_grouped_heads(proto: Any, config: ModelConfig) -> None:
    """Attention of H query heads over K keys becomes attention of K heads with H/K times as many queries.

    Query head j * H/K + g stands next to its neighbours, so that [B, H, S, D] is [B, K, H/K * S, D] as it lies, for any S;
    the mask is repeated for the heads of a group. Keys and values are then read once a group instead of once a head.

    Args:
        proto: The decode graph (onnx.ModelProto); changed.
        config: The model.
    """
    heads, kv_heads, dim = config.n_heads, config.n_kv_heads, config.head_dim
    graph = _Graph(proto)
    grouped = graph.constant("grouped", (0, kv_heads, -1, dim))
    back = graph.constant("heads", (0, heads, -1, dim))
    axis, repeats = graph.constant("mask_axis", (2,)), graph.constant("mask_repeats", (1, 1, heads // kv_heads, 1, 1))
    minus_one = graph.constant("minus_one", (-1,))
    masks: dict[str, str] = {}
    for node in proto.graph.node:
        if node.op_type != "Attention":
            graph.nodes.append(node)
            continue
        query, mask, result = node.input[0], node.input[3], node.output[0]
        if mask not in masks:
            name = f"{_PREFIX}{mask}"
            wide = graph.add("Unsqueeze", [mask, axis], f"{name}.wide")
            repeated = graph.add("Expand", [wide, repeats], f"{name}.repeated")
            before = graph.add("Shape", [mask], f"{name}.before", start=0, end=2)
            after = graph.add("Shape", [mask], f"{name}.after", start=3, end=4)
            shape = graph.add("Concat", [before, minus_one, after], f"{name}.shape", axis=0)
            masks[mask] = graph.add("Reshape", [repeated, shape], f"{name}.folded")
        node.input[0] = graph.add("Reshape", [query, grouped], f"{_PREFIX}{result}.query")
        node.input[3] = masks[mask]
        node.output[0] = f"{_PREFIX}{result}.grouped"
        graph.nodes.append(node)
        graph.add("Reshape", [node.output[0], back], result)
    graph.finish()


def use_group_query_attention(proto: Any, config: ModelConfig) -> None:
    """TensorScatter and Attention of each layer become one GroupQueryAttention, which writes the cache and reads it up to each
    row's length. Serves prompts (``past_lengths`` 0), one new token a row, or several new tokens of one row.

    Args:
        proto: The decode graph (onnx.ModelProto); changed.
        config: The model.
    """
    import onnx

    graph = _Graph(proto)
    new = graph.add("Shape", [INPUT_IDS], f"{_PREFIX}new", start=1, end=2)
    total = graph.add("Add", [PAST_LENGTHS, new], f"{_PREFIX}total")
    last = graph.add("Sub", [total, graph.constant("one", (1,))], f"{_PREFIX}last")
    lengths = graph.add("Cast", [last], f"{_PREFIX}lengths", to=_INT32)
    longest = graph.add("ReduceMax", [total], f"{_PREFIX}longest", keepdims=0)
    longest = graph.add("Cast", [longest], f"{_PREFIX}longest32", to=_INT32)
    flat = graph.constant("flat", (0, 0, -1))
    split = graph.constant("split", (0, 0, config.n_heads, config.head_dim))
    written = {node.output[0]: node.input[1] for node in proto.graph.node if node.op_type == "TensorScatter"}
    past, present = cache_names(config.n_layers, "past_key_values"), cache_names(config.n_layers, "present")
    layer = 0
    for node in proto.graph.node:
        if node.op_type == "TensorScatter":
            continue
        if node.op_type != "Attention":
            graph.nodes.append(node)
            continue
        place, result = f"{_PREFIX}{layer}", node.output[0]
        key, value = present[2 * layer : 2 * layer + 2]
        rows = []
        for name, source in (("query", node.input[0]), ("key", written[key]), ("value", written[value])):
            turned = graph.add("Transpose", [source], f"{place}.{name}.turned", perm=[0, 2, 1, 3])
            rows.append(graph.add("Reshape", [turned, flat], f"{place}.{name}"))
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes = {name: given[name] for name in ("scale", "softcap") if name in given}
        if layer in config.window_layers:
            attributes["local_window_size"] = config.window
        fused = onnx.helper.make_node(
            "GroupQueryAttention", [*rows, *past[2 * layer : 2 * layer + 2], lengths, longest],
            [f"{place}.fused", key, value], domain="com.microsoft", num_heads=config.n_heads, kv_num_heads=config.n_kv_heads,
            **attributes,
        )  # fmt: skip
        graph.nodes.append(fused)
        apart = graph.add("Reshape", [f"{place}.fused", split], f"{place}.apart")
        graph.add("Transpose", [apart], result, perm=[0, 2, 1, 3])
        layer += 1
    graph.finish()
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
