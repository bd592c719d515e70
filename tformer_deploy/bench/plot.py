"""One picture of a sweep: prefill, decode and the gaps between tokens."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_deploy.errors import CapabilityError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tformer_deploy.bench.sweep import Result, Sweep


def import_figure() -> Any:
    """Matplotlib's Figure, which draws without a display.

    Raises:
        CapabilityError: It is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise CapabilityError(f"--plot needs the package matplotlib: {e}.", "Run pip install 'tformer-deploy[plot]'.") from e
    return Figure


def save_plot(sweep: Sweep, title: str, path: Path) -> None:
    """Draws a sweep as PNG.

    Raises:
        CapabilityError: matplotlib is not installed.
        StorageError: The file cannot be written.
    """
    figure = import_figure()(figsize=(15, 4.5), layout="constrained")
    figure.suptitle(title)
    prefill, decode, gaps = figure.subplots(1, 3)
    batches = sorted({r.point.batch for r in sweep.results})
    for number, batch in enumerate(batches):
        results = sorted((r for r in sweep.results if r.point.batch == batch), key=lambda r: r.point.prompt_length)
        colour = f"C{number}"
        _line(prefill, results, "prefill_tokens_per_s", "flop_utilisation", colour)
        _line(decode, results, "decode_tokens_per_s", "read_utilisation", colour)
        for style, result in zip(itertools.cycle(("-", "--", "-.", ":")), results, strict=False):
            steps = np.sort([step for run in result.runs for step in run.steps]) * 1e3
            shares = np.arange(1, len(steps) + 1) / len(steps)
            gaps.plot(steps, shares, f"{colour}{style}", label=f"batch {batch}, prompt {result.point.prompt_length}")
    for axes, name, limit in ((prefill, "prefill", "matrix product"), (decode, "decode", "bandwidth")):
        axes.set(title=f"{name} (dashed: limit of {limit})", xlabel="prompt tokens", ylabel="tokens/s")
        axes.set_ylim(bottom=0)
        axes.legend()
    gaps.set(title="gaps between tokens", xlabel="ms", ylabel="share of gaps up to it", ylim=(0, 1.02), xscale="log")
    gaps.legend()
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as e:
        raise StorageError(f"The plot {path} cannot be written: {e.strerror or e}.") from e


def _line(axes: Any, results: Sequence[Result], speed: str, utilisation: str, colour: str) -> None:
    lengths = [r.point.prompt_length for r in results]
    speeds = [getattr(r.figures, speed) for r in results]
    axes.plot(lengths, speeds, f"{colour}o-", label=f"batch {results[0].point.batch}")
    shares = [getattr(r.figures, utilisation) for r in results]
    if None not in shares:
        axes.plot(lengths, [s / share for s, share in zip(speeds, shares, strict=True)], f"{colour}_--", markersize=12)
