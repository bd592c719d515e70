"""``bench``: how fast one bundle prefills and decodes here, on one backend."""

from __future__ import annotations

import json
import platform
import resource
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from tformer_deploy.backends import Session, open_session
from tformer_deploy.bundle import open_bundle
from tformer_deploy.errors import UsageError


@click.command("bench", short_help="Measure prefill and decode speed.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompt-length", type=click.IntRange(1), default=256, show_default=True, help="Tokens in each prompt.")
@click.option("--new-tokens", type=click.IntRange(2), default=32, show_default=True, help="Tokens decoded after it.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Rows decoded together.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Measured runs after one warm-up.")
@click.option("--backend", type=click.Choice(["onnxruntime", "torch", "tensorrt"]), default="onnxruntime", show_default=True)
@click.option("--threads", type=click.IntRange(1, 1024), default=None, help="Threads of the runtime; its default where absent.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON line alone.")
def command(
    bundle: Path, prompt_length: int, new_tokens: int, batch: int, repeats: int, backend: str, threads: int | None, as_json: bool
) -> None:
    """Measure time to first token, time per token and throughput on random token ids.

    Prints a table and, as the last line, one JSON object; every figure is the median of the measured runs.
    """
    opened = open_bundle(bundle)
    if prompt_length + new_tokens > opened.manifest.max_length:
        raise UsageError(
            f"--prompt-length {prompt_length} and --new-tokens {new_tokens} make {prompt_length + new_tokens} tokens; "
            f"the bundle's max_length is {opened.manifest.max_length}.",
            "Lower one of the two.",
        )
    session = open_session(opened, backend=backend, threads=threads)
    ids = np.random.default_rng(0).integers(0, opened.manifest.config.vocab_size, (batch, prompt_length))
    runs = [measure(session, ids.tolist(), new_tokens) for _ in range(repeats + 1)][1:]
    result = summary(runs, batch, prompt_length)
    result |= {
        "bundle": bundle.name,
        "backend": backend,
        "dtype": opened.manifest.dtype,
        "threads": threads,
        "versions": versions(),
    }
    if not as_json:
        table = Table("figure", "median", title=f"{bundle.name}: batch {batch}, {prompt_length} + {new_tokens} tokens, {backend}")
        for name in ("ttft_ms", "tpot_ms", "itl_p99_ms", "prefill_tokens_per_s", "decode_tokens_per_s", "peak_mib"):
            table.add_row(name, f"{result[name]:.2f}")
        Console().print(table)
    click.echo(json.dumps(result, sort_keys=True))


def measure(session: Session, rows: list[list[int]], new_tokens: int) -> list[float]:
    """Seconds of the prefill, then of each decode step, greedy."""
    seconds = []
    started = time.perf_counter()
    logits = session.prefill(rows)
    for _ in range(new_tokens):
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        logits = session.decode(logits.argmax(-1).tolist())
    return [*seconds, time.perf_counter() - started]


def summary(runs: list[list[float]], batch: int, prompt_length: int) -> dict[str, Any]:
    """Medians over the runs, in the units that the names say."""
    first = statistics.median(run[0] for run in runs)
    steps = sorted(step for run in runs for step in run[1:])
    step = statistics.median(steps)
    return {
        "batch": batch,
        "prompt_length": prompt_length,
        "ttft_ms": first * 1e3,
        "tpot_ms": step * 1e3,
        "itl_p99_ms": steps[min(len(steps) - 1, int(0.99 * len(steps)))] * 1e3,
        "prefill_tokens_per_s": batch * prompt_length / first,
        "decode_tokens_per_s": batch / step,
        # Linux counts in KiB, macOS in bytes.
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
    }


def versions() -> dict[str, str]:
    """What ran, so that a figure can be compared."""
    return {"tformer-deploy": version("tformer-deploy"), "python": platform.python_version(), "numpy": np.__version__}
