"""Times of one greedy run over a session, and the figures of several."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.bench.work import cache_bytes, prefill_flops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tformer_deploy.backends import Session
    from tformer_deploy.bench.limits import Limits
    from tformer_deploy.config import DType, ModelConfig


@dataclass(frozen=True)
class Point:
    """What is run: rows decoded together, tokens of each prompt, tokens decoded after it, and the room given from the start."""

    batch: int
    prompt_length: int
    new_tokens: int
    capacity: int | None = None


@dataclass(frozen=True)
class Run:
    """Seconds to the first token of every row, then of each further token."""

    first: float
    steps: tuple[float, ...]


@dataclass(frozen=True)
class Figures:
    """What a point's runs come to: medians over runs, quantiles over all steps.

    Attributes:
        ttft_ms: Time to the first token: prefill, and choosing it.
        tpot_ms: Time of each further token: a run's mean.
        itl_p50_ms: Median gap between two tokens.
        itl_p99_ms: 99th percentile of the gaps.
        prefill_tokens_per_s: Of all rows together.
        decode_tokens_per_s: Of all rows together.
        read_utilisation: Bytes that a decode step must read (weights, and caches at their mean length) over what the measured
            bandwidth would read in that time; None without a limit.
        flop_utilisation: Operations of the prefill over what the measured matrix product would do in that time; None as above.
    """

    ttft_ms: float
    tpot_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    read_utilisation: float | None
    flop_utilisation: float | None


def measure(session: Session, rows: Sequence[Sequence[int]], point: Point) -> Run:
    """One run: prefill, then ``point.new_tokens`` greedy steps."""
    started = time.perf_counter()
    tokens = session.prefill(rows, capacity=point.capacity).argmax(-1).tolist()
    first, steps = time.perf_counter() - started, []
    for _ in range(point.new_tokens):
        started = time.perf_counter()
        tokens = session.decode(tokens).argmax(-1).tolist()
        steps.append(time.perf_counter() - started)
    return Run(first, tuple(steps))


def figures(
    point: Point, runs: Sequence[Run], limits: Sequence[Limits | None], config: ModelConfig, dtype: DType, weights: int
) -> Figures:
    """The figures of a point.

    Args:
        point: What ran.
        runs: At least one.
        limits: Measured beside each run, so that what disturbs the machine for a while disturbs both; None where not.
        config: The model.
        dtype: What it ran in.
        weights: Bytes of weights that a step reads.
    """
    first = statistics.median(run.first for run in runs)
    token = statistics.median(statistics.mean(run.steps) for run in runs)
    gaps = np.array([step for run in runs for step in run.steps])
    length = point.prompt_length + (point.new_tokens + 1) / 2
    step_bytes = weights + cache_bytes(config, dtype, point.batch, length)
    operations = prefill_flops(config, point.batch, point.prompt_length)
    beside = [(run, limit) for run, limit in zip(runs, limits, strict=True) if limit is not None]
    read = [step_bytes / statistics.mean(run.steps) / (limit.read_gb_per_s * 1e9) for run, limit in beside]
    flops = [operations / run.first / (limit.gemm_gflops * 1e9) for run, limit in beside if limit.gemm_gflops is not None]
    return Figures(
        ttft_ms=first * 1e3,
        tpot_ms=token * 1e3,
        itl_p50_ms=float(np.quantile(gaps, 0.5)) * 1e3,
        itl_p99_ms=float(np.quantile(gaps, 0.99)) * 1e3,
        prefill_tokens_per_s=point.batch * point.prompt_length / first,
        decode_tokens_per_s=point.batch / token,
        read_utilisation=statistics.median(read) if read else None,
        flop_utilisation=statistics.median(flops) if flops else None,
    )
