"""The portable decode graph, rewritten for ONNX Runtime's CPU kernels. Same inputs and outputs, same numbers up to rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tformer_deploy.backends.graph import PROVIDER, WEIGHTS_FOLDER, import_runtime
from tformer_deploy.bundle.signature import INPUT_IDS, PAST_LENGTHS, cache_names

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tformer_deploy.config import ModelConfig

_INT32 = 6  # onnx.TensorProto
_PREFIX = "cpu."  # no exported value is named so
_CONTRIB = "com.microsoft"


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
    turns = _Turns(proto.graph, config)
    new = graph.add("Shape", [INPUT_IDS], f"{_PREFIX}new", start=1, end=2)
    total = graph.add("Add", [PAST_LENGTHS, new], f"{_PREFIX}total")
    last = graph.add("Sub", [total, graph.constant("one", (1,))], f"{_PREFIX}last")
    lengths = graph.add("Cast", [last], f"{_PREFIX}lengths", to=_INT32)
    longest = graph.add("ReduceMax", [total], f"{_PREFIX}longest", keepdims=0)
    longest = graph.add("Cast", [longest], f"{_PREFIX}longest32", to=_INT32)
    split = graph.constant("split", (0, 0, config.n_heads, config.head_dim))
    written = {node.output[0]: node.input[1] for node in proto.graph.node if node.op_type == "TensorScatter"}
    past, present = cache_names(config.n_layers, "past_key_values"), cache_names(config.n_layers, "present")
    rows = _Rows(graph, proto.graph)
    layer, made = 0, set()
    for node in proto.graph.node:
        if node.op_type == "TensorScatter" or node.output[0] in made:
            continue
        if node.op_type != "Attention":
            graph.nodes.append(node)
            continue
        place, result = f"{_PREFIX}{layer}", node.output[0]
        key, value = present[2 * layer : 2 * layer + 2]
        turned = turns.of(node.input[0], written[key])
        query, keys = turned.inputs if turned else (node.input[0], written[key])
        inputs = [
            rows.of(query, config.n_heads),
            rows.of(keys, config.n_kv_heads),
            rows.of(written[value], config.n_kv_heads),
        ]
        given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes = {name: given[name] for name in ("scale", "softcap") if name in given}
        if layer in config.window_layers:
            attributes["local_window_size"] = config.window
        if turned:
            attributes["do_rotary"] = 1
        merged = rows.merged(result)
        fused = onnx.helper.make_node(
            "GroupQueryAttention",
            [*inputs, *past[2 * layer : 2 * layer + 2], lengths, longest, *(turned.tables if turned else ())],
            [merged or f"{place}.fused", key, value], domain=_CONTRIB, num_heads=config.n_heads,
            kv_num_heads=config.n_kv_heads, **attributes,
        )  # fmt: skip
        graph.nodes.append(fused)
        made.add(merged)
        if merged is None:
            apart = graph.add("Reshape", [f"{place}.fused", split], f"{place}.apart")
            graph.add("Transpose", [apart], result, perm=[0, 2, 1, 3])
        layer += 1
    graph.finish()
    _allow_contrib(proto)


class Turned(NamedTuple):
    """A query and a key before their positions are turned into them, and the names of the tables that do it."""

    inputs: tuple[str, str]
    tables: tuple[str, str]


def look_up_angles(proto: Any, config: ModelConfig, weights_folder: Path) -> None:
    """Cosines and sines are looked up in tables of all positions instead of computed: an instruction for many values and one for
    what is left at the end of an array differ in their last bit, so that a row's would depend on its neighbours.

    Args:
        proto: The decode graph (onnx.ModelProto); changed.
        config: The model.
        weights_folder: The bundle, where the graph's tensors lie.
    """
    names = sorted({name for node in proto.graph.node if node.op_type == "RotaryEmbedding" for name in node.input[1:3]})
    if not names:
        return
    import onnx

    values = _run_for_all_positions(proto, names, config.max_length, weights_folder)
    graph = _Graph(proto)
    new = graph.add("Shape", [INPUT_IDS], f"{_PREFIX}positions.new", start=1, end=2)
    count = graph.add("Squeeze", [new], f"{_PREFIX}positions.count")
    for name, number in (("zero", 0), ("step", 1)):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(number), f"{_PREFIX}positions.{name}"))
    offsets = graph.add("Range", [f"{_PREFIX}positions.zero", count, f"{_PREFIX}positions.step"], f"{_PREFIX}positions.offsets")
    past = graph.add("Unsqueeze", [PAST_LENGTHS, graph.constant("positions.axis", (1,))], f"{_PREFIX}positions.past")
    positions = graph.add("Add", [past, offsets], f"{_PREFIX}positions")
    looked_up = {}
    for name, value in zip(names, values, strict=True):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value[0], f"{_PREFIX}{name}.table"))
        looked_up[name] = graph.add("Gather", [f"{_PREFIX}{name}.table", positions], f"{_PREFIX}{name}", axis=0)
    for node in proto.graph.node:
        if node.op_type == "RotaryEmbedding":
            node.input[1], node.input[2] = looked_up[node.input[1]], looked_up[node.input[2]]
        graph.nodes.append(node)
    graph.finish()


def _run_for_all_positions(proto: Any, names: Sequence[str], count: int, weights_folder: Path) -> list[NDArray[np.float32]]:
    """The values of a row of ``count`` tokens from position 0, [1, count, …] each; nothing of the row itself may count."""
    import onnx

    nodes, wanted = [], set(names)
    for node in reversed(proto.graph.node):
        if wanted & set(node.output):
            nodes.append(node)
            wanted |= set(node.input)
    graph = onnx.helper.make_graph(
        list(reversed(nodes)), "angles", [value for value in proto.graph.input if value.name in (INPUT_IDS, PAST_LENGTHS)],
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names],
        [tensor for tensor in proto.graph.initializer if tensor.name in wanted],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)
    runtime = import_runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(WEIGHTS_FOLDER, str(weights_folder))
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=[PROVIDER])
    fed = {INPUT_IDS: np.zeros((1, count), np.int64), PAST_LENGTHS: np.zeros(1, np.int64)}
    found: list[NDArray[np.float32]] = session.run(list(names), {i.name: fed[i.name] for i in session.get_inputs()})
    return found


class _Turns:
    """Finds layers whose queries and keys GroupQueryAttention may turn itself, with the tables of :func:`look_up_angles`."""

    def __init__(self, original: Any, config: ModelConfig) -> None:
        self._makers: dict[str, Any] = {output: node for node in original.node for output in node.output}
        self._widths = {tensor.name: tensor.dims[1] for tensor in original.initializer if len(tensor.dims) == 2}
        self._head_dim = config.head_dim

    def of(self, query: str, key: str) -> Turned | None:
        """What a layer's attention takes in the place of a query and key; None where nothing turns them last, or not alike."""
        pair = [self._made_by("RotaryEmbedding", name) for name in (query, key)]
        if not all(pair) or pair[0][1:] != pair[1][1:]:
            return None
        gathers = [self._made_by("Gather", name) for name in pair[0][1:]]
        if len(gathers) != 2 or not all(gathers):
            return None
        (turned, *_), (turned_key, *_) = pair
        (cosines, *_), (sines, *_) = gathers
        # The kernel takes whole groups of 16, in heads and in what is turned of them.
        if self._head_dim % 16 or self._widths[cosines] % 8:
            return None
        return Turned((turned, turned_key), (cosines, sines))

    def _made_by(self, kind: str, value: str) -> list[str]:
        """Inputs of the node that makes a value; none where it is of another kind."""
        maker = self._makers.get(value)
        return [str(name) for name in maker.input] if maker is not None and maker.op_type == kind else []


