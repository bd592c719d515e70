"""Puts quantised matrices into a traced graph: DequantizeLinear in front of each MatMul, whole blocks, a half-precision embedding.

Only standard operators: ONNX Runtime turns DequantizeLinear and MatMul into one kernel when it loads the graph, for weights
[in, out] in blocks along the first axis; TensorRT does when it builds an engine. A block that does not divide the inputs is
read differently by the two, so the inputs are padded with zeros to whole blocks instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from tformer_deploy.bundle.quantization import EMBEDDING, is_matrix, scale_name
from tformer_deploy.exporters.onnx.dynamic import multiply_whole_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tformer_deploy.bundle.manifest import TensorRecord

IR_DTYPES = {
    "fp32": ir.DataType.FLOAT,
    "fp16": ir.DataType.FLOAT16,
    "bf16": ir.DataType.BFLOAT16,
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
}


def quantize_graph(graph: ir.Graph, tensors: dict[str, TensorRecord], dynamic: bool = False) -> None:
    """Rewrites the graph of the untied model, whose weights are initializers without values.

    Args:
        graph: Changed.
        tensors: The bundle's table.
        dynamic: Rows are rounded in the graph, and whole numbers multiplied.
    """
    if dynamic:
        multiply_whole_numbers(graph, tensors)
        _widen(graph, graph.initializers[EMBEDDING], tensors[EMBEDDING])
        return
    padded: dict[tuple[ir.Value, int], ir.Value] = {}
    for name, value in list(graph.initializers.items()):
        if name not in tensors:
            continue
        if is_matrix(name):
            _dequantize(graph, value, tensors, padded)
        elif name == EMBEDDING:
            _widen(graph, value, tensors[name])


def _dequantize(
    graph: ir.Graph, weight: ir.Value, tensors: dict[str, TensorRecord], padded: dict[tuple[ir.Value, int], ir.Value]
) -> None:
    name = str(weight.name)
    record, scales = tensors[name], tensors[scale_name(name)]
    (product, place), *others = weight.uses()
    assert product.op_type == "MatMul", (name, product.op_type)
    assert place == 1, name
    assert not others, name
    assert weight.shape is not None
    dtype, missing = weight.dtype, record.shape[0] - weight.shape.numpy()[0]
    assert dtype is not None
    activations = product.inputs[0]
    assert activations is not None
    if missing:
        if (activations, missing) not in padded:
            padded[activations, missing] = _pad(graph, product, activations, missing)
        product.replace_input_with(0, padded[activations, missing])
    scale = _initializer(graph, scale_name(name), scales.shape, dtype)
    attributes = {"axis": 0, "block_size": record.shape[0] // scales.shape[0]}
    node = ir.node("DequantizeLinear", [weight, scale], attributes, name=f"{name}.dequantize")
    graph.insert_before(product, node)
    product.replace_input_with(1, _named(node, f"{name}.dequantized", record.shape, dtype))
    weight.dtype, weight.shape = IR_DTYPES[record.dtype], ir.Shape(record.shape)


def _pad(graph: ir.Graph, product: ir.Node, activations: ir.Value, missing: int) -> ir.Value:
    """Activations with ``missing`` zeros behind their last axis, for every product that reads them."""
    name, dims = f"{activations.name}.padded", activations.shape
    pads = _constant(graph, f"{name}.by", [0, missing])
    axes = _constant(graph, f"{name}.axis", [-1])
    node = ir.node("Pad", [activations, pads, None, axes], {"mode": "constant"}, name=name)
    graph.insert_before(product, node)
    assert dims is not None and activations.dtype is not None  # noqa: PT018  the tracer gives both
    width = dims[-1]
    assert isinstance(width, int)
    return _named(node, name, (*dims[:-1], width + missing), activations.dtype)


def _widen(graph: ir.Graph, table: ir.Value, record: TensorRecord) -> None:
    """Rows are looked up as they are stored, and then cast."""
    (gather, place), *others = table.uses()
    assert gather.op_type == "Gather", gather.op_type
    assert place == 0
    assert not others
    wide, stored = table.dtype, IR_DTYPES[record.dtype]
    assert wide is not None
    if wide == stored:
        return
    table.dtype = stored
    looked_up = gather.outputs[0]
    cast = ir.node("Cast", [looked_up], {"to": wide}, name=f"{EMBEDDING}.cast")
    graph.insert_after(gather, cast)
    result = _named(cast, f"{EMBEDDING}.wide", looked_up.shape, wide)
    for user, index in list(looked_up.uses()):
        if user is not cast:
            user.replace_input_with(index, result)
    looked_up.dtype = stored


def _named(node: ir.Node, name: str, dims: Iterable[Any] | None, dtype: ir.DataType) -> ir.Value:
    result = node.outputs[0]
    result.name, result.dtype = name, dtype
    result.shape = None if dims is None else ir.Shape(list(dims))
    return result


def _initializer(graph: ir.Graph, name: str, shape: tuple[int, ...], dtype: ir.DataType) -> ir.Value:
    """A weight whose values are pointed at later."""
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    graph.initializers.add(value)
    return value


def _constant(graph: ir.Graph, name: str, values: list[int]) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape([len(values)]), type=ir.TensorType(ir.DataType.INT64))
    value.const_value = ir.tensor(values, dtype=ir.DataType.INT64, name=name)
    graph.initializers.add(value)
    return value
