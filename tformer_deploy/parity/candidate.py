"""The backend under test with what it is asked and compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.parity.gates import GATES
from tformer_deploy.parity.profile import Profile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from tformer_deploy.backends.base import Backend, KVCache
    from tformer_deploy.config import DType
    from tformer_deploy.parity.oracle import Oracle
    from tformer_deploy.parity.plan import Plan


class Candidate:
    """Runs one backend over one plan.

    Attributes:
        backend: What is under test.
        dtype: The bundle's; the backend itself may compute in another one.
        plan: The rows.
        oracle: The reference's answers to them.
        gates: The lines of that dtype.
        profile: What the comparisons tell about rows, positions and layers on their way.
    """

    def __init__(self, backend: Backend, dtype: DType, plan: Plan, oracle: Oracle) -> None:
        self.backend, self.dtype, self.plan, self.oracle = backend, dtype, plan, oracle
        self.gates = GATES[dtype]
        self.layers = range(backend.config.n_layers)
        self.profile = Profile()

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The first ``lengths`` ids of each row."""
        return [row[:n] for row, n in zip(self.plan.rows, self.plan.lengths, strict=True)]

    @property
    def next_tokens(self) -> list[tuple[int, ...]]:
        """The id after each prompt."""
        return [row[n : n + 1] for row, n in zip(self.plan.rows, self.plan.lengths, strict=True)]

    def cache(self, rows: int) -> KVCache:
        """A cache with a pattern in it, so that a slot written by mistake shows."""
        cache = self.backend.allocate(rows, self.plan.capacity)
        key, _ = cache.read(0)
        pattern = np.random.Generator(np.random.Philox(key=7)).standard_normal(key.shape).astype(np.float32)
        for layer in self.layers:
            cache.write(layer, pattern, -pattern)
        return cache

    def read(self, cache: KVCache) -> Iterator[NDArray[np.float32]]:
        """Copies of all keys and values, each [B, K, C, D]: key, then value, layer by layer; one layer in memory at a time."""
        for layer in self.layers:
            yield from cache.read(layer)

    def prefill(
        self, rows: Sequence[Sequence[int]], cache: KVCache, positions: NDArray[np.int64] | None = None
    ) -> NDArray[np.float32]:
        """Right-padded rows → logits [B, N, V] at ``positions`` [B, N], or at each row's last token [B, 1, V]."""
        ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        if positions is None:
            positions = np.array([[len(row) - 1] for row in rows], dtype=np.int64)
        return self.backend.prefill(ids, positions, cache)

    def decode(self, rows: Sequence[Sequence[int]], lengths: Sequence[int], cache: KVCache) -> NDArray[np.float32]:
        """Rows of one width after ``lengths`` cached tokens → logits at every new token, [B, S, V]."""
        ids = np.array(rows, dtype=np.int64)
        positions = np.tile(np.arange(ids.shape[1], dtype=np.int64), (len(rows), 1))
        return self.backend.decode(ids, np.array(lengths, dtype=np.int64), positions, cache)
