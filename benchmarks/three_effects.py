"""Three reasons for the fast forms, measured as ratios: memory, cached decoding, bucketing.

    python benchmarks/three_effects.py [--quick] [--threads 1] [--trace FILE.csv]

1. memory: growth of the peak when the length doubles. Fused attention 2 (linear), materialised scores 4 (quadratic).
2. decoding: time of the token at position n. With a cache it grows with n, without one (the whole text again) with n².
3. padding: tokens computed for each real one, and seconds, with batches in order of arrival and bucketed by length.

What is compared is measured in turn (a, b, a, b, …); times are medians. Each memory figure comes from a process of its own.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from tformer_deploy.config import ModelConfig, RopeConfig
from tformer_deploy.reference import (
    CachedAttention,
    Decoder,
    FastAttention,
    MultiHeadAttention,
    TransformerConfig,
    bucket_by_length,
    causal_mask,
)

if TYPE_CHECKING:
    from collections.abc import Callable

TRACE = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "AzureLLMInferenceTrace_conv.csv"
D_MODEL, HEADS = 256, 2
SYNTHETIC = "synthetic: 4,000 lengths, log-normal, median 1,000, sigma 1"


def medians(forms: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each form; one round to warm up, then ``repeats`` rounds with the forms in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(repeats + 1):
        for name, form in forms.items():
            started = time.perf_counter()
            form()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_mib(form: str, length: int) -> float:
    """Memory that one causal pass adds to this process at its peak, in MiB (Linux: VmHWM, reset just before)."""
    x = torch.randn(1, length, D_MODEL)
    if form == "fused":
        fused = FastAttention(D_MODEL, HEADS)
        fused(x[:, :8])
        _reset_peak()
        before = _status_mib("VmRSS")
        fused(x)
    else:
        materialised = MultiHeadAttention(TransformerConfig(D_MODEL, HEADS, dropout=0.0)).eval()
        materialised(x[:, :8], causal_mask(8))
        _reset_peak()
        before = _status_mib("VmRSS")
        materialised(x, causal_mask(length))
    return _status_mib("VmHWM") - before


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def memory(lengths: list[int], threads: int) -> list[dict[str, float]]:
    """Peaks of both forms at every length, each in a child process; growth from one length to the next."""
    rows: list[dict[str, float]] = []
    for length in lengths:
        row: dict[str, float] = {"length": length}
        for form in ("fused", "materialised"):
            command = [sys.executable, __file__, "--threads", str(threads), "--peak", form, str(length)]
            row[f"{form}_mib"] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        row["ratio"] = row["materialised_mib"] / row["fused_mib"]
        rows.append(row)
    return _with_growth(rows, ("fused_mib", "materialised_mib"))


@torch.no_grad()
def decoding(lengths: list[int], repeats: int) -> list[dict[str, float]]:
    """Milliseconds for the token after ``length - 1`` others: from the cache, and by computing all of them again."""
    cached, whole = CachedAttention(D_MODEL, HEADS, max(lengths), 1), FastAttention(D_MODEL, HEADS)
    whole.load_state_dict(cached.state_dict())
    text = torch.randn(1, max(lengths), D_MODEL)
    cached(text, 0)
    rows = []
    for length in lengths:
        x = text[:, :length]
        forms = {"cached": lambda x=x: cached(x[:, -1:], x.shape[1] - 1), "recomputed": lambda x=x: whole(x)[:, -1:]}
        torch.testing.assert_close(forms["cached"](), forms["recomputed"](), rtol=0, atol=1e-4)
        times = medians(forms, repeats)
        row = {"length": length, **{f"{name}_ms": 1e3 * t for name, t in times.items()}}
        rows.append({**row, "ratio": row["recomputed_ms"] / row["cached_ms"]})
    return _with_growth(rows, ("cached_ms", "recomputed_ms"))


def _with_growth(rows: list[dict[str, float]], columns: tuple[str, ...]) -> list[dict[str, float]]:
    for previous, row in itertools.pairwise(rows):
        for column in columns:
            row[f"{column.rsplit('_', 1)[0]}_growth"] = row[column] / previous[column]
    return rows


def read_lengths(trace: Path | None) -> tuple[str, list[int]]:
    """Prompt lengths in order of arrival from the column ContextTokens of ``trace``, or a synthetic long tail."""
    if trace is None:
        draw = random.Random(0)
        return SYNTHETIC, [max(1, round(draw.lognormvariate(0, 1) * 1000)) for _ in range(4000)]
    with trace.open(encoding="utf-8", newline="") as file:
        return trace.name, [int(row["ContextTokens"]) for row in csv.DictReader(file)]


def padded_tokens(batches: list[list[range]]) -> int:
    """Tokens computed when every batch is padded to its longest row."""
    return sum(len(batch) * max(map(len, batch)) for batch in batches)


@torch.no_grad()
def padding(lengths: list[int], repeats: int, timed: int) -> dict[str, float]:
    """Computed tokens for each real one over all lengths, and seconds of a small Decoder over the first ``timed`` rows.

    A length n is timed as n / 8, at most 512 tokens, so that the small model stands for a large one in little time.
    """
    rows = [range(n) for n in lengths if n]
    arrival = [rows[i : i + 64] for i in range(0, len(rows), 64)]
    real = sum(map(len, rows))
    result = {
        "arrival_tokens": padded_tokens(arrival) / real,
        "bucketed_tokens": padded_tokens(bucket_by_length(rows, 64)) / real,
    }
    config = ModelConfig(
        vocab_size=256, d_model=64, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=32, d_ff=128, max_length=512, rope=RopeConfig()
    )
    decoder = Decoder(config).eval()
    small = [range(min(512, max(1, len(row) // 8))) for row in rows[:timed]]
    batches = {"arrival": [small[i : i + 16] for i in range(0, timed, 16)], "bucketed": bucket_by_length(small, 16)}

    def pass_over(parts: list[list[range]]) -> None:
        for batch in parts:
            decoder(torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64))

    times = medians({name: lambda b=b: pass_over(b) for name, b in batches.items()}, repeats)
    return {**result, **{f"{name}_s": t for name, t in times.items()}}


def show(console: Console, result: dict[str, Any]) -> None:
    for name, rows in (("memory, MiB at the peak", result["memory"]), ("decoding, ms a token", result["decoding"])):
        table = Table(*(c.replace("_", " ") for c in rows[-1]), title=name)
        for row in rows:
            table.add_row(*(f"{row[c]:.4g}" if c in row else "" for c in rows[-1]))
        console.print(table)
    pad = result["padding"]
    table = Table("", "arrival order", "bucketed", "ratio", title=f"padding, {result['lengths']}")
    for label, unit in (("tokens computed / real", "tokens"), ("seconds, small model", "s")):
        a, b = pad[f"arrival_{unit}"], pad[f"bucketed_{unit}"]
        table.add_row(label, f"{a:.3f}", f"{b:.3f}", f"{a / b:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, about ten seconds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trace", type=Path, default=TRACE if TRACE.is_file() else None, help="CSV with ContextTokens")
    parser.add_argument("--peak", nargs=2, metavar=("FORM", "LENGTH"), help=argparse.SUPPRESS)  # a child's only job
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    if arguments.peak:
        with torch.no_grad():
            print(peak_mib(arguments.peak[0], int(arguments.peak[1])))
        return
    quick = arguments.quick
    name, lengths = read_lengths(arguments.trace)
    result = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()},
        "threads": arguments.threads,
        "lengths": name,
        "memory": memory([1024, 4096] if quick else [1024, 2048, 4096, 8192], arguments.threads),
        "decoding": decoding([512, 1024, 2048] if quick else [1024, 2048, 4096, 8192], 3 if quick else 5),
        "padding": padding(lengths, 1 if quick else 5, 128 if quick else 512),
    }
    console = Console()
    console.print(*(f"{k} {v}" for k, v in result["versions"].items()), f"threads {arguments.threads}", highlight=False)
    show(console, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
