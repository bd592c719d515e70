"""KV caches in device memory: allocated once, lent out again and again, so that their addresses stay."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tformer_deploy.backends.tensorrt.schedule import ALIGNMENT, layout
from tformer_deploy.errors import InputError, ResourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tformer_deploy.backends.cuda import Device


@dataclass(frozen=True)
class CacheShape:
    """One row of one tensor, [kv_heads, capacity, head_dim] of a numpy dtype, and how many tensors there are."""

    tensors: int
    kv_heads: int
    capacity: int
    head_dim: int
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in one tensor."""
        return self.kv_heads * self.capacity * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Buffers:
    """Addresses of all tensors, each with room for ``rows`` rows."""

    rows: int
    addresses: tuple[int, ...]


class CachePool:
    """Buffers by their number of rows; what nobody holds any more is lent again.

    Args:
        device: Where.
        shape: Of every cache.
        max_rows: Rows of one call; a smaller batch gets the next power of two, so that few sizes occur.
    """

    def __init__(self, device: Device, shape: CacheShape, max_rows: int) -> None:
        self.device, self.shape, self._max_rows = device, shape, max_rows
        self._free: list[Buffers] = []

    def rows_for(self, batch: int) -> int:
        """Rows that are allocated for a batch: a power of two up to the rows of one call, above them a multiple of those."""
        if batch > self._max_rows:
            return -(-batch // self._max_rows) * self._max_rows
        return min(1 << (batch - 1).bit_length(), self._max_rows)

    def take(self, batch: int) -> DeviceCache:
        """A zeroed cache.

        Raises:
            ResourceError: The GPU has no room for it.
        """
        rows = self.rows_for(batch)
        # The last one given back: a batch that follows another of its size then lies where that one lay.
        found = next((b for b in reversed(self._free) if b.rows == rows), None)
        if found is None:
            found = self._allocate(rows)
        else:
            self._free.remove(found)
        for address in found.addresses:
            self.device.zero(address, batch * self.shape.row_bytes)
        lease = _Lease(found)
        weakref.finalize(lease, self._free.append, found).atexit = False
        return DeviceCache(self, lease, 0, batch)

    def _allocate(self, rows: int) -> Buffers:
        size = rows * self.shape.row_bytes
        offsets, total = layout({str(i): size for i in range(self.shape.tensors)})
        what = f"caches of {rows} rows with {self.shape.capacity} slots each"
        try:
            base = self.device.allocate(total, what)
        except ResourceError:
            if not self._free:
                raise
            self._release()
            base = self.device.allocate(total, what)
        return Buffers(rows, tuple(base + offset for offset in offsets.values()))

    def _release(self) -> None:
        """Gives back what is not lent, once nothing that is queued can still write there."""
        self.device.synchronize("giving caches back")
        while self._free:
            self.device.free(self._free.pop().addresses[0])


class _Lease:
    """Held by a cache and by every view of it; when the last one goes, the buffers are free."""

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers


class DeviceCache:
    """Rows ``start … start + batch - 1`` of buffers in device memory; see :class:`KVCache`."""

    def __init__(self, pool: CachePool, lease: _Lease, start: int, batch: int) -> None:
        self._pool, self._lease, self._start = pool, lease, start
        self.batch, self.capacity = batch, pool.shape.capacity

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the first of these rows lies in each tensor: layer by layer, key before value."""
        offset = self._start * self._pool.shape.row_bytes
        return tuple(address + offset for address in self._lease.buffers.addresses)

    @property
    def aligned(self) -> bool:
        """Whether TensorRT may be given these addresses."""
        return all(address % ALIGNMENT == 0 for address in self.addresses)

    def read(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Copies of one layer's key and value."""
        device, key, value = self._pool.device, self._host(), self._host()
        for array, address in zip((key, value), self.addresses[2 * layer : 2 * layer + 2], strict=True):
            device.copy_out(array.ctypes.data, address, array.nbytes)
        device.synchronize("reading a cache")
        return key.astype(np.float32), value.astype(np.float32)

    def write(self, layer: int, key: NDArray[np.float32], value: NDArray[np.float32]) -> None:
        """Replaces one layer's key and value."""
        device, held = self._pool.device, []
        for given, address in zip((key, value), self.addresses[2 * layer : 2 * layer + 2], strict=True):
            array = self._host()
            array[...] = given
            held.append(array)  # until the copy is done
            device.copy_in(address, array.ctypes.data, array.nbytes)
        device.synchronize("writing a cache")

    def rows(self, start: int, stop: int) -> Self:
        """A view of some rows."""
        return type(self)(self._pool, self._lease, self._start + start, stop - start)

    def resize(self, rows: Sequence[int], capacity: int) -> Self:
        """Copies of rows; an engine's capacity is fixed, so that only their number changes.

        Raises:
            InputError: More slots than the engine's caches have.
        """
        if capacity > self.capacity:
            raise InputError(
                f"Caches of {capacity} slots are asked for; the engine's have {self.capacity}.", "Build a larger one."
            )
        new = self._pool.take(len(rows))
        self.copy_rows(rows, new)
        assert isinstance(new, type(self))
        return new

    def copy_rows(self, rows: Sequence[int], target: DeviceCache) -> None:
        """Queues copies of these rows into the first rows of another cache."""
        size = self._pool.shape.row_bytes
        for source, goal in zip(self.addresses, target.addresses, strict=True):
            for place, row in enumerate(rows):
                self._pool.device.copy(goal + place * size, source + row * size, size)

    def _host(self) -> NDArray[Any]:
        shape = self._pool.shape
        return np.empty((self.batch, shape.kv_heads, shape.capacity, shape.head_dim), shape.dtype)
