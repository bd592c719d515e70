"""Arrays that wait in a file until they are looked at: logits of many rows over a large vocabulary are hundreds of MiB."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, overload

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Spool(Sequence["NDArray[np.float32]"]):
    """A list of arrays; each is mapped when it is asked for, so that only what is read of it takes memory.

    The files go when the list does.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tformer-deploy-")
        self._count = 0

    def append(self, array: NDArray[np.float32]) -> None:
        """Writes one array."""
        np.save(self._path(self._count), array)
        self._count += 1

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> NDArray[np.float32]: ...

    @overload
    def __getitem__(self, index: slice) -> list[NDArray[np.float32]]: ...

    def __getitem__(self, index: int | slice) -> NDArray[np.float32] | list[NDArray[np.float32]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        array: NDArray[np.float32] = np.load(self._path(index), mmap_mode="r")
        return array

    def _path(self, index: int) -> Path:
        return Path(self._folder.name) / f"{index}.npy"
