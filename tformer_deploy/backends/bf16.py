"""A bf16 bundle's graphs cast to fp32, for a runtime that has no bf16 arithmetic: same structure, same weight values.

What a quantised bundle stores in fewer bits becomes bf16 in the graph itself: such weights are rounded to bf16 there, and widened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tformer_deploy.bundle.manifest import WEIGHTS
from tformer_deploy.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tformer_deploy.bundle import Bundle

_BFLOAT16, _FLOAT16, _FLOAT = 16, 10, 1  # onnx.TensorProto


def write_fp32_graphs(bundle: Bundle, folder: Path, names: Sequence[str] = ("prefill.onnx", "decode.onnx")) -> None:
    """Writes graphs of a bundle (prefill.onnx and decode.onnx) and weights.bin in fp32 into ``folder``.

    Raises:
        CapabilityError: The package onnx is not installed.
    """
    try:
        import onnx
    except ImportError as e:
        raise CapabilityError(
            f"A bf16 bundle runs on the CPU through a graph cast to fp32, which needs the package onnx: {e}.",
            "Run pip install onnx, or export the bundle in fp32.",
        ) from e
    offsets: dict[str, tuple[int, int]] = {}
    with bundle.weights_path.open("rb") as source, (folder / WEIGHTS).open("wb") as file:
        for name, record in bundle.manifest.tensors.items():
            source.seek(record.offset)
            data = source.read(record.size)
            if record.dtype == "bf16":
                data = np.frombuffer(data, ml_dtypes.bfloat16).astype(np.float32).tobytes()
            file.write(b"\0" * (-file.tell() % 4096))
            offsets[name] = (file.tell(), len(data))
            file.write(data)
    for name in names:
        proto = onnx.load(bundle.path / name, load_external_data=False)
        _cast_graph(proto.graph, offsets)
        (folder / name).write_bytes(proto.SerializeToString(deterministic=True))


def _cast_graph(graph: Any, offsets: dict[str, tuple[int, int]]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.tensor_type.elem_type == _BFLOAT16:
            value.type.tensor_type.elem_type = _FLOAT
    rounded = _rounded_weights(graph)
    for tensor in graph.initializer:
        if tensor.name in offsets:
            _point(tensor, offsets[tensor.name])
        else:
            _cast_constant(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == _BFLOAT16:
                attribute.i = _FLOAT
            if attribute.HasField("t"):
                _cast_constant(attribute.t)
    _round(graph, rounded)


def _rounded_weights(graph: Any) -> set[str]:
    """Values in which the bf16 graph rounds a weight: dequantised matrices, and what is looked up in an fp16 table."""
    dtypes = {tensor.name: tensor.data_type for tensor in graph.initializer}
    looked_up = {n.output[0] for n in graph.node if n.op_type == "Gather" and dtypes.get(n.input[0]) == _FLOAT16}
    return {
        node.output[0]
        for node in graph.node
        if (node.op_type == "DequantizeLinear" and dtypes.get(node.input[1]) == _BFLOAT16)
        or (node.op_type == "Cast" and node.input[0] in looked_up)
    }


def _round(graph: Any, names: set[str]) -> None:
    """Puts a cast to bf16 and one back behind each of these values."""
    from onnx import helper

    nodes = []
    for node in graph.node:
        nodes.append(node)
        name = node.output[0]
        if name in names:
            node.output[0] = f"{name}.long"
            nodes.append(helper.make_node("Cast", [f"{name}.long"], [f"{name}.bf16"], to=_BFLOAT16))
            nodes.append(helper.make_node("Cast", [f"{name}.bf16"], [name], to=_FLOAT))
    del graph.node[:]
    graph.node.extend(nodes)


def _point(tensor: Any, place: tuple[int, int]) -> None:
    if tensor.data_type == _BFLOAT16:
        tensor.data_type = _FLOAT
    for entry in tensor.external_data:
        if entry.key == "offset":
            entry.value = str(place[0])
        elif entry.key == "length":
            entry.value = str(place[1])


def _cast_constant(tensor: Any) -> None:
    if tensor.data_type != _BFLOAT16:
        return
    raw = tensor.raw_data or np.array(tensor.int32_data, dtype=np.uint16).tobytes()
    values = np.frombuffer(raw, ml_dtypes.bfloat16).astype(np.float32)
    tensor.ClearField("int32_data")
    tensor.data_type, tensor.raw_data = _FLOAT, values.tobytes()
