"""The graph that TensorRT parses: the portable decode graph with its capacity fixed, in memory; the bundle is not touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
from google.protobuf.message import DecodeError

from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


def fixed_graph(decode_path: Path, capacity: int) -> bytes:
    """The decode graph with ``capacity`` as a number, which TensorRT demands of a cache.

    The weights stay where they are: the parser is told the path of the graph that the bytes came from.

    Args:
        decode_path: ``decode.onnx`` of a bundle.
        capacity: Slots of every cache row.

    Raises:
        InputError: It is no graph, an attention has inputs that TensorRT drops, or it has no dimension of that name.
    """
    try:
        proto = onnx.load(decode_path, load_external_data=False)
    except DecodeError as e:
        raise InputError(f"{decode_path} is no ONNX graph: {e}.", "Export the bundle again.") from e
    for node in proto.graph.node:
        _refuse_dropped_inputs(node, decode_path)
    fixed = 0
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "capacity":
                dim.dim_value = capacity
                fixed += 1
    if not fixed:
        raise InputError(f"{decode_path} has no dimension named capacity.", "Export the bundle again.")
    data: bytes = proto.SerializeToString(deterministic=True)
    return data


# Query, key, value, mask.
_READ = 4


def _refuse_dropped_inputs(node: onnx.NodeProto, path: Path) -> None:
    """TensorRT-RTX 1.7 drops the later inputs, lengths among them, without a word, and computes something else."""
    if node.op_type == "Attention" and (dropped := [name for name in node.input[_READ:] if name]):
        names = ", ".join(dropped)
        raise InputError(
            f"{path}: Attention {node.name} reads {names} beside query, key, value and mask; TensorRT would drop that.",
            "Export the bundle again.",
        )
