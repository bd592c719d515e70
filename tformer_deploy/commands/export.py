"""``export``: checkpoint → bundle, checked against PyTorch before it appears."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path

import click

from tformer_deploy import api
from tformer_deploy.bundle import open_bundle
from tformer_deploy.config import DTYPES, DType


@click.command("export", short_help="Make a bundle from a checkpoint.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The bundle's folder.")
@click.option("--dtype", type=click.Choice(DTYPES), default="fp32", show_default=True, help="dtype of weights and caches.")
@click.option(
    "--max-length", type=click.IntRange(1), default=None, help="Bound on prompt + completion; the checkpoint's where absent."
)
@click.option("--check/--no-check", default=True, show_default=True, help="Compare with PyTorch before the bundle appears.")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    checkpoint: Path, output: Path, dtype: DType, max_length: int | None, check: bool, force: bool, as_json: bool
) -> None:
    """Make a bundle from CHECKPOINT: a Hugging Face folder, one of our own, or a GGUF file."""
    started = time.perf_counter()

    def say(part: str) -> None:
        click.echo(f"[{time.perf_counter() - started:6.1f} s] {part}", err=True)

    path = api.export(
        checkpoint, output, dtype=dtype, max_length=max_length, check=check, force=force, on_progress=say,
        on_warning=lambda text: click.echo(f"Warning: {text}", err=True),
    )  # fmt: skip
    say("done")
    bundle = open_bundle(path)
    files = {name: record.size for name, record in sorted(bundle.manifest.files.items())}
    if as_json:
        result = {"path": str(path), "core_sha256": bundle.core_sha256, "checked": check, "dtype": dtype, "files": files}
        click.echo(json.dumps(result, sort_keys=True))
        return
    click.echo(f"{path}  core {bundle.core_sha256[:12]}, {sum(files.values()) / 2**20:.1f} MiB")
    for name, size in files.items():
        click.echo(f"  {size:>14,}  {name}")
    click.echo("Checked against PyTorch: quick suite green." if check else "Not checked against PyTorch.")
    verb = "generate" if check else "check"
    rest = '"Once upon a time"' if check else f"--checkpoint {shlex.quote(str(checkpoint))}"
    click.echo(f"Next: tformer-deploy {verb} {shlex.quote(str(path))} {rest}")