class _Rows:
    """Values [B, heads, S, D] as rows [B, S, heads * D], which is how most of them began: what split them is left out.

    Args:
        graph: Where nodes are added.
        original: The graph as it was (onnx.GraphProto).
    """

    def __init__(self, graph: _Graph, original: Any) -> None:
        self._graph = graph
        self._makers = {output: node for node in original.node for output in node.output}
        self._readers: dict[str, list[Any]] = {}
        for node in original.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._found: dict[str, str] = {}
        self._flat = graph.constant("flat", (0, 0, -1))

    def of(self, value: str, heads: int) -> str:
        """The rows of a value."""
        if value not in self._found:
            self._found[value] = self._make(value, heads)
        return self._found[value]

    def merged(self, value: str) -> str | None:
        """The name of ``value`` [B, heads, S, D] as rows, where the graph makes nothing else of it."""
        for kind in ("Transpose", "Reshape"):
            readers = self._readers.get(value, [])
            if len(readers) != 1 or readers[0].op_type != kind or (kind == "Transpose" and not _swaps_heads(readers[0])):
                return None
            value = str(readers[0].output[0])
        return value

    def _make(self, value: str, heads: int) -> str:
        import onnx

        maker, name = self._makers.get(value), f"{_PREFIX}{value}.rows"
        if maker is not None and maker.op_type == "RotaryEmbedding":
            given = {a.name: onnx.helper.get_attribute_value(a) for a in maker.attribute} | {"num_heads": heads}
            rows = self.of(str(maker.input[0]), heads)
            return self._graph.add("RotaryEmbedding", [rows, *maker.input[1:]], name, **given)
        if maker is not None and maker.op_type == "Transpose" and _swaps_heads(maker):
            split = self._makers.get(str(maker.input[0]))
            if split is not None and split.op_type == "Reshape":
                return str(split.input[0])
            return self._graph.add("Reshape", [maker.input[0], self._flat], name)
        turned = self._graph.add("Transpose", [value], f"{name}.turned", perm=[0, 2, 1, 3])
        return self._graph.add("Reshape", [turned, self._flat], name)


