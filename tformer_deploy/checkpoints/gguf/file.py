"""Reads GGUF files (versions 2 and 3, little-endian): every length is checked against the file before it is believed.

The ``gguf`` package knows the quantised formats and turns their blocks into float32; its reader is not used, because it maps
the whole file and trusts its header.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import gguf
import numpy as np
import torch

from tformer_deploy.checkpoints.files import opened
from tformer_deploy.checkpoints.tensor_file import Entry, read_exactly
from tformer_deploy.errors import InputError, escaped

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

MAGIC = b"GGUF"
_LARGEST_HEADER = 1 << 28  # bytes; vocabularies of 256k tokens take 10 MB
_HINT = "Get the file again from where the checkpoint came."
_MOST, _LONGEST = 100_000, 2_000_000  # tensors or keys; items of an array: what takes a byte there takes many in memory
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NATIVE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}


class _Place(NamedTuple):
    """Where a tensor lies: its quantisation, first byte in the file, and bytes."""

    kind: gguf.GGMLQuantizationType
    offset: int
    size: int


class GgufFile:
    """One opened file; holds its metadata and tensor table.

    Attributes:
        metadata: Key → value: int, float, bool, str or a list of one of these.
        entries: Tensors with the row first (GGUF writes it last); quantised ones are ``fp32``, for that is what is read.

    Raises:
        InputError: The file is damaged; the message says how.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        self._places: dict[str, _Place] = {}
        with opened(path) as (file, size):
            cursor = _Cursor(file, min(size, _LARGEST_HEADER), escaped(str(path)))
            n_tensors, n_keys = cursor.start()
            self.metadata = _metadata(cursor, n_keys)
            alignment = self.metadata.get("general.alignment", 32)
            if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
                raise cursor.damaged(f"has general.alignment {alignment!r}; expected a power of two from 8")
            offsets = [self._tensor(cursor) for _ in range(n_tensors)]
            self._lay_out(cursor, offsets, alignment, size)

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows ``first … first + count`` of the first axis, dequantised to float32 or in their own float dtype.

        Raises:
            InputError: The file has shrunk.
            StorageError: Reading failed.
        """
        place, shape = self._places[name], self.entries[name].shape
        step = place.size // max(1, shape[0])
        if len(shape) == 1 and count != shape[0]:
            raise ValueError("a vector is read whole: its blocks span its elements")
        data = np.empty(place.size if len(shape) == 1 else count * step, np.uint8)
        if data.size:
            read_exactly(self.path, place.offset + first * step, data.data)
        wanted = (count, *shape[1:])
        native = _NATIVE.get(place.kind.name)
        if native is not None:
            return torch.from_numpy(data).view(native).reshape(wanted)
        # Foreign scales may be anything; what is not finite is counted and refused where it is read.
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(data.reshape(count if len(shape) > 1 else 1, -1), place.kind)
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).reshape(wanted)

    def _tensor(self, cursor: _Cursor) -> tuple[int, str]:
        """Reads one entry of the tensor table; returns its offset in the data and its name."""
        name = cursor.string()
        n_dims = cursor.scalar("I")
        if n_dims > 4:
            raise cursor.damaged(f"gives tensor {escaped(name)} {n_dims} dimensions; at most 4 are known")
        dims = [cursor.scalar("Q") for _ in range(n_dims)]
        code, offset = cursor.scalar("I"), cursor.scalar("Q")
        if name in self.entries:
            raise cursor.damaged(f"has tensor {escaped(name)} twice")
        try:
            kind = gguf.GGMLQuantizationType(code)
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise cursor.damaged(f"has tensor {escaped(name)} in format {code}, which is not known") from None
        if not dims or 0 in dims or dims[0] % block or math.prod(dims) >= 2**48:
            raise cursor.damaged(f"gives tensor {escaped(name)} the shape {dims}, which {kind.name} cannot hold")
        self.entries[name] = Entry(tuple(dims[::-1]), _dtype(kind))
        self._places[name] = _Place(kind, 0, math.prod(dims) // block * block_bytes)
        return offset, name

    def _lay_out(self, cursor: _Cursor, offsets: list[tuple[int, str]], alignment: int, size: int) -> None:
        """The tensors follow one another with nothing but padding between and after them."""
        start = position = -(-cursor.position // alignment) * alignment
        for offset, name in sorted(offsets):
            place = self._places[name]
            if start + offset != position:
                what = "a hole" if start + offset > position else "an overlap"
                raise cursor.damaged(f"has {what} before tensor {escaped(name)}: byte {start + offset}, expected {position}")
            self._places[name] = place._replace(offset=position)
            end = position + place.size
            position = -(-end // alignment) * alignment
            if end > size:
                raise cursor.damaged(f"is truncated: it holds {size} bytes, tensor {escaped(name)} ends at {end}")
        if offsets and size > position:
            raise cursor.damaged(f"has {size - position} extra bytes at its end")


class _Cursor:
    """Reads values one after another and never past ``limit``."""

    def __init__(self, file: BinaryIO, limit: int, shown: str) -> None:
        self.file, self.limit, self.shown, self.position = file, limit, shown, 0

    def start(self) -> tuple[int, int]:
        """Magic and version; returns the counts of tensors and keys."""
        if self.take(4) != MAGIC:
            raise self.damaged("is not a GGUF file: it does not begin with the bytes GGUF")
        version = self.scalar("I")
        if version not in (2, 3):
            raise self.damaged(f"is GGUF version {version}; little-endian versions 2 and 3 are read")
        n_tensors, n_keys = self.scalar("Q"), self.scalar("Q")
        if max(n_tensors, n_keys) > _MOST or 24 * n_tensors + 12 * n_keys > self.limit:
            raise self.damaged(f"says that it has {n_tensors} tensors and {n_keys} keys, more than its bytes hold or a model has")
        return n_tensors, n_keys

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        if count > self.limit - self.position:
            raise self.damaged(f"ends inside its header: {count} bytes wanted at byte {self.position} of {self.limit}")
        self.position += count
        content = self.file.read(count)
        if len(content) < count:
            raise self.damaged("ended early; it changed while it was read")
        return content

    def scalar(self, form: str) -> Any:
        """The next number."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def string(self) -> str:
        """The next string."""
        at = self.position
        try:
            return self.take(self.scalar("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"has a string that is not UTF-8 at byte {at}") from None

    def value(self, kind: int) -> Any:
        """The next value of GGUF type ``kind``."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self.damaged(f"has a value of type {kind} at byte {self.position}, which is not known")
        number = self.scalar(_SCALARS[kind])
        return self._truth(number) if kind == _BOOL else number

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > _LONGEST:
            raise self.damaged(f"has an array of {count} items at byte {self.position}; at most {_LONGEST} are read")
        if kind == _STRING:
            if 8 * count > self.limit:
                raise self.damaged(f"has an array of {count} strings at byte {self.position}, more than its bytes hold")
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise self.damaged(f"has an array of type {kind} at byte {self.position}, which is not known")
        form = _SCALARS[kind]
        data = self.take(count * struct.calcsize(f"<{form}"))
        values = list(struct.unpack(f"<{count}{form}", data))
        return [self._truth(value) for value in values] if kind == _BOOL else values

    def _truth(self, number: int) -> bool:
        if number > 1:
            raise self.damaged(f"has a truth value {number} before byte {self.position}")
        return bool(number)

    def damaged(self, what: str) -> InputError:
        return InputError(f"{self.shown} {what}.", _HINT)


def _metadata(cursor: _Cursor, n_keys: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.string()
        if key in result:
            raise cursor.damaged(f"has the key {escaped(key)} twice")
        result[key] = cursor.value(cursor.scalar("I"))
    return result


def _dtype(kind: gguf.GGMLQuantizationType) -> str:
    """What reading gives: the float itself, fp32 of a format that the package dequantises, or the foreign name."""
    if kind.name in _NAMES:
        return _NAMES[kind.name]
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        with np.errstate(all="ignore"):
            gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return str(kind.name)
    return "fp32"
