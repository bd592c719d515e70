"""Reads safetensors files: the header is checked in full before a byte of data is believed.

Layout: 8 bytes little-endian length N, N bytes of JSON ``{name: {dtype, shape, data_offsets}}``, then the data, whose ranges
must tile the rest of the file exactly. The same name twice is refused, identical or not.
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

from tformer_deploy.checkpoints.files import opened, replace_file, write_all
from tformer_deploy.checkpoints.tensor_file import Entry, read_exactly
from tformer_deploy.errors import InputError, escaped
from tformer_deploy.strict_json import parse_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

LARGEST_HEADER = 100_000_000
_VALUES = 800_000  # about 80,000 tensors; keeps what a header becomes in memory near its size in the file
_HINT = "Get the file again from where the checkpoint came."
_DIMS = 16  # no tensor of a model has more than 4
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_NAMES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {f"torch.{dtype}": code for code, dtype in _DTYPES.items()}


class SafetensorsFile:
    """One opened file; holds its header only.

    Attributes:
        entries: What the header says of every tensor; ``dtype`` is ``fp32``, ``fp16``, ``bf16`` or the foreign code.

    Raises:
        InputError: The file is damaged; the message says how.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with opened(path) as (file, size):
            start = file.read(8)
            if len(start) < 8:
                raise self._damaged(f"holds {size} bytes; a header takes at least 8")
            (length,) = struct.unpack("<Q", start)
            if length > LARGEST_HEADER or length > size - 8:
                raise self._damaged(
                    f"says that its header takes {length} bytes; the file holds {size} and at most {LARGEST_HEADER} count"
                )
            header = parse_object(file.read(length), f"{escaped(path.name)} (header)", _VALUES)
        self._data = 8 + length
        self.entries: dict[str, Entry] = {}
        self._offsets: dict[str, int] = {}
        self._codes: dict[str, str] = {}
        metadata = header.pop("__metadata__", {})
        if not (isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())):
            raise self._damaged("has a __metadata__ that is not an object of strings")
        self._tile({name: self._entry(name, value) for name, value in header.items()}, size - self._data)

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows ``first … first + count`` of the first axis of a tensor, in its own dtype; only their bytes are read.

        Raises:
            InputError: The file has shrunk.
            StorageError: Reading failed.
        """
        import torch  # not above: opening needs none of it

        entry = self.entries[name]
        width = math.prod(entry.shape[1:])
        step = width * _BYTES[self._codes[name]]
        result = torch.empty((count, *entry.shape[1:]), dtype=getattr(torch, _DTYPES[self._codes[name]]))
        if count * width:
            target = result.view(-1).view(torch.uint8).numpy()
            read_exactly(self.path, self._data + self._offsets[name] + first * step, target.data)
        return result

    def _entry(self, name: str, value: Any) -> tuple[int, int]:
        """Checks one header entry; returns its byte range."""
        shown = escaped(name)
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise self._damaged(f"describes tensor {shown} by something else than dtype, shape and data_offsets")
        code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(code, str) or code not in _BYTES:
            raise self._damaged(f"has tensor {shown} in dtype {escaped(str(code)[:40])}; known are {', '.join(_BYTES)}")
        if not _whole(shape) or not _whole(offsets) or len(offsets) != 2:
            raise self._damaged(f"has a bad shape or byte range for tensor {shown}: {repr(shape)[:80]}, {repr(offsets)[:80]}")
        begin, end = offsets
        if len(shape) > _DIMS:
            raise self._damaged(f"gives tensor {shown} {len(shape)} dimensions; at most {_DIMS} are read")
        if end - begin != (taken := math.prod(shape) * _BYTES[code]):
            raise self._damaged(f"gives tensor {shown} {end - begin} bytes; {code} {shape} takes {taken}")
        self.entries[name] = Entry(tuple(shape), _NAMES.get(code, code))
        self._offsets[name], self._codes[name] = begin, code
        return begin, end

    def _tile(self, ranges: dict[str, tuple[int, int]], size: int) -> None:
        """The ranges follow one another without hole or overlap and end with the file."""
        position = 0
        for name, (begin, end) in sorted(ranges.items(), key=lambda item: item[1]):
            if begin != position:
                what = "a hole" if begin > position else "an overlap"
                raise self._damaged(f"has {what} before tensor {escaped(name)}: data byte {begin}, expected {position}")
            position = end
        if position != size:
            what = "is truncated" if size < position else "has extra bytes at its end"
            raise self._damaged(f"{what}: {size} bytes of data, its header names {position}")

    def _damaged(self, what: str) -> InputError:
        return InputError(f"{escaped(str(self.path))} {what}.", _HINT)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes ``tensors`` (fp32, fp16 or bf16) in their order, atomically; the file's mode follows the umask.

    Raises:
        InputError: A tensor has another dtype.
        StorageError: Writing failed.
    """
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        if str(tensor.dtype) not in _CODES:
            raise InputError(f"Tensor {escaped(name)} is {tensor.dtype}; expected one of {', '.join(_CODES)}.")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _CODES[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [position, position + size]
        }  # fmt: skip
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write(descriptor: int) -> None:
        write_all(descriptor, struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            flat = tensor.detach().cpu().contiguous().view(-1)
            write_all(descriptor, flat.view(torch.uint8).numpy().data)

    replace_file(path, write)


def _whole(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)
