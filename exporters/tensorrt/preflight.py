"""What is to be built, checked before the builder starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tformer_deploy.bundle.fusable import DEFAULT_CAPACITY, no_engine, unfusable
from tformer_deploy.errors import InputError, UsageError

if TYPE_CHECKING:
    from tformer_deploy.bundle import Manifest
    from tformer_deploy.config import DType

DEFAULT_BATCH = 8


@dataclass(frozen=True)
class Profile:
    """Shapes of one optimization profile: (min, opt, max) rows and new tokens."""

    name: str
    phase: str
    batch: tuple[int, int, int]
    sequence: tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """What is to be built."""

    dtype: DType
    capacity: int
    max_batch: int
    profiles: tuple[Profile, ...]


def make_plan(manifest: Manifest, dtype: DType, capacity: int | None, max_batch: int, prompt_buckets: tuple[int, ...]) -> Plan:
    """Capacity, then one decode profile (S = 1) and one prefill profile a prompt bucket.

    Args:
        manifest: The bundle's.
        dtype: The engine's.
        capacity: Slots of a cache row; ``max_length``, at most 4096, where None.
        max_batch: Most rows.
        prompt_buckets: Most tokens of each prefill profile; one of ``capacity`` tokens where empty.

    Raises:
        UsageError: A number is out of range.
        InputError: An attention of a phase cannot fuse, or the matrices are stored as no engine reads them.
    """
    if fault := no_engine(manifest.quantization):
        raise InputError(f"No engine can be made of this bundle: {fault[0]}", fault[1])
    if max_batch < 1:
        raise UsageError(f"--max-batch is {max_batch}; expected at least 1.", "Choose a number from 1.")
    capacity = min(manifest.max_length, DEFAULT_CAPACITY) if capacity is None else capacity
    if not 2 <= capacity <= manifest.max_length:
        raise UsageError(
            f"--capacity is {capacity}; this bundle's rows hold 2 to {manifest.max_length} tokens.",
            "Choose a number in that range.",
        )
    edges = tuple(sorted(set(prompt_buckets))) or (capacity,)
    # TensorRT would build a profile that writes past the cache without a word.
    if edges[-1] > capacity or edges[0] < 2:
        raise UsageError(
            f"--prompt-bucket is {', '.join(map(str, edges))}; expected numbers from 2 to the capacity, {capacity}.",
            "Choose numbers in that range.",
        )
    if faults := unfusable(manifest.config, dtype, capacity):
        raise InputError("TensorRT has no fused attention for this model:\n  " + "\n  ".join(f for f, _ in faults), faults[0][1])
    rows = (1, max_batch, max_batch)
    # A decode profile of its own, S fixed to 1: its kernel reads the cache in place.
    profiles, low = [Profile("decode", "decode", rows, (1, 1, 1))], 2
    for edge in edges:
        profiles.append(Profile(f"prefill-{edge}", "prefill", rows, (low, edge, edge)))
        low = edge + 1
    return Plan(dtype, capacity, max_batch, tuple(profiles))
