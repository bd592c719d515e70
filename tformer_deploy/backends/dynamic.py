"""int8-dynamic graphs: where each matrix is multiplied, and the same graph without any rounding of rows, to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tformer_deploy.bundle.quantization import is_matrix, scale_name
from tformer_deploy.errors import CapabilityError, InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tformer_deploy.bundle import Bundle

_HINT = "Export the bundle again."


@dataclass(frozen=True)
class Product:
    """What stands in a graph for the product with one matrix.

    Attributes:
        matrix: The matrix's name.
        rows: The value that is rounded.
        result: The value that takes the product's place.
    """

    matrix: str
    rows: str
    result: str


def find_products(graph: Any, bundle: Bundle) -> list[Product]:
    """The product of each matrix: x → Mul → QuantizeLinear → MatMulInteger → Cast → Mul → result, or two Mul where one is with
    the constant scales.

    Args:
        graph: onnx.GraphProto of the bundle.
        bundle: Whose matrices.

    Raises:
        InputError: A matrix is not multiplied so; what is done with the values on the way is not looked at.
    """
    writers = {output: node for node in graph.node for output in node.output}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def only_reader(name: str, kind: str, matrix: str) -> Any:
        found = readers.get(name, [])
        if [node.op_type for node in found] != [kind]:
            kinds = ", ".join(node.op_type for node in found) or "nothing"
            raise InputError(f"{matrix} is not multiplied as exported: {name} is read by {kinds}; expected one {kind}.", _HINT)
        return found[0]

    def writer(name: str, kind: str, matrix: str) -> Any:
        node = writers.get(name)
        if node is None or node.op_type != kind:
            found = "nothing" if node is None else node.op_type
            raise InputError(f"{matrix} is not multiplied as exported: {name} comes from {found}; expected {kind}.", _HINT)
        return node

    constants = {tensor.name for tensor in graph.initializer}
    products = []
    for matrix in bundle.manifest.tensors:
        if is_matrix(matrix):
            product = only_reader(matrix, "MatMulInteger", matrix)
            scaled = writer(writer(product.input[0], "QuantizeLinear", matrix).input[0], "Mul", matrix)
            wide = only_reader(product.output[0], "Cast", matrix)
            last = only_reader(wide.output[0], "Mul", matrix)
            if constants & set(last.input):
                last = only_reader(last.output[0], "Mul", matrix)
            products.append(Product(matrix, scaled.input[0], last.output[0]))
    return products


def exact_rows(graph: Any, bundle: Bundle) -> None:
    """Replaces each product by MatMul of the row as it comes with the dequantised matrix; nothing else is touched.

    Args:
        graph: onnx.GraphProto of the bundle; changed.
        bundle: Whose matrices.

    Raises:
        InputError: A matrix is not multiplied as exported.
    """
    import onnx

    by_result = {product.result: product for product in find_products(graph, bundle)}
    nodes = []
    for node in graph.node:
        product = by_result.get(node.output[0])
        if product is None:
            nodes.append(node)
            continue
        matrix, wide = product.matrix, f"{product.matrix}.dequantized"
        width = bundle.manifest.tensors[matrix].shape[0]
        inputs = [matrix, scale_name(matrix)]
        nodes.append(onnx.helper.make_node("DequantizeLinear", inputs, [wide], axis=0, block_size=width))
        nodes.append(onnx.helper.make_node("MatMul", [product.rows, wide], [product.result]))
    needed = {output.name for output in graph.output}
    kept = []
    for node in reversed(nodes):
        if needed & set(node.output):
            kept.append(node)
            needed |= set(node.input)
    del graph.node[:]
    graph.node.extend(reversed(kept))
    for tensor in [tensor for tensor in graph.initializer if tensor.name not in needed]:
        graph.initializer.remove(tensor)


def exact_graph(path: Path, bundle: Bundle) -> bytes:
    """A graph file of an int8-dynamic bundle with :func:`exact_rows`, serialised; its weights lie where the file's do.

    Raises:
        CapabilityError: The package onnx is not installed.
        InputError: A matrix is not multiplied as exported.
    """
    try:
        import onnx
    except ImportError as e:
        raise CapabilityError(f"Comparing an int8-dynamic graph needs the package onnx: {e}.", "Run pip install onnx.") from e
    proto = onnx.load(path, load_external_data=False)
    exact_rows(proto.graph, bundle)
    data: bytes = proto.SerializeToString(deterministic=True)
    return data
