"""Heads whose number of outputs TensorRT handles badly get a few more, of zeros, which are cut off behind the product."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tformer_deploy.bundle.quantization import EMBEDDING, HEAD

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

# TensorRT-RTX 1.7 stores the table of a tied head twice where its rows are no multiple of this.
_STEP = 8
# A padded table lies in the graph itself, which must stay below 2 GiB; a larger one is left as it is.
_MOST = 1 << 30


def stored_twice(vocabulary: int, width: int) -> bool:
    """Whether TensorRT stores a tied table twice: its rows are no multiple of 8, and too many to be padded."""
    return vocabulary % _STEP != 0 and not _fits(vocabulary * width)


def pad_vocabulary(graph: onnx.GraphProto, folder: Path) -> None:
    """Pads a tied table whose rows are no multiple of 8, and a quantised head with an odd number of outputs.

    TensorRT-RTX 1.7 stores such a table twice (50,257 rows of GPT-2: 77 MB more), and unpacks such a head at each step.
    The logits stay those of the vocabulary.

    Args:
        graph: Changed; a padded tensor lies in it, all others where they are.
        folder: Where the graph's weights are.
    """
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    for i, node in enumerate(graph.node):
        if node.op_type == "Gemm" and node.input[1] == EMBEDDING:
            table = initializers[EMBEDDING]
            vocabulary = table.dims[0]
            if vocabulary % _STEP and _fits(*table.dims):
                _replace(table, _padded(table, folder, axis=0, fill=0))
                _cut(graph, i, vocabulary)
            return
        maker = makers.get(node.input[1]) if node.op_type == "MatMul" else None
        if maker is not None and maker.op_type == "DequantizeLinear" and maker.input[0] == HEAD:
            matrix, scales = (initializers[name] for name in maker.input[:2])
            vocabulary = matrix.dims[1]
            if vocabulary % 2 and _fits(*matrix.dims):
                _replace(matrix, _padded(matrix, folder, axis=1, fill=0))
                _replace(scales, _padded(scales, folder, axis=len(scales.dims) - 1, fill=1))
                _cut(graph, i, vocabulary)
                for value in [value for value in graph.value_info if value.name == maker.output[0]]:
                    graph.value_info.remove(value)
            return


def _padded(tensor: TensorProto, folder: Path, axis: int, fill: int) -> NDArray[np.generic]:
    """The tensor with ``fill`` up to the next multiple of 8 along an axis."""
    values = _values(tensor, folder)
    more = [(0, 0)] * values.ndim
    more[axis] = (0, -values.shape[axis] % _STEP)
    return np.pad(values, more, constant_values=values.dtype.type(fill))


def _values(tensor: TensorProto, folder: Path) -> NDArray[np.generic]:
    if tensor.data_location != TensorProto.EXTERNAL:
        return numpy_helper.to_array(tensor)
    place = {entry.key: entry.value for entry in tensor.external_data}
    with (folder / place["location"]).open("rb") as file:
        file.seek(int(place.get("offset", 0)))
        data = file.read(int(place["length"]))
    return numpy_helper.to_array(TensorProto(dims=tensor.dims, data_type=tensor.data_type, raw_data=data))


def _replace(tensor: TensorProto, values: NDArray[np.generic]) -> None:
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def _cut(graph: onnx.GraphProto, place: int, vocabulary: int) -> None:
    """A Slice behind the product at ``place``: the logits of the vocabulary alone."""
    result = graph.node[place].output[0]
    graph.node[place].output[0] = f"{result}.padded"
    names = {"from": [0], "to": [vocabulary], "axis": [-1]}
    for name, values in names.items():
        graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), f"{result}.{name}"))
    cut = helper.make_node("Slice", [f"{result}.padded", *(f"{result}.{name}" for name in names)], [result], "head/cut")
    graph.node.insert(place + 1, cut)


def _fits(*dims: int) -> bool:
    """Whether a tensor of any dtype may lie in the graph."""
    return 4 * math.prod(dims) <= _MOST
