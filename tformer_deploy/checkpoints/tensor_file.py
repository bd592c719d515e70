"""What a file of tensors offers, whatever its format."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tformer_deploy.errors import InputError, StorageError, escaped

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class Entry(NamedTuple):
    """A stored tensor: ``dtype`` is what :meth:`TensorFile.rows` returns (``fp32`` …), or a foreign name that it cannot."""

    shape: tuple[int, ...]
    dtype: str


class TensorFile(Protocol):
    """A file of named tensors of which rows can be read one block at a time."""

    path: Path
    entries: dict[str, Entry]

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows ``first … first + count`` along the first axis."""


def read_exactly(path: Path, offset: int, target: memoryview) -> None:
    """Fills ``target`` (bytes) from ``offset``; by plain reads, so that no mapped page stays in this process.

    Raises:
        InputError: The file ends before.
        StorageError: Reading failed.
    """
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset, os.SEEK_SET)
            while target:
                taken = file.readinto(target)
                if not taken:
                    raise InputError(f"{escaped(str(path))} ends early; it changed while it was read.", "Start again.")
                target = target[taken:]
    except OSError as error:
        raise StorageError(f"{escaped(str(path))} cannot be read: {error.strerror}.") from None
