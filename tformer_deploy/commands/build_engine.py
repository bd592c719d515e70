"""``build-engine``: bundle → TensorRT engine beside its core."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tformer_deploy import api
from tformer_deploy.config import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tformer_deploy.bundle.engines import EngineRecord
    from tformer_deploy.config import DType


@click.command("build-engine", short_help="Compile a bundle with TensorRT; fused attention is proven.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--flavour", type=click.Choice(["auto", "rtx", "tensorrt"]), default="auto", show_default=True)
@click.option("--layout", type=click.Choice(["shared"]), default="shared", show_default=True, help="shared: one plan for both phases.")
@click.option("--dtype", type=click.Choice(DTYPES), default=None, help="The bundle's where absent; another one is derived and checked first.")
@click.option("--capacity", type=click.IntRange(2), default=None, help="Cache slots of a row; max_length, at most 4096, where absent.")
@click.option("--max-batch", type=click.IntRange(1, 4096), default=8, show_default=True, help="Rows at most.")
@click.option("--prompt-bucket", "buckets", type=click.IntRange(2), multiple=True, help="Largest prompt of a prefill profile; repeatable.")
@click.option("--target", "targets", multiple=True, help="Compute capability, for instance 8.9 (rtx only); repeatable.")
@click.option("--force", is_flag=True, help="Replace an engine of the same name.")
@click.option("--json", "as_json", is_flag=True, help="Print the engine's record as one JSON object.")
def command(
    bundle: Path, flavour: str, layout: str, dtype: DType | None, capacity: int | None, max_batch: int, buckets: tuple[int, ...],
    targets: tuple[str, ...], force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Compile BUNDLE: a decode profile for one new token a row, and a prefill profile for each prompt bucket.

    The engine is kept only when every attention of every profile became a fused kernel.
    """
    with _Bar() as bar:
        record: EngineRecord = api.build_engine(
            bundle, flavour=flavour, layout=layout, dtype=dtype, capacity=capacity, max_batch=max_batch, prompt_buckets=buckets,
            targets=targets, force=force, on_progress=bar,
        )  # fmt: skip
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(record), sort_keys=True))
        return
    click.echo(f"{bundle / 'engines' / record.folder / record.file}")
    click.echo(f"  {record.flavour} {record.version}, {', '.join(record.targets)}: {record.dtype}, capacity {record.capacity}, "
               f"up to {record.max_batch} rows, {record.size / 2**20:.1f} MiB")  # fmt: skip
    for profile in record.profiles:
        kernels = ", ".join(f"{n} × {kernel}" for kernel, n in profile.plan_kernels.items())
        low, _, high = profile.sequence
        click.echo(f"  {profile.name}: S {low}…{high}, {record.attentions} attentions fused: {kernels}")
    click.echo(f"Status: {record.status}")


class _Bar:
    """The builder's phases as a bar on a terminal, as plain lines elsewhere; always on stderr."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), console=self.console
        )  # fmt: skip
        self.tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Callable[[str, int, int], None]:
        if self.console.is_terminal:
            self.progress.start()
        return self.update

    def __exit__(self, *exc: object) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def update(self, phase: str, step: int, of: int) -> None:
        if not self.console.is_terminal:
            if phase not in self.tasks:
                self.tasks[phase] = TaskID(len(self.tasks))
                click.echo(f"… {phase}", err=True)
            return
        if phase not in self.tasks:
            self.tasks[phase] = self.progress.add_task(phase, total=of or None)
        self.progress.update(self.tasks[phase], completed=step)
