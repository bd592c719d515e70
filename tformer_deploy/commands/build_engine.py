"""``build-engine``: bundle → TensorRT engine beside its core."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from tformer_deploy import api
from tformer_deploy.commands.console import wide_console
from tformer_deploy.config import DTYPES

if TYPE_CHECKING:
    from tformer_deploy.config import DType


@click.command("build-engine", short_help="Compile a bundle with TensorRT; fused attention is proven.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--flavour", type=click.Choice(["auto", "rtx", "tensorrt"]), default="auto", show_default=True)
@click.option(
    "--layout", type=click.Choice(["shared", "split", "decode"]), default="shared", show_default=True,
    help="shared: one plan for both phases, weights once; split: a plan a phase; decode: only the plan that decodes.",
)  # fmt: skip
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default=None,
    help="The bundle's where absent; another one is derived and checked first.",
)
@click.option(
    "--capacity", type=click.IntRange(2), default=None, help="Cache slots of a row; max_length, at most 4096, where absent."
)
@click.option("--max-batch", type=click.IntRange(1, 4096), default=8, show_default=True, help="Rows at most.")
@click.option(
    "--prompt-bucket", "buckets", type=click.IntRange(2), multiple=True, help="Largest prompt of a prefill profile; repeatable."
)
@click.option(
    "--prompt-buckets-from", "buckets_from", type=click.Path(path_type=Path), default=None,
    help="Derive them from a file: a prompt length a line, or JSON lines with prompt_tokens, length or input_ids.",
)  # fmt: skip
@click.option("--target", "targets", multiple=True, help="Compute capability, for instance 8.9 (rtx only); repeatable.")
@click.option(
    "--allow-decomposed",
    is_flag=True,
    help="Build attention that cannot fuse from its parts: slow, loud, recorded in the engine.",
)
@click.option(
    "--range-scan", type=click.Path(path_type=Path), default=None,
    help="A text or JSONL file of real prompts: name the values inside the model that overflow fp16 on them.",
)  # fmt: skip
@click.option(
    "--fp8", type=click.Path(path_type=Path), default=None,
    help="Multiply the blocks' matrices in FP8 (GPUs from 8.9); scales are measured on the prompts of this text or JSONL file.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an engine of the same name.")
@click.option("--json", "as_json", is_flag=True, help="Print the engine's record as one JSON object.")
def command(
    bundle: Path, flavour: str, layout: str, dtype: DType | None, capacity: int | None, max_batch: int, buckets: tuple[int, ...],
    buckets_from: Path | None, targets: tuple[str, ...], allow_decomposed: bool, range_scan: Path | None, fp8: Path | None, force: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Compile BUNDLE: a decode profile for one new token a row, and a prefill profile for each prompt bucket.

    What will fuse and what the engine costs is said before the builder starts. The engine is kept only when every attention of
    every profile became a fused kernel, proven in two ways, or was allowed not to.
    """
    with _Bar() as bar:
        built: Any = api.build_engine(
            bundle, flavour=flavour, layout=layout, dtype=dtype, capacity=capacity, max_batch=max_batch, prompt_buckets=buckets,
            prompt_buckets_from=buckets_from, targets=targets, allow_decomposed=allow_decomposed, range_scan=range_scan,
            fp8=fp8, force=force, on_note=bar.note, on_progress=bar.update,
        )  # fmt: skip
    if as_json:
        figures = {"path": str(built.path), "build_s": built.build_s, "peak_mib": built.peak_mib}
        click.echo(json.dumps(dataclasses.asdict(built.record) | figures, sort_keys=True))
    else:
        _render(built, wide_console())


def _render(built: Any, console: Console) -> None:
    record = built.record
    first, *second = record.ways
    table = Table(
        "plan", "profile", "rows", "new tokens a row", f"fused attention ({first})", *(f"fused attention ({way})" for way in second),
        title=f"{record.flavour} {record.version}, layout {record.layout}, {record.dtype}, capacity {record.capacity}",
        title_justify="left",
    )  # fmt: skip
    for plan in record.plans:
        for p in plan.profiles:
            ways = [_kernels(p.plan_kernels, p.decomposed), *[_kernels(p.log_kernels, p.decomposed) for _ in second]]
            table.add_row(plan.file, p.name, _range(p.batch), _range(p.sequence), *ways)
    console.print(f"{built.path}", soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    console.print(f"GPUs: compute capability {', '.join(record.compute_capabilities)}", highlight=False)
    console.print(
        f"{record.size / 2**20:.1f} MiB, built in {built.build_s:.1f} s, builder's peak {built.peak_mib:,.0f} MiB",
        highlight=False,
    )
    if record.products is not None:
        console.print(f"[{'bold red' if record.unpacked else 'default'}]{record.products}[/].", highlight=False)
    if record.graph is not None:
        console.print(
            f"{record.dtype} graph beside the engine: {record.graph.checks} checks against the fp32 one on ONNX Runtime, none red"
        )
        for note in record.graph.notes:
            console.print(f"Note: {note}", highlight=False, markup=False)
    if record.unfused:
        console.print("[bold red]Built with attention that is NOT fused[/bold red], not executed: no GPU ran it.")
        for profile, layers in record.unfused.items():
            console.print(f"NOT FUSED in {profile}: {', '.join(layers)}", highlight=False, markup=False)
    else:
        console.print(f"Built, {record.attentions} fused attentions proven in each profile, not executed: no GPU ran it.")


def _range(values: tuple[int, int, int]) -> str:
    low, _, high = values
    return str(low) if low == high else f"{low} … {high}"


def _kernels(counts: dict[str, int], decomposed: tuple[str, ...]) -> str:
    fused = [f"{n} × {kernel}" for kernel, n in counts.items()]
    return ", ".join([*fused, f"{len(decomposed)} NOT FUSED"] if decomposed else fused)


class _Bar:
    """The builder's progress as a bar on a terminal, as plain lines elsewhere; always on stderr."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=self.console, transient=True)
        self.task = self.progress.add_task("preparing", total=1.0)
        self.started, self.said, self.tenth = time.perf_counter(), "", -1

    def __enter__(self) -> _Bar:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def note(self, note: str) -> None:
        """A line above the bar."""
        self.console.print(note, highlight=False, markup=False, soft_wrap=True)

    def update(self, phase: str, done: float) -> None:
        """Shows the phase, and the fraction of the engine that is done; off a terminal, a line a tenth."""
        if self.console.is_terminal:
            self.progress.update(self.task, description=phase, completed=done)
        elif int(done * 10) > self.tenth or (not done and phase != self.said):
            self.said, self.tenth = phase, int(done * 10)
            click.echo(f"[{time.perf_counter() - self.started:6.1f} s] {done:4.0%} {phase}", err=True)