def take_one_token(proto: Any, config: ModelConfig) -> None:
    """Specialises a graph for one new token a row: with S = 1, [B, S, heads, D] lies in memory as [B, heads, S, D] does, so that what
    turns one into the other becomes a Reshape, and neighbouring ones become one.

    Args:
        proto: The decode graph (onnx.ModelProto), folded or not; changed.
        config: The model.
    """
    graph = _Graph(proto)
    apart = graph.constant("one.heads", (0, -1, 1, config.head_dim))
    together = graph.constant("one.rows", (0, 1, -1, config.head_dim))
    attended = {node.output[0] for node in proto.graph.node if node.op_type == "Attention"}
    makers: dict[str, Any] = {}
    for node in proto.graph.node:
        if node.op_type == "Transpose" and _swaps_heads(node):
            made = makers.get(node.input[0])
            after = node.input[0] in attended or (made is not None and made.op_type == "Reshape" and made.input[0] in attended)
            graph.add("Reshape", [node.input[0], together if after else apart], node.output[0])
        else:
            graph.nodes.append(node)
        if graph.nodes[-1].op_type == "Reshape":
            before = makers.get(graph.nodes[-1].input[0])
            # Only the leading 0 of our own shapes refers to what comes in: the batch, which every form of a value has.
            if before is not None and before.op_type == "Reshape":
                graph.nodes[-1].input[0] = before.input[0]
        makers |= dict.fromkeys(node.output, graph.nodes[-1])
    graph.finish()


def fuse_norms(proto: Any) -> None:
    """A sum and the RMS norm that reads it become one SkipSimplifiedLayerNormalization, which gives both.

    Args:
        proto: onnx.ModelProto; changed.
    """
    import onnx

    graph = _Graph(proto)
    norms: dict[str, Any] = {}
    for node in proto.graph.node:
        if node.op_type == "RMSNormalization":
            norms.setdefault(node.input[0], node)
    weights = {tensor.name for tensor in proto.graph.initializer}
    fused = set()
    for node in proto.graph.node:
        norm = norms.get(node.output[0]) if node.op_type == "Add" else None
        if norm is not None and not weights & set(node.input):
            epsilon = next(a.f for a in norm.attribute if a.name == "epsilon")
            graph.nodes.append(
                onnx.helper.make_node(
                    "SkipSimplifiedLayerNormalization", [*node.input, norm.input[1]], [norm.output[0], "", "", node.output[0]],
                    domain=_CONTRIB, epsilon=epsilon,
                )
            )  # fmt: skip
            fused.add(norm.output[0])
        elif node.output[0] not in fused:
            graph.nodes.append(node)
    graph.finish()
    _allow_contrib(proto)


def untie_head(proto: Any) -> None:
    """A tied head gets an initializer of its own over the same bytes: packed weights are saved only where one operator reads them.

    Args:
        proto: onnx.ModelProto with external data; changed.
    """
    tables = {node.input[0] for node in proto.graph.node if node.op_type == "Gather"}
    for node in proto.graph.node:
        if node.op_type in ("Gemm", "MatMul") and node.input[1] in tables:
            tied = next(tensor for tensor in proto.graph.initializer if tensor.name == node.input[1])
            apart = proto.graph.initializer.add()
            apart.CopyFrom(tied)
            apart.name = node.input[1] = f"{_PREFIX}{tied.name}"


def _swaps_heads(transpose: Any) -> bool:
    return list(transpose.attribute[0].ints) == [0, 2, 1, 3]


def _allow_contrib(proto: Any) -> None:
    import onnx

    if all(opset.domain != _CONTRIB for opset in proto.opset_import):
        proto.opset_import.append(onnx.helper.make_opsetid(_CONTRIB, 1))
