"""Which attention will fuse and which cannot, said before the builder starts. The limits were measured on TensorRT-RTX 1.7."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tformer_deploy.errors import InputError, UsageError

if TYPE_CHECKING:
    from tformer_deploy.bundle import Manifest
    from tformer_deploy.config import DType, ModelConfig

DEFAULT_CAPACITY, DEFAULT_BATCH = 4096, 8
# The decode kernel keeps a row's scores and one head in shared memory: capacity + head_dim values, as measured to the slot.
_SCORES = {"fp16": 24576, "bf16": 24576, "fp32": 12288}


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
        InputError: An attention of a phase cannot fuse.
    """
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


def unfusable(config: ModelConfig, dtype: DType, capacity: int) -> list[tuple[str, str]]:
    """Why the attention of a phase cannot fuse, and what to do about it; empty where all can."""
    faults, dim = [], config.head_dim
    if dim % 8 or not 8 <= dim <= 256:
        faults.append(
            (f"prefill and decode: head_dim is {dim}; fused kernels take multiples of 8 from 16 to 256.", _ONNX_RUNTIME)
        )
    elif dim < 16:
        faults.append(
            (f"prefill: head_dim is {dim}; fused kernels take multiples of 8 from 16 to 256 (decode: from 8).", _ONNX_RUNTIME)
        )
    if dtype == "fp32":
        faults.append(("prefill: the dtype is fp32; fused kernels take fp16 and bf16 (decode: fp32 too).", "Give --dtype fp16."))
    limit = _SCORES[dtype] - dim
    if capacity > limit:
        faults.append(
            (
                f"decode: capacity is {capacity}; for head_dim {dim} in {dtype} the kernel ends at {limit}.",
                f"Give --capacity {limit} or less.",
            )
        )
    return faults


_ONNX_RUNTIME = "Run this bundle on ONNX Runtime; no engine can be made of it."
