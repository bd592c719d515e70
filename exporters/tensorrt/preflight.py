"""Which attention will fuse and which cannot, said before the builder starts. The limits were measured on TensorRT-RTX 1.7."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tformer_deploy.errors import InputError, UsageError

if TYPE_CHECKING:
    from tformer_deploy.bundle import Manifest
    from tformer_deploy.config import DType, ModelConfig

# Above these capacities the decode kernel is not found; the limit shrinks with the head.
_DECODE_CAPACITY = {64: 24512, 128: 24448, 256: 24320}
_DECODE_CAPACITY_FP32 = 12224


@dataclass(frozen=True)
class Profile:
    """Shapes of one optimization profile: (min, opt, max) rows and new tokens."""

    name: str
    batch: tuple[int, int, int]
    sequence: tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """What is to be built."""

    dtype: DType
    capacity: int
    max_batch: int
    profiles: tuple[Profile, ...]


def make_plan(
    manifest: Manifest, dtype: DType, capacity: int | None, max_batch: int, prompt_buckets: tuple[int, ...]
) -> Plan:
    """Capacity, then one decode profile (S = 1) and one prefill profile a prompt bucket.

    Raises:
        UsageError: A number is out of range.
        InputError: An attention of a phase cannot fuse.
    """
    capacity = capacity or min(manifest.max_length, 4096)
    if not 2 <= capacity <= manifest.max_length:
        raise UsageError(f"--capacity is {capacity}; this bundle's rows hold 2 to {manifest.max_length} tokens.", "Choose a number in that range.")
    edges = tuple(sorted(set(prompt_buckets))) or (capacity,)
    if edges[-1] > capacity or edges[0] < 2:
        raise UsageError(f"--prompt-bucket is {', '.join(map(str, edges))}; expected 2 to the capacity, {capacity}.", "Choose numbers in that range.")
    rows = (1, max_batch, max_batch)
    # A decode profile of its own, S fixed to 1: its kernel reads the cache in place.
    profiles = [Profile("decode", rows, (1, 1, 1))]
    low = 2
    for edge in edges:
        profiles.append(Profile(f"prefill-{edge}", rows, (low, edge, edge)))
        low = min(edge + 1, capacity)
    faults = unfusable(manifest.config, dtype, capacity)
    if faults:
        hint = "Give --dtype fp16." if dtype == "fp32" and len(faults) == 1 and "fp32" in faults[0] else "Run this bundle on ONNX Runtime instead."
        raise InputError("TensorRT has no fused attention for this model:\n  " + "\n  ".join(faults), hint)
    return Plan(dtype, capacity, max_batch, tuple(profiles))


def unfusable(config: ModelConfig, dtype: DType, capacity: int) -> list[str]:
    """Why the attention of a phase cannot fuse, a sentence each; empty where all can."""
    faults, dim = [], config.head_dim
    if dtype == "fp32":
        faults.append("prefill: fp32 attention has no fused kernel; fp16 and bf16 have.")
    if dim % 8 or not 8 <= dim <= 256:
        faults.append(f"prefill and decode: head_dim is {dim}; fused kernels exist for multiples of 8 from 16 to 256.")
    elif dim < 16:
        faults.append(f"prefill: head_dim is {dim}; fused kernels exist from 16 on.")
    limit = _DECODE_CAPACITY_FP32 if dtype == "fp32" else next((c for d, c in _DECODE_CAPACITY.items() if dim <= d), 0)
    if limit and capacity > limit:
        faults.append(f"decode: capacity is {capacity}; for head_dim {dim} in {dtype} the kernel ends at {limit}.")
    return faults
