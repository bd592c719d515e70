"""Several points over one session, interleaved with each other and with the machine's limits."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.bench.limits import LimitProbe, Limits
from tformer_deploy.bench.measure import Figures, Point, Run, figures, measure
from tformer_deploy.bench.memory import peak_mib, proportional_mib, reset_peak
from tformer_deploy.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tformer_deploy.backends import Session


@dataclass(frozen=True)
class Result:
    """A point, what it came to, and its runs.

    Attributes:
        point: What ran.
        figures: Medians.
        peak_mib: The most memory resident during a run.
        pss_mib: Proportional memory at the end of a run, caches still held; None where the kernel does not say.
        runs: The measured runs.
    """

    point: Point
    figures: Figures
    peak_mib: float
    pss_mib: float | None
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Sweep:
    """All points of a command.

    Attributes:
        results: One a point.
        limits: Medians over the samples; None without them.
        notes: What could not be measured, and why.
    """

    results: tuple[Result, ...]
    limits: Limits | None
    notes: tuple[str, ...]


def points(batches: Sequence[int], lengths: Sequence[int], new_tokens: int, capacity: int | None, max_length: int) -> list[Point]:
    """Every batch with every prompt length.

    Raises:
        UsageError: One does not fit the bundle or the capacity.
    """
    longest = max(lengths) + new_tokens
    if longest > max_length:
        raise UsageError(
            f"--prompt-length {max(lengths)} and --new-tokens {new_tokens} make {longest} tokens; "
            f"the bundle's max_length is {max_length}.",
            "Lower one of the two.",
        )
    if capacity is not None and not longest <= capacity <= max_length:
        raise UsageError(
            f"--capacity is {capacity}; expected {longest} (prompt and new tokens) to {max_length} (the bundle's max_length)."
        )
    return [Point(batch, length, new_tokens, capacity) for batch in batches for length in lengths]


def run_sweep(
    session: Session,
    wanted: Sequence[Point],
    repeats: int,
    weights: int,
    threads: int | None,
    on_cpu: bool,
    on_run: Callable[[str], None],
) -> Sweep:
    """One round to warm up, in which memory is read, then ``repeats`` rounds: the limits and a run of each point in turn.

    Args:
        session: The loaded model.
        wanted: The points.
        repeats: Rounds.
        weights: Bytes of weights that a decode step reads.
        threads: Of the runtime; its default where None.
        on_cpu: Whether the CPU runs it, whose limits can be measured.
        on_run: Called with a few words before each run.
    """
    config, random = session.backend.config, np.random.default_rng(0)
    rows = [random.integers(0, config.vocab_size, (p.batch, p.prompt_length)).tolist() for p in wanted]
    memory = []
    for point, ids in zip(wanted, rows, strict=True):
        on_run(f"warm-up: batch {point.batch}, prompt {point.prompt_length}")
        reset_peak()
        measure(session, ids, point)
        memory.append((peak_mib(), proportional_mib()))
    # Made only now: its arrays are no part of what the model needs.
    probe = LimitProbe(threads) if on_cpu else None
    runs: list[list[Run]] = [[] for _ in wanted]
    samples: list[list[Limits | None]] = [[] for _ in wanted]
    for turn in range(repeats):
        for i, (point, ids) in enumerate(zip(wanted, rows, strict=True)):
            on_run(f"round {turn + 1} of {repeats}: batch {point.batch}, prompt {point.prompt_length}")
            samples[i].append(probe.sample() if probe else None)
            runs[i].append(measure(session, ids, point))
    results = [
        Result(point, figures(point, runs[i], samples[i], config, session.backend.dtype, weights), *memory[i], tuple(runs[i]))
        for i, point in enumerate(wanted)
    ]
    notes = [*session.backend.notes]
    if probe is None:
        notes.append("Limits are measured for processors only, so that utilisation is not given.")
    elif probe.missing:
        notes.append(probe.missing)
    return Sweep(tuple(results), _median([s for of_point in samples for s in of_point if s is not None]), tuple(notes))


def _median(samples: list[Limits]) -> Limits | None:
    if not samples:
        return None
    gemm = [s.gemm_gflops for s in samples if s.gemm_gflops is not None]
    return Limits(statistics.median(s.read_gb_per_s for s in samples), statistics.median(gemm) if gemm else None)


def as_json(result: Result) -> dict[str, object]:
    """A result without its runs, for the JSON line."""
    flat = dataclasses.asdict(result.point) | dataclasses.asdict(result.figures)
    return flat | {"peak_mib": result.peak_mib, "pss_mib": result.pss_mib}
