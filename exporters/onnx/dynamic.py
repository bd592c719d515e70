"""Puts int8-dynamic matrices into a traced graph: each row is rounded to int8 under its own scale, and whole numbers are multiplied.

Only standard operators. ONNX Runtime's kernels are fast for uint8 rows times int8 weights alone, so rows are stored 128 higher;
the product takes the 128 off again. Its sums are exact, and nothing else here looks beyond a row: what a row becomes does not
depend on its neighbours, to the bit. DynamicQuantizeLinear, by contrast, takes one scale for all rows together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values

from tformer_deploy.bundle.quantization import is_matrix, scale_name
from tformer_deploy.quantization.rows import LARGEST, SMALLEST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tformer_deploy.bundle.manifest import TensorRecord

_MIDDLE = 128


def multiply_whole_numbers(graph: ir.Graph, tensors: dict[str, TensorRecord]) -> None:
    """Rewrites every product with a matrix of the untied model, whose weights are initializers without values.

    Args:
        graph: Changed.
        tensors: The bundle's table.
    """
    writer = _Writer(graph)
    for name, weight in list(graph.initializers.items()):
        if name in tensors and is_matrix(name):
            writer.replace(weight, tensors[scale_name(name)].shape)


def _takes_bias(result: ir.Value) -> bool:
    """Whether a bias is added next. ONNX Runtime 1.32 makes one kernel of sums, the product of both scales and a bias, and that
    kernel adds the bias before it multiplies with the row's scale; of one scale after the other it makes none.
    """
    readers = [use.node for use in result.uses() if use.node.op_type == "Add"]
    return any(value is not None and value.is_initializer() for node in readers for value in node.inputs)


class _Writer:
    """Adds nodes in front of one place of a graph; rows that several matrices read are rounded once."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.place: ir.Node | None = None
        self.rounded: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self.constants: dict[str, ir.Value] = {}

    def replace(self, weight: ir.Value, scales: tuple[int, ...]) -> None:
        """The product with a matrix."""
        name = str(weight.name)
        (product, place), *others = weight.uses()
        assert product.op_type == "MatMul", (name, product.op_type)
        assert place == 1, name
        assert not others, name
        rows, result, dtype = product.inputs[0], product.outputs[0], weight.dtype
        assert rows is not None and dtype is not None  # noqa: PT018  the tracer gives both
        self.place = product
        if rows not in self.rounded:
            self.rounded[rows] = self._round(rows)
        whole, steps = self.rounded[rows]
        scale = ir.Value(name=scale_name(name), shape=ir.Shape(scales), type=ir.TensorType(dtype))
        self.graph.initializers.add(scale)
        dims = result.shape
        sums = self._add("MatMulInteger", [whole, weight, self._middle()], f"{name}.sums", dims, ir.DataType.INT32)
        wide = self._add("Cast", [sums], f"{name}.wide", dims, dtype, to=dtype)
        if _takes_bias(result):
            first, second = self._add("Mul", [wide, scale], f"{name}.scaled", dims, dtype), steps
        else:
            first, second = wide, self._add("Mul", [steps, scale], f"{name}.scales", dims, dtype)
        node = ir.node("Mul", [first, second], name=f"{name}.product")
        replace_nodes_and_values(self.graph, product, [product], [node], [result], node.outputs)
        weight.dtype = ir.DataType.INT8

    def _round(self, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
        """uint8 rows, and the scale of each, [..., 1]."""
        name, dtype, dims = f"{rows.name}.rounded", rows.dtype, rows.shape
        assert dtype is not None and dims is not None  # noqa: PT018
        one = [*dims[:-1], 1]
        sizes = self._add("Abs", [rows], f"{name}.sizes", dims, dtype)
        largest = self._add(
            "ReduceMax", [sizes, self._constant("last_axis", np.array([-1]))], f"{name}.largest", one, dtype, keepdims=1
        )
        largest = self._add("Max", [largest, self._float("smallest", SMALLEST)], f"{name}.above_zero", one, dtype)
        levels = self._float("levels", LARGEST)
        steps = self._add("Div", [largest, levels], f"{name}.scale", one, dtype)
        inverse = self._add("Div", [levels, largest], f"{name}.inverse", one, dtype)
        scaled = self._add("Mul", [rows, inverse], f"{name}.scaled", dims, dtype)
        inputs = [scaled, self._float("one", 1.0), self._middle()]
        return self._add("QuantizeLinear", inputs, name, dims, ir.DataType.UINT8), steps

    def _add(
        self, kind: str, inputs: list[ir.Value], name: str, dims: Iterable[Any] | None, dtype: ir.DataType, **attributes: Any
    ) -> ir.Value:
        node = ir.node(kind, inputs, attributes, name=name)
        assert self.place is not None
        self.graph.insert_before(self.place, node)
        result = node.outputs[0]
        result.name, result.dtype = name, dtype
        result.shape = None if dims is None else ir.Shape(list(dims))
        return result

    def _middle(self) -> ir.Value:
        return self._constant("middle", np.array(_MIDDLE, np.uint8))

    def _float(self, name: str, value: float) -> ir.Value:
        return self._constant(name, np.array(value, np.float32))

    def _constant(self, name: str, value: np.ndarray[Any, Any]) -> ir.Value:
        if name not in self.constants:
            tensor = ir.tensor(value, name=f"rows.{name}")
            constant = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype))
            constant.const_value = tensor
            self.graph.initializers.add(constant)
            self.constants[name] = constant
        return self.constants[name]
