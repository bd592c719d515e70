"""``bench``: how fast one bundle prefills and decodes here, what memory it takes, and what share of the limits it reaches."""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from tformer_deploy.backends import open_session, require_consistent
from tformer_deploy.backends.cpu.opening import ProfileName
from tformer_deploy.bench.memory import peak_mib
from tformer_deploy.bench.plot import import_figure, save_plot
from tformer_deploy.bench.sweep import as_json, points, run_sweep
from tformer_deploy.bench.work import weight_bytes
from tformer_deploy.bundle import open_bundle
from tformer_deploy.commands.options import place_options

if TYPE_CHECKING:
    from tformer_deploy.backends.providers import ProviderName
    from tformer_deploy.bench.sweep import Sweep

_COLUMNS = {
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "prefill_tokens_per_s": "prefill tok/s",
    "flop_utilisation": "of GEMM",
    "decode_tokens_per_s": "decode tok/s",
    "read_utilisation": "of read",
    "peak_mib": "peak MiB",
    "pss_mib": "PSS MiB",
}
_LEGEND = (
    "TTFT: time to the first token. TPOT: of each further one. ITL: gaps between tokens, median and 99th percentile. of GEMM, of read: share "
    "of the matrix products and of the reads of memory that this machine does at most. PSS: memory, pages shared with other processes in part."
)


@click.command("bench", short_help="Measure speed, memory and utilisation.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--prompt-length", "lengths", multiple=True, type=click.IntRange(1), default=(256,), show_default=True,
    help="Tokens in each prompt; repeatable.",
)  # fmt: skip
@click.option(
    "--batch", "batches", multiple=True, type=click.IntRange(1), default=(1,), show_default=True,
    help="Rows decoded together; repeatable.",
)  # fmt: skip
@click.option("--new-tokens", type=click.IntRange(2), default=32, show_default=True, help="Tokens decoded after each prompt.")
@click.option("--capacity", type=click.IntRange(1), default=None, help="Most tokens that a row may hold.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Measured rounds after a warm-up.")
@place_options
@click.option(
    "--profile",
    type=click.Choice(get_args(ProfileName)),
    default="auto",
    show_default=True,
    help="Which graphs ONNX Runtime runs.",
)
@click.option("--threads", type=click.IntRange(1, 1024), default=None, help="Threads of the runtime; its default where absent.")
@click.option("--plot", type=click.Path(path_type=Path), default=None, metavar="FILE.png", help="Draw the sweep.")
@click.option("--json", "as_json_only", is_flag=True, help="Print the JSON line alone.")
def command(
    bundle: Path, lengths: tuple[int, ...], batches: tuple[int, ...], new_tokens: int, capacity: int | None, repeats: int,
    backend: str, provider: ProviderName, engine: str | None, profile: ProfileName, threads: int | None, plot: Path | None, as_json_only: bool,
) -> None:  # fmt: skip
    """Measure time to first token, time per token, memory and utilisation on random token ids.

    Every batch runs with every prompt length, in turn, and so do reads of memory and matrix products of the same threads: the
    limits that utilisation is a share of. Prints a table and, as the last line, one JSON object: the first point's figures, and
    all points under `points`.
    """
    if plot is not None:
        import_figure()  # says now, and not after minutes, that it is missing
    started = time.perf_counter()
    require_consistent(backend, profile, provider, engine)
    opened = open_bundle(bundle)
    points(batches, lengths, new_tokens, capacity, opened.manifest.max_length)  # refused before anything is loaded
    session = open_session(opened, backend=backend, threads=threads, profile=profile, provider=provider, engine=engine)
    wanted = points(batches, lengths, new_tokens, capacity, session.backend.max_length)
    session.prefill([[0] * min(32, wanted[0].prompt_length)]).argmax(-1)
    opened_ms, loaded_mib = (time.perf_counter() - started) * 1e3, peak_mib()
    on_cpu = backend != "tensorrt" and provider == "cpu"
    weights = weight_bytes(opened.manifest, session.backend.dtype)
    log = Console(stderr=True, quiet=as_json_only)
    sweep = run_sweep(session, wanted, repeats, weights, threads, on_cpu, lambda words: log.print(words, style="dim"))
    place = f"profile {profile}, threads {threads or 'default'}" if on_cpu else " ".join(session.backend.notes[:1])
    stored = opened.manifest.quantization
    kind = session.backend.dtype if stored is None else f"matrices in {stored.kind}, the rest in {session.backend.dtype}"
    title = f"{bundle.name}: {kind}, {backend}, {place}"
    if not as_json_only:
        _print(sweep, title)
    if plot is not None:
        save_plot(sweep, title, plot)
    result = as_json(sweep.results[0]) | {
        "points": [as_json(r) for r in sweep.results],
        "limits": None if sweep.limits is None else dataclasses.asdict(sweep.limits),
        "load": {"first_token_ms": opened_ms, "peak_mib": loaded_mib},
        "weight_bytes": weights,
        "repeats": repeats,
        "notes": list(sweep.notes),
        "bundle": bundle.name,
        "backend": backend,
        "provider": provider if backend == "onnxruntime" else None,
        "profile": profile,
        "dtype": opened.manifest.dtype,
        "quantization": None if stored is None else stored.kind,
        "threads": threads,
        "versions": versions(),
    }
    click.echo(json.dumps(result, sort_keys=True))


def _print(sweep: Sweep, title: str) -> None:
    table = Table("batch", "prompt", *_COLUMNS.values(), title=title)
    for row in map(as_json, sweep.results):
        table.add_row(str(row["batch"]), str(row["prompt_length"]), *(_text(name, row[name]) for name in _COLUMNS))
    console = Console(width=max(Console().width, 130))
    console.print(table)
    console.print(_LEGEND, highlight=False)
    if sweep.limits is not None:
        gemm = sweep.limits.gemm_gflops
        product = "" if gemm is None else f", {gemm:.0f} GFLOP/s of fp32 matrix product"
        console.print(f"Limits measured beside the runs: {sweep.limits.read_gb_per_s:.1f} GB/s read{product}.")
    for note in sweep.notes:
        console.print(note)


def _text(name: str, value: object) -> str:
    if not isinstance(value, float):
        return "–"
    return f"{value:.0%}" if name.endswith("utilisation") else f"{value:.1f}"


def versions() -> dict[str, str]:
    """What ran, so that a figure can be compared."""
    found = {"tformer-deploy": version("tformer-deploy"), "python": platform.python_version(), "numpy": np.__version__}
    for name in ("onnxruntime", "onnxruntime-gpu", "torch", "tensorrt", "tensorrt-rtx"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
