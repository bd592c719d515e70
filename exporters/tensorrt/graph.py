"""The graph that TensorRT parses: the portable decode graph with its capacity fixed, in memory; the bundle is not touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx

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
        InputError: The graph has no dimension of that name.
    """
    proto = onnx.load(decode_path, load_external_data=False)
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
