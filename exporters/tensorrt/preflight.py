"""What is to be built, checked before the builder starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tformer_deploy.bundle.fusable import DEFAULT_CAPACITY, PhaseReport, attention_faults, no_engine, preflight
from tformer_deploy.errors import InputError, UsageError

if TYPE_CHECKING:
    from tformer_deploy.bundle import Manifest
    from tformer_deploy.bundle.signature import Phase
    from tformer_deploy.config import DType

Layout = Literal["shared", "split", "decode"]
DEFAULT_BATCH = 8
# Most new tokens of an extend profile: drafts to verify and the next turn of a conversation, in pieces.
EXTEND = 64
# Most positions a row whose logits a profile of several tokens can give; each costs rows × vocabulary × 4 bytes on the GPU.
LOGITS = 16


@dataclass(frozen=True)
class Profile:
    """Shapes of one optimization profile: (min, opt, max) rows, new tokens a row, and logits a row."""

    name: str
    phase: str
    batch: tuple[int, int, int]
    sequence: tuple[int, int, int]
    logits: tuple[int, int, int]


@dataclass(frozen=True)
class PlanPart:
    """One plan: the graph that it is compiled from, and its profiles in order."""

    name: str
    graph: Phase
    profiles: tuple[Profile, ...]


@dataclass(frozen=True)
class Plan:
    """What is to be built.

    Attributes:
        dtype: Of weights and caches.
        layout: ``shared``, ``split`` or ``decode``.
        capacity: Slots of a cache row.
        max_batch: Most rows.
        parts: The plans, in order.
        reports: What will become of the attention, phase by phase.
        fp8: The blocks' matrices, and what they multiply, are rounded to FP8.
    """

    dtype: DType
    layout: Layout
    capacity: int
    max_batch: int
    parts: tuple[PlanPart, ...]
    reports: tuple[PhaseReport, ...]
    fp8: bool = False

    @property
    def unfusable_phases(self) -> tuple[str, ...]:
        """Phases that are decomposed, because that was allowed."""
        return tuple(report.phase for report in self.reports if report.faults)


def make_plan(
    manifest: Manifest,
    dtype: DType,
    capacity: int | None,
    max_batch: int,
    prompt_buckets: tuple[int, ...],
    layout: Layout = "shared",
    allow_decomposed: bool = False,
    fp8: bool = False,
) -> Plan:
    """The capacity, and each plan's profiles.

    Args:
        manifest: The bundle's.
        dtype: The engine's.
        capacity: Slots of a cache row; ``max_length``, at most 4096, where None.
        max_batch: Most rows.
        prompt_buckets: Most tokens of each prefill profile; one of ``capacity`` tokens where empty.
        layout: ``shared``: the decode graph with decode and prefill profiles. ``split``: the decode graph with a decode and an
            extend profile, and the prefill graph. ``decode``: the first of those two alone.
        allow_decomposed: An attention that cannot fuse is built from its parts.
        fp8: The blocks' matrices are multiplied in FP8.

    Raises:
        UsageError: A number is out of range.
        InputError: The bundle cannot be cast to ``dtype``; an attention of a phase cannot fuse, and ``allow_decomposed`` is False or does not help; or the matrices are
            stored as no engine reads them.
    """
    if fault := no_engine(manifest.quantization, cast=dtype != manifest.dtype):
        raise InputError(f"No engine can be made of this bundle: {fault[0]}", fault[1])
    require_castable(manifest, dtype)
    if fp8 and (manifest.dtype != "fp32" or manifest.quantization is not None or dtype == "fp32"):
        stored = manifest.dtype if manifest.quantization is None else manifest.quantization.kind
        raise InputError(
            f"FP8 products are made from an fp32 bundle for an fp16 or bf16 engine; this bundle is {stored}, the engine {dtype}.",
            "Export the checkpoint in fp32 without --quantize, and give --dtype fp16 or bf16.",
        )
    if max_batch < 1:
        raise UsageError(f"--max-batch is {max_batch}; expected at least 1.", "Choose a number from 1.")
    capacity = capacity_for(manifest, capacity)
    if layout == "decode" and prompt_buckets:
        raise UsageError("--layout decode has no prefill profile; --prompt-bucket is for one.", "Leave --prompt-bucket out.")
    edges = tuple(sorted(set(prompt_buckets))) or (capacity,)
    # TensorRT would build a profile that writes past the cache without a word.
    if edges[-1] > capacity or edges[0] < 2:
        raise UsageError(
            f"--prompt-bucket is {', '.join(map(str, edges))}; expected numbers from 2 to the capacity, {capacity}.",
            "Choose numbers in that range.",
        )
    # Where several tokens do not fuse though one does (fp32, head_dim 8), the plan that decodes leaves them out.
    faults = attention_faults(manifest.config, dtype, capacity)
    extend = all("decode" in fault.phases for fault in faults if "extend" in fault.phases)
    rows = (1, max_batch, max_batch)
    if max_batch == 1 and (fp8 or manifest.quantization is not None):
        # For one row and no more TensorRT-RTX 1.7 merges products of one input, and unpacks their matrices for it.
        rows = (1, 1, 2)
    parts = _parts(layout, rows, edges, capacity, extend)
    phases = dict.fromkeys(profile.phase for part in parts for profile in part.profiles)
    reports = preflight(manifest.config, dtype, capacity, tuple(phases), square=layout == "split")
    _refuse(reports, allow_decomposed)
    return Plan(dtype, layout, capacity, max_batch, parts, tuple(reports), fp8)


def fp8_file(phase: str) -> str:
    """Name of a phase's graph with FP8 products, beside the graph that it was made from."""
    return f"{phase}.fp8.onnx"


