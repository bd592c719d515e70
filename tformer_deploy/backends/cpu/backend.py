"""ONNX Runtime on the CPU over graphs derived for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.backends.base import capacity_bucket
from tformer_deploy.backends.graph import LoadedGraph, OnnxRuntimeCache
from tformer_deploy.bundle.signature import INPUT_IDS, LOGIT_POSITIONS, PAST_LENGTHS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tformer_deploy.backends.base import KVCache
    from tformer_deploy.backends.cpu.derived import Derived
    from tformer_deploy.backends.cpu.plan import CpuPlan, Role
    from tformer_deploy.bundle import Bundle
    from tformer_deploy.config import DType

# Longer prompts go in pieces, a row at a time: what a layer computes for them would otherwise take more memory than the caches.
CHUNK = 512
# GroupQueryAttention takes this many rows of a product together, or a multiple; one that is left over is summed in another order.
_BLOCK = 32
# So many new tokens of several rows still go together.
FEW = 16


class CpuBackend:
    """The derived graphs of a bundle.

    Args:
        bundle: Whose.
        plan: Which graph serves what.
        derived: Where they lie.
        threads: Of the runtime; its default where None.
    """

    name = "onnxruntime"

    def __init__(self, bundle: Bundle, plan: CpuPlan, derived: Derived, threads: int | None = None) -> None:
        manifest = bundle.manifest
        self.config, self.max_length = manifest.config, manifest.max_length
        self.max_batch: int | None = None
        self.dtype: DType = manifest.dtype
        self.notes: tuple[str, ...] = ()
        self._plan, self._derived, self._threads = plan, derived, threads
        self._graphs: dict[str, LoadedGraph] = {}

    def capacity_for(self, length: int) -> int:
        """A bucket."""
        return capacity_bucket(length, self.max_length)

    def allocate(self, batch: int, capacity: int) -> OnnxRuntimeCache:
        """Zeroed arrays."""
        shape = (batch, self.config.n_kv_heads, capacity, self.config.head_dim)
        return OnnxRuntimeCache([np.zeros(shape, np.float32) for _ in range(2 * self.config.n_layers)])

    def prefill(self, input_ids: NDArray[np.int64], logit_positions: NDArray[np.int64], cache: KVCache) -> NDArray[np.float32]:
        """See :class:`Backend`."""
        assert isinstance(cache, OnnxRuntimeCache)
        rows, width = input_ids.shape
        if width <= CHUNK:
            return self._run("prefill", input_ids, np.zeros(rows, np.int64), logit_positions, cache)
        return np.concatenate(
            [
                self._pieces(input_ids[row : row + 1], 0, logit_positions[row : row + 1], cache.rows(row, row + 1))
                for row in range(rows)
            ]
        )

    def decode(
        self, input_ids: NDArray[np.int64], past_lengths: NDArray[np.int64], logit_positions: NDArray[np.int64], cache: KVCache
    ) -> NDArray[np.float32]:
        """See :class:`Backend`."""
        assert isinstance(cache, OnnxRuntimeCache)
        rows, width = input_ids.shape
        if width == 1:
            return self._run("decode", input_ids, past_lengths, logit_positions, cache)
        if "several" in self._plan.graphs and rows > 1 and width <= FEW:
            return self._run("several", input_ids, past_lengths, logit_positions, cache)
        return np.concatenate(
            [
                self._pieces(
                    input_ids[row : row + 1], int(past_lengths[row]), logit_positions[row : row + 1], cache.rows(row, row + 1)
                )
                for row in range(len(input_ids))
            ]
        )

    def _pieces(
        self, ids: NDArray[np.int64], past: int, positions: NDArray[np.int64], cache: OnnxRuntimeCache
    ) -> NDArray[np.float32]:
        """New tokens [1, S] of one row after ``past`` others, in pieces → logits [1, N, V]."""
        logits = np.empty((1, positions.shape[1], self.config.vocab_size), np.float32)
        for start in range(0, ids.shape[1], CHUNK):
            piece = ids[:, start : start + CHUNK]
            here = np.flatnonzero((positions[0] >= start) & (positions[0] < start + piece.shape[1]))
            # The graph wants a position at least; one that nobody asked for costs a row of the head.
            asked = positions[:, here] - start if len(here) else np.zeros((1, 1), np.int64)
            found = self._run("chunk", piece, np.array([past + start]), asked, cache)
            logits[0, here] = found[0, : len(here)]
        return logits

    def _run(
        self, role: Role, ids: NDArray[np.int64], past: NDArray[np.int64], positions: NDArray[np.int64], cache: OnnxRuntimeCache
    ) -> NDArray[np.float32]:
        inputs = {INPUT_IDS: ids, PAST_LENGTHS: past, LOGIT_POSITIONS: positions}
        end = int(past[0]) + ids.shape[1]
        if role not in ("prefill", "chunk") or ids.shape[1] % _BLOCK != 1 or end == cache.capacity:
            return self._graph(role).run(inputs, cache)
        # No row's bits may depend on how many columns its neighbours need: one more column, whose slot is then put back.
        inputs[INPUT_IDS] = np.pad(ids, ((0, 0), (0, 1)))
        behind = [array[:, :, end].copy() for array in cache.arrays]
        logits = self._graph(role).run(inputs, cache)
        for array, slot in zip(cache.arrays, behind, strict=True):
            array[:, :, end] = slot
        return logits

    def _graph(self, role: Role) -> LoadedGraph:
        name = self._plan.graph_for(role)
        if name not in self._graphs:
            self._graphs[name] = LoadedGraph(self._derived.graph(name), self.config, self._threads)
        return self._graphs[name]
