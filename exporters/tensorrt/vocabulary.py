"""Heads whose number of outputs TensorRT handles badly get a few more, of zeros, which are cut off behind the product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tformer_deploy.bundle.quantization import EMBEDDING, HEAD
from tformer_deploy.exporters.tensorrt.costs import VOCABULARY_STEP, may_be_padded

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


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
            if vocabulary % VOCABULARY_STEP and may_be_padded(*table.dims):
                _replace(table, _padded(table, folder, axis=0, fill=0))
                _cut(graph, i, vocabulary)
                _forget(graph, {EMBEDDING})
            return
        maker = makers.get(node.input[1]) if node.op_type == "MatMul" else None
        if maker is not None and maker.op_type == "DequantizeLinear" and maker.input[0] == HEAD:
            matrix, scales = (initializers[name] for name in maker.input[:2])
            vocabulary = matrix.dims[1]
            if vocabulary % 2 and may_be_padded(*matrix.dims):
                _replace(matrix, _padded(matrix, folder, axis=1, fill=0))
                _replace(scales, _padded(scales, folder, axis=len(scales.dims) - 1, fill=1))
                _cut(graph, i, vocabulary)
                _forget(graph, {HEAD, maker.input[1], maker.output[0]})
            return


def _padded(tensor: TensorProto, folder: Path, axis: int, fill: int) -> NDArray[np.generic]:
    """The tensor with ``fill`` up to the next multiple of 8 along an axis."""
    values = _values(tensor, folder)
    more = [(0, 0)] * values.ndim
    more[axis] = (0, -values.shape[axis] % VOCABULARY_STEP)
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


def _forget(graph: onnx.GraphProto, names: set[str]) -> None:
    """Drops what the graph says of the shapes of values that have others now."""
    kept = [value for value in graph.value_info if value.name not in names]
    del graph.value_info[:]
    graph.value_info.extend(kept)


def _cut(graph: onnx.GraphProto, place: int, vocabulary: int) -> None:
    """A Slice behind the product at ``place``: the logits of the vocabulary alone."""
    result = graph.node[place].output[0]
    graph.node[place].output[0] = f"{result}.padded"
    names = {"from": [0], "to": [vocabulary], "axis": [-1]}
    for name, values in names.items():
        graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), f"{result}.{name}"))
    cut = helper.make_node("Slice", [f"{result}.padded", *(f"{result}.{name}" for name in names)], [result], "head/cut")
    graph.node.insert(place + 1, cut)
