"""What a bundle's graph file says about files and builds, read without the onnx package and before a native library does.

A graph may name any file as the home of its weights, so this walks the few protobuf fields that matter (onnx.proto:
ModelProto.graph 7, .metadata_props 14; GraphProto.node 1, .initializer 5, .sparse_initializer 15; NodeProto.attribute 5;
AttributeProto.t 5, .g 6, .tensors 10, .graphs 11; TensorProto.name 8, .external_data 13, .data_location 14) and skips the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAX_DEPTH = 16
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_EXTERNAL = 1


@dataclass(frozen=True)
class ExternalData:
    """Where one tensor of a graph lies; ``length`` is None where the graph does not say."""

    tensor: str
    location: str
    offset: int
    length: int | None


@dataclass(frozen=True)
class GraphFile:
    """The build id and phase written at export (None in a graph made otherwise), and every external tensor."""

    build: str | None
    phase: str | None
    external: list[ExternalData] = field(default_factory=list)


def read_graph_file(path: Path) -> GraphFile:
    """Reads a graph's metadata and external tensors.

    Raises:
        InputError: The file is no ONNX graph.
    """
    try:
        return _model(path.read_bytes())
    except (IndexError, ValueError, UnicodeDecodeError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"{path} is no ONNX graph: {e}.", "Export the bundle again.") from None


def _model(data: bytes) -> GraphFile:
    properties, external, has_graph = {}, [], False
    for number, value in _fields(memoryview(data)):
        if number == 7:
            has_graph = True
            external += list(_graph(_message(value), 0))
        elif number == 14:
            key, text = _pair(_message(value))
            properties[key] = text
    if not has_graph:
        raise ValueError("it has no graph")
    return GraphFile(properties.get("tformer_deploy.build"), properties.get("tformer_deploy.phase"), external)


def _graph(data: memoryview, depth: int) -> Iterator[ExternalData]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"graphs are nested more than {_MAX_DEPTH} deep")
    for number, value in _fields(data):
        if number == 1:
            for n, attribute in _fields(_message(value)):
                if n == 5:
                    yield from _attribute(_message(attribute), depth)
        elif number == 5:
            yield from _tensor(_message(value))
        elif number == 15:
            raise ValueError("it has sparse initializers, which bundles do not use")


def _attribute(data: memoryview, depth: int) -> Iterator[ExternalData]:
    for number, value in _fields(data):
        if number in (5, 10):
            yield from _tensor(_message(value))
        elif number in (6, 11):
            yield from _graph(_message(value), depth + 1)
        elif number in (22, 23):
            raise ValueError("it has sparse tensors, which bundles do not use")


def _tensor(data: memoryview) -> Iterator[ExternalData]:
    name, entries, is_external = "", {}, False
    for number, value in _fields(data):
        if number == 8:
            name = str(_message(value), "utf-8")
        elif number == 13:
            key, text = _pair(_message(value))
            entries[key] = text
        elif number == 14:
            is_external = value == _EXTERNAL
    if is_external or entries:
        length = entries.get("length")
        yield ExternalData(
            name, entries.get("location", ""), _whole(entries.get("offset", "0")), None if length is None else _whole(length)
        )


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ValueError(f"an external tensor has the offset or length {text[:30]!r}")
    return int(text)


def _pair(data: memoryview) -> tuple[str, str]:
    """A StringStringEntryProto."""
    texts = {number: str(_message(value), "utf-8") for number, value in _fields(data)}
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
