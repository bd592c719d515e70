"""The graph that TensorRT parses: a portable graph with its capacity fixed and its nodes named by layer, in memory."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import onnx
from google.protobuf.message import DecodeError
from onnx import inliner

from tformer_deploy.errors import InputError
from tformer_deploy.exporters.tensorrt.fusion import Product
from tformer_deploy.exporters.tensorrt.vocabulary import pad_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

# Query, key, value, mask.
_READ = 4
_PART = re.compile(r"(blocks\.\d+)\.(attention|feed_forward|\w*norm\w*)")
_CACHE = re.compile(r"(?:past_key_values|present)\.(\d+)\.")
_BLOCK_ENDS = re.compile(r"blocks\.(\d+)\.output")


def fixed_graph(path: Path, capacity: int, expand_attention: bool = False) -> bytes:
    """A bundle's graph with ``capacity`` as a number, which TensorRT demands of a cache, and nodes named by layer.

    Attention nodes are called ``blocks.3.attention``, others ``blocks.3.attention/…`` and so on: builder, log, plan and error
    messages then speak of layers. The weights stay where they are, but for a head that must be padded: the parser is told the
    path that the bytes came from.

    Args:
        path: ``decode.onnx`` or ``prefill.onnx`` of a bundle.
        capacity: Slots of every cache row.
        expand_attention: Write every Attention as the operators that the standard defines it by: for what TensorRT's parser does
            not take, a soft cap, where unfused attention is allowed.

    Raises:
        InputError: It is no graph, an attention has inputs that TensorRT drops or a causal flag on a cache, or it has no
            dimension of that name.
    """
    try:
        proto = onnx.load(path, load_external_data=False)
    except DecodeError as e:
        raise InputError(f"{path} is no ONNX graph: {e}.", "Export the bundle again.") from e
    written = {name for node in proto.graph.node if node.op_type == "TensorScatter" for name in node.output}
    for node in proto.graph.node:
        _refuse_misread(node, written, path)
    fixed = 0
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "capacity":
                dim.dim_value = capacity
                fixed += 1
    if not fixed:
        raise InputError(f"{path} has no dimension named capacity.", "Export the bundle again.")
    name_by_layer(proto.graph)
    pad_vocabulary(proto.graph, path.parent)
    if expand_attention:
        proto = inliner.inline_selected_functions(onnx.shape_inference.infer_shapes(proto), [("", "Attention")], False, True)
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


def quantised_products(graph: bytes) -> list[Product]:
    """Every product of a fixed graph with a matrix that a DequantizeLinear makes."""
    nodes = onnx.load_from_string(graph).graph.node
    dequantized = {node.output[0]: node for node in nodes if node.op_type == "DequantizeLinear"}
    found = []
    for node in nodes:
        matrix = dequantized.get(node.input[1]) if node.op_type == "MatMul" else None
        if matrix is not None:
            found.append(Product(matrix.output[0].removesuffix(".weight.dequantized"), matrix.name, node.name))
    return found


def name_by_layer(graph: onnx.GraphProto) -> None:
    """Puts our name of the layer into every node's name, once; an attention's name is its layer's."""
    block, attentions = None, 0
    for node in graph.node:
        place = _place(node) or block
        if node.op_type == "Attention":
            node.name = f"blocks.{attentions}.attention"
            attentions += 1
        elif place is not None:
            node.name = f"{place}/{node.name or node.op_type}"
        if place is not None:
            block = place.rsplit(".", 1)[0] if place.count(".") > 1 else place
        # What follows the last value of a block belongs to the next one, or to the head, until something says more.
        if any(_BLOCK_ENDS.fullmatch(name) for name in node.output):
            block = None


def _place(node: onnx.NodeProto) -> str | None:
    """``blocks.3.attention`` where a weight, a named value or a cache of the node says so."""
    names: Iterable[str] = (*node.input, *node.output)
    for name in names:
        if found := _PART.match(name):
            return f"{found.group(1)}.{found.group(2)}"
        if found := _CACHE.match(name):
            return f"blocks.{found.group(1)}.attention"
    return None


def _refuse_misread(node: onnx.NodeProto, written: set[str], path: Path) -> None:
    """What TensorRT-RTX 1.7 reads otherwise than the standard says, without a word."""
    if node.op_type != "Attention":
        return
    if dropped := [name for name in node.input[_READ:] if name]:
        raise InputError(
            f"{path}: Attention {node.name} reads {', '.join(dropped)} beside query, key, value and mask; TensorRT would drop that.",
            "Export the bundle again.",
        )
    causal = any(attribute.name == "is_causal" and attribute.i for attribute in node.attribute)
    if causal and node.input[1] in written:
        raise InputError(
            f"{path}: Attention {node.name} has a causal flag and reads the cache {node.input[1]}; it would see the wrong slots.",
            "Export the bundle again.",
        )
