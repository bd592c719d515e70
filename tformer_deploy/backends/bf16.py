"""A bf16 bundle's graphs cast to fp32, for a runtime that has no bf16 arithmetic: same structure, same weight values."""

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

_BFLOAT16, _FLOAT = 16, 1  # onnx.TensorProto


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
    with (folder / WEIGHTS).open("wb") as file:
        for name in bundle.manifest.tensors:
            file.write(b"\0" * (-file.tell() % 4096))
            data = bundle.tensor(name).astype(np.float32).tobytes()
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


def _point(tensor: Any, place: tuple[int, int]) -> None:
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