def require_castable(manifest: Manifest, dtype: DType) -> None:
    """Refuses a dtype that a bundle cannot be cast to.

    Raises:
        InputError: The bundle is not fp32, and ``dtype`` is another one than its own.
    """
    if dtype != manifest.dtype != "fp32":
        raise InputError(
            f"This is a bundle in {manifest.dtype}, whose engine is in {manifest.dtype}; --dtype is {dtype}.",
            f"Leave --dtype out, or export the checkpoint with --dtype {dtype}.",
        )


def capacity_for(manifest: Manifest, capacity: int | None) -> int:
    """Slots of a cache row: ``max_length``, at most 4096, where nothing is asked for.

    Raises:
        UsageError: It is out of range.
    """
    capacity = min(manifest.max_length, DEFAULT_CAPACITY) if capacity is None else capacity
    if not 2 <= capacity <= manifest.max_length:
        raise UsageError(
            f"--capacity is {capacity}; this bundle's rows hold 2 to {manifest.max_length} tokens.",
            "Choose a number in that range.",
        )
    return capacity


def _parts(
    layout: Layout, rows: tuple[int, int, int], edges: tuple[int, ...], capacity: int, extend: bool
) -> tuple[PlanPart, ...]:
    # A decode profile of its own, S fixed to 1: its kernel reads the cache in place.
    decode = [Profile("decode", "decode", rows, (1, 1, 1), (1, 1, 1))]
    prefill, low = [], 2
    for edge in edges:
        prefill.append(_several("prefill", rows, low, edge))
        low = edge + 1
    if layout == "shared":
        return (PlanPart("shared", "decode", (*decode, *prefill)),)
    if extend:
        decode.append(_several("extend", rows, 2, min(EXTEND, capacity)))
    parts = (PlanPart("decode", "decode", tuple(decode)), PlanPart("prefill", "prefill", tuple(prefill)))
    return parts if layout == "split" else parts[:1]


def _several(phase: str, rows: tuple[int, int, int], low: int, high: int) -> Profile:
    return Profile(f"{phase}-{high}", phase, rows, (low, high, high), (1, 1, min(LOGITS, high)))


def _refuse(reports: list[PhaseReport], allow_decomposed: bool) -> None:
    faults = [fault for report in reports for fault in report.faults]
    if faults and not allow_decomposed:
        lines = "\n  ".join(
            f"{' and '.join(r.phase for r in reports if f in r.faults)}: {f.reason}" for f in dict.fromkeys(faults)
        )
        raise InputError(f"TensorRT has no fused attention for this model:\n  {lines}", faults[0].cure)
