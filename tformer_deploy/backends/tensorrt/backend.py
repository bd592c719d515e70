"""TensorRT: an engine of a bundle behind the same interface as every other backend."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.backends.tensorrt.cache import CachePool, CacheShape, DeviceCache
from tformer_deploy.backends.tensorrt.records import dtype_of
from tformer_deploy.backends.tensorrt.runner import Call, Exchange, Runner
from tformer_deploy.backends.tensorrt.schedule import Piece, ProfileShape, pieces, require_profiles, row_groups
from tformer_deploy.bundle.bundle import NUMPY_DTYPES
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tformer_deploy.backends.base import KVCache
    from tformer_deploy.backends.cuda import Device
    from tformer_deploy.backends.tensorrt.engine import LoadedPlan
    from tformer_deploy.bundle import Bundle
    from tformer_deploy.bundle.engines import EngineRecord


@dataclass
class _Held:
    """What must go in this order when the backend goes: contexts, engines, then the device's memory and stream."""

    runners: dict[tuple[int, int], Runner]
    plans: list[LoadedPlan]
    device: Device

    def close(self) -> None:
        for plan in self.plans:
            plan.save_runtime_cache()
        self.runners.clear()
        self.plans.clear()
        self.device.close()


class TensorRTBackend:
    """A loaded engine; a profile's context is made when it is first needed.

    Args:
        bundle: Whose engine.
        record: What it is.
        plans: Its plans, loaded.
        device: Where they run.
        notes: What a reader must know.
        captures: Whether decode steps are captured in CUDA graphs here; RTX does that by itself.
    """

    name = "tensorrt"

    def __init__(
        self,
        bundle: Bundle,
        record: EngineRecord,
        plans: Sequence[LoadedPlan],
        device: Device,
        notes: tuple[str, ...],
        captures: bool,
    ) -> None:
        manifest = bundle.manifest
        self.config, self.dtype = manifest.config, dtype_of(record)
        self.max_length = min(manifest.max_length, record.capacity)
        self._profiles: tuple[ProfileShape, ...] = tuple(p for plan in plans for p in plan.profiles)
        require_profiles(self._profiles)
        rows = min(record.max_batch, *(p.max_rows for p in self._profiles))
        self.max_batch: int | None = rows
        self._rows, self.notes, self._captures = rows, notes, captures
        self._capacity = record.capacity
        self._shape = CacheShape(
            2 * self.config.n_layers,
            self.config.n_kv_heads,
            record.capacity,
            self.config.head_dim,
            np.dtype(NUMPY_DTYPES[self.dtype]),
        )
        self._exchange = Exchange(device, self._profiles, self.config.vocab_size)
        self._pool = CachePool(device, self._shape, rows)
        self._held = _Held({}, list(plans), device)
        self.close = weakref.finalize(self, self._held.close)

    def capacity_for(self, length: int) -> int:
        """The engine's capacity, which is fixed."""
        return self._capacity

    def allocate(self, batch: int, capacity: int) -> DeviceCache:
        """Zeroed caches of the engine's capacity, which is ``capacity`` or more.

        Raises:
            InputError: The engine's caches have fewer slots.
            ResourceError: The GPU has no room for them.
        """
        if capacity > self._capacity:
            raise InputError(
                f"Rows of {capacity} tokens are asked for; the engine's caches have {self._capacity} slots.",
                f"Build an engine with --capacity {capacity}.",
            )
        self._held.device.enter()
        return self._pool.take(batch)

    def prefill(self, input_ids: NDArray[np.int64], logit_positions: NDArray[np.int64], cache: KVCache) -> NDArray[np.float32]:
        """See :class:`Backend`; a prompt longer than the largest profile goes in pieces."""
        return self._run(Call(input_ids, np.zeros(len(input_ids), np.int64), logit_positions), cache, fresh=True)

    def decode(
        self, input_ids: NDArray[np.int64], past_lengths: NDArray[np.int64], logit_positions: NDArray[np.int64], cache: KVCache
    ) -> NDArray[np.float32]:
        """See :class:`Backend`."""
        return self._run(Call(input_ids, past_lengths, logit_positions), cache, fresh=False)

    def _run(self, call: Call, cache: KVCache, fresh: bool) -> NDArray[np.float32]:
        assert isinstance(cache, DeviceCache)
        self._held.device.enter()
        self._require_room(call, cache)
        plan = pieces(self._profiles, call.input_ids.shape[1], fresh)
        parts = []
        for start, stop in row_groups(len(call.input_ids), self._rows):
            rows = slice(start, stop)
            group = Call(call.input_ids[rows], call.past_lengths[rows], call.logit_positions[rows])
            parts.append(self._run_rows(plan, group, cache.rows(start, stop)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _require_room(self, call: Call, cache: DeviceCache) -> None:
        """TensorRT checks no slot: past the end it would write into another row, or into other memory."""
        rows, tokens = call.input_ids.shape
        longest = int(call.past_lengths.max()) + tokens
        if rows != cache.batch or longest > cache.capacity or int(call.past_lengths.min()) < 0:
            raise InputError(
                f"{rows} rows of up to {longest} tokens do not fit caches of {cache.batch} rows with {cache.capacity} slots each.",
                "Give fewer tokens, or build an engine of a larger --capacity.",
            )
        if int(call.logit_positions.min()) < 0 or int(call.logit_positions.max()) >= tokens:
            raise InputError(f"Logits are asked for at a position outside the {tokens} new tokens of a row.")

    def _run_rows(self, plan: list[Piece], call: Call, cache: DeviceCache) -> NDArray[np.float32]:
        """At most as many rows as a profile takes; through a copy where they begin at an address that TensorRT cannot take."""
        if cache.aligned:
            return self._run_pieces(plan, call, cache.addresses)
        copy = self._pool.take(cache.batch)
        cache.copy_rows(range(cache.batch), copy)
        logits = self._run_pieces(plan, call, copy.addresses)
        copy.copy_rows(range(cache.batch), cache)
        return logits

    def _run_pieces(self, plan: list[Piece], call: Call, caches: tuple[int, ...]) -> NDArray[np.float32]:
        rows, wanted = call.logit_positions.shape
        logits = np.empty((rows, wanted, self.config.vocab_size), np.float32)
        for piece in plan:
            ids, past = call.input_ids[:, piece.start : piece.stop], call.past_lengths + piece.start
            inside = (call.logit_positions >= piece.start) & (call.logit_positions < piece.stop)
            local = np.where(inside, call.logit_positions - piece.start, 0)
            # An engine gives few positions a call, mostly one: the call is repeated for others, and writes the same slots again.
            columns = np.flatnonzero(inside.any(axis=0))
            shares = np.split(columns, range(piece.profile.positions, len(columns), piece.profile.positions))
            for share in shares:
                asked = local[:, share] if len(share) else np.zeros((rows, 1), np.int64)
                found = self._execute(piece.profile, Call(ids, past, asked), caches)
                for place, column in enumerate(share):
                    here = inside[:, column]
                    logits[here, column] = found[here, place]
        return logits

    def _execute(self, profile: ProfileShape, call: Call, caches: tuple[int, ...]) -> NDArray[np.float32]:
        runner = self._runner(profile)
        logits = runner.run(call, caches)
        if failure := runner.take_capture_failure():
            words = f"A step of the profile {profile.name} could not be captured in a CUDA graph and runs without: {failure}"
            self.notes = (*self.notes, words)
        return logits

    def _runner(self, profile: ProfileShape) -> Runner:
        key = (profile.plan, profile.index)
        if key not in self._held.runners:
            captures = self._captures and profile.tokens == (1, 1)
            self._held.runners[key] = Runner(
                self._held.plans[profile.plan], profile, self._held.device, self._exchange, self._shape, captures
            )
        return self._held.runners[key]
