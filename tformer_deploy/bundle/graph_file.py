"""What a bundle's graph file says about files, builds and operators, read without the onnx package and before a native library
does.

A graph may name any file as the home of its weights, loop for ever, or call code that only one runtime has, so this walks the
few protobuf fields that matter and skips the rest. Source: onnx.proto, whose field numbers are the constants here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.bundle.signature import OPSET
from tformer_deploy.errors import InputError, escaped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LARGEST = 16 << 20  # bytes; weights lie elsewhere, and a graph of hundred layers takes one
_MAX_DEPTH, _MAX_NODES = 16, 200_000
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_EXTERNAL = 1
# ModelProto, GraphProto, NodeProto, AttributeProto and TensorProto.
_GRAPH, _OPSETS, _PROPERTIES, _FUNCTIONS = 7, 8, 14, 25
_NODE, _INITIALIZER, _SPARSE = 1, 5, 15
_NODE_NAME, _OP_TYPE, _ATTRIBUTE, _DOMAIN = 3, 4, 5, 7
_ATTRIBUTE_NAME, _FLOAT, _TENSOR, _SUBGRAPH, _FLOATS, _TENSORS, _SUBGRAPHS, _SPARSES = 1, 2, 5, 6, 7, 10, 11, (22, 23)
_DATA_TYPE, _FLOAT_DATA, _INT32_DATA, _TENSOR_NAME, _RAW, _DOUBLES, _EXTERNAL_DATA, _LOCATION = 2, 4, 5, 8, 9, 10, 13, 14
# TensorProto.DataType → integer type of that width, and the bits that are all set in NaN and infinity.
_EXPONENTS = {1: ("<u4", 0x7F800000), 10: ("<u2", 0x7C00), 16: ("<u2", 0x7F80), 11: ("<u8", 0x7FF0000000000000)}


@dataclass(frozen=True)
class ExternalData:
    """Where one tensor of a graph lies; ``length`` is None where the graph does not say."""

    tensor: str
    location: str
    offset: int
    length: int | None


@dataclass
class GraphFile:
    """What matters of one graph.

    Attributes:
        build: The build id written at export; None in a graph made otherwise.
        phase: The phase written at export, or None.
        external: Every external tensor.
        faults: Why no bundle may hold the graph, a sentence each.
        non_finite: Constants in the graph itself that hold NaN or infinity, a sentence each.
    """

    build: str | None = None
    phase: str | None = None
    external: list[ExternalData] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    non_finite: list[str] = field(default_factory=list)


def read_graph_file(path: Path) -> GraphFile:
    """Reads a graph's metadata, operators and external tensors.

    Raises:
        InputError: The file is no ONNX graph.
    """
    if (size := path.stat().st_size) > LARGEST:
        raise InputError(f"{escaped(str(path))} has {size} bytes; at most {LARGEST} are read.", "Export the bundle again.")
    try:
        return _Reader().model(path.read_bytes())
    except (IndexError, ValueError, UnicodeDecodeError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"{escaped(str(path))} is no ONNX graph: {e}.", "Export the bundle again.") from None


class _Reader:
    """Collects what one file says."""

    def __init__(self) -> None:
        self.found = GraphFile()
        self.nodes = 0

    def model(self, data: bytes) -> GraphFile:
        properties, has_graph = {}, False
        for number, value in _fields(memoryview(data)):
            if number == _GRAPH:
                has_graph = True
                self._graph(_message(value), 0)
            elif number == _OPSETS:
                self._opset(_message(value))
            elif number == _PROPERTIES:
                key, text = _pair(_message(value))
                properties[key] = text
            elif number == _FUNCTIONS:
                self.found.faults.append("it has functions of its own; expected standard operators alone.")
        if not has_graph:
            raise ValueError("it has no graph")
        self.found.build, self.found.phase = properties.get("tformer_deploy.build"), properties.get("tformer_deploy.phase")
        return self.found

    def _opset(self, data: memoryview) -> None:
        domain, version = "", 0
        for number, value in _fields(data):
            if number == 1:
                domain = _text(value)
            elif isinstance(value, int):
                version = value
        if domain not in ("", "ai.onnx"):
            self.found.faults.append(f"it uses the operators of {escaped(domain)}; only standard ones are portable.")
        elif version != OPSET:
            self.found.faults.append(f"it is of opset {version}; this version runs opset {OPSET}.")

    def _graph(self, data: memoryview, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError(f"graphs are nested more than {_MAX_DEPTH} deep")
        for number, value in _fields(data):
            if number == _NODE:
                self._node(_message(value), depth)
            elif number == _INITIALIZER:
                self._tensor(_message(value), "initializer")
            elif number == _SPARSE:
                raise ValueError("it has sparse initializers, which bundles do not use")

    def _node(self, data: memoryview, depth: int) -> None:
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise ValueError(f"it has more than {_MAX_NODES} nodes")
        texts, attributes = {_NODE_NAME: "", _OP_TYPE: "", _DOMAIN: ""}, []
        for number, value in _fields(data):
            if number in texts:
                texts[number] = _text(value)
            elif number == _ATTRIBUTE:
                attributes.append(_message(value))
        place = f"{escaped(texts[_OP_TYPE])} {escaped(repr(texts[_NODE_NAME]))}"
        if texts[_DOMAIN] not in ("", "ai.onnx"):
            domain = escaped(texts[_DOMAIN])
            self.found.faults.append(f"the node {place} is of the domain {domain}; only standard operators are portable.")
        for attribute in attributes:
            self._attribute(attribute, place, depth)

    def _attribute(self, data: memoryview, place: str, depth: int) -> None:
        name, floats = "", b""
        for number, value in _fields(data):
            if number == _ATTRIBUTE_NAME:
                name = _text(value)
            elif number in (_FLOAT, _FLOATS):
                floats += bytes(_message(value))
            elif number in (_TENSOR, _TENSORS):
                self._tensor(_message(value), f"constant of the node {place}")
            elif number in (_SUBGRAPH, _SUBGRAPHS):
                self.found.faults.append(f"the node {place} runs a graph of its own, a loop or a branch; expected none.")
                self._graph(_message(value), depth + 1)
            elif number in _SPARSES:
                raise ValueError("it has sparse tensors, which bundles do not use")
        self._check(floats[: len(floats) // 4 * 4], 1, f"the attribute {escaped(name)} of the node {place}")

    def _tensor(self, data: memoryview, kind: str) -> None:
        name, entries, is_external, dtype, content = "", {}, False, 0, b""
        for number, value in _fields(data):
            if number == _TENSOR_NAME:
                name = _text(value)
            elif number == _DATA_TYPE and isinstance(value, int):
                dtype = value
            elif number == _EXTERNAL_DATA:
                key, text = _pair(_message(value))
                entries[key] = text
            elif number == _LOCATION:
                is_external = value == _EXTERNAL
            elif number in (_RAW, _FLOAT_DATA, _DOUBLES):
                content += bytes(_message(value))
            elif number == _INT32_DATA:  # 16-bit floats, a varint each
                content += _halves(value)
        if is_external or entries:
            length = entries.get("length")
            offset = _whole(entries.get("offset", "0"))
            self.found.external.append(
                ExternalData(name, entries.get("location", ""), offset, None if length is None else _whole(length))
            )
        self._check(content, dtype, f"the {kind} {escaped(repr(name))}")

    def _check(self, content: bytes, dtype: int, what: str) -> None:
        """Notes NaN and infinity; a single -inf is how masks are written."""
        if dtype not in _EXPONENTS or not content:
            return
        kind, exponent = _EXPONENTS[dtype]
        bits = np.frombuffer(content[: len(content) // np.dtype(kind).itemsize * np.dtype(kind).itemsize], kind)
        special = bits[(bits & exponent) == exponent]
        nan = int(((special & ~np.array(exponent | 1 << (8 * bits.itemsize - 1), kind)) != 0).sum())
        mask = bits.size == 1 and not nan and bits.size == special.size and int(special[0]) >> (8 * bits.itemsize - 1)
        if special.size and not mask:
            self.found.non_finite.append(f"{what} holds {nan} NaN and {special.size - nan} infinite values.")


def _halves(value: int | memoryview) -> bytes:
    """The low 16 bits of each varint, packed or alone."""
    numbers = [value] if isinstance(value, int) else []
    position = 0
    while not isinstance(value, int) and position < len(value):
        number, position = _varint(value, position)
        numbers.append(number)
    return np.array([n & 0xFFFF for n in numbers], "<u2").tobytes()


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"an external tensor has the offset or length {text[:30]!r}")
    return int(text)


def _text(value: int | memoryview) -> str:
    return str(_message(value), "utf-8")


def _pair(data: memoryview) -> tuple[str, str]:
    """A StringStringEntryProto."""
    texts = {number: _text(value) for number, value in _fields(data)}
    return texts.get(1, ""), texts.get(2, "")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("a field has the wrong wire type")  # noqa: TRY004  a fault of the data, not of a caller
    return value


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, value) pairs of one protobuf message."""
    position, end = 0, len(data)
    while position < end:
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, position = _varint(data, position)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"byte {position} is no protobuf field")
        if position + size > end:
            raise ValueError("it is truncated")
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError("it is truncated")
        byte = data[position]
        result |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return result, position
