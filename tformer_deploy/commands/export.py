"""``export``: checkpoint → bundle, checked against PyTorch before it appears."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import time
from pathlib import Path

import click

from tformer_deploy import api
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.quantization import BLOCKS, KINDS, WHOLE, Kind, Whole
from tformer_deploy.config import DTYPES, DType


@click.command("export", short_help="Make a bundle from a checkpoint.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The bundle's folder.")
@click.option("--dtype", type=click.Choice(DTYPES), default="fp32", show_default=True, help="dtype of weights and caches.")
@click.option(
    "--quantize",
    type=click.Choice(KINDS),
    default=None,
    help="Store matrices as whole numbers and scales; int8-dynamic also rounds each row of activations to int8 on a CPU.",
)
@click.option(
    "--block",
    type=click.Choice([str(b) for b in BLOCKS]),
    default=None,
    help="Inputs that share a scale.  [default: 128 with --calibration, else 32]",
)
@click.option("--head", type=click.Choice(WHOLE), default=None, help="Of the head alone.  [default: as --quantize]")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    default=None,
    help="A UTF-8 text, or JSONL prompts, that the matrices are rounded for.",
)
@click.option(
    "--max-length", type=click.IntRange(1), default=None, help="Bound on prompt + completion; the checkpoint's where absent."
)
@click.option("--check/--no-check", default=True, show_default=True, help="Compare with PyTorch before the bundle appears.")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    checkpoint: Path, output: Path, dtype: DType, quantize: Kind | None, block: str | None, head: Whole | None,
    calibration: Path | None, max_length: int | None, check: bool, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Make a bundle from CHECKPOINT: a Hugging Face folder, one of our own, or a GGUF file."""
    started = time.perf_counter()
    # Read when torch is loaded: its threads then sleep at a barrier instead of spinning, which on busy cores takes 5 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def say(part: str) -> None:
        click.echo(f"[{time.perf_counter() - started:6.1f} s] {part}", err=True)

    path = api.export(
        checkpoint, output, dtype=dtype, quantize=quantize, block=None if block is None else int(block), head=head,
        calibration=calibration, max_length=max_length, check=check, force=force, on_progress=say,
        on_warning=lambda text: click.echo(f"Warning: {text}", err=True),
    )  # fmt: skip
    say("done")
    bundle = open_bundle(path)
    files = {name: record.size for name, record in sorted(bundle.manifest.files.items())}
    if as_json:
        stored = bundle.manifest.quantization
        result = {"path": str(path), "core_sha256": bundle.core_sha256, "checked": check, "dtype": dtype, "files": files}
        result["quantization"] = None if stored is None else dataclasses.asdict(stored)
        click.echo(json.dumps(result, sort_keys=True))
        return
    click.echo(f"{path}  core {bundle.core_sha256[:12]}, {sum(files.values()) / 2**20:.1f} MiB")
    for name, size in files.items():
        click.echo(f"  {size:>14,}  {name}")
    if bundle.manifest.quantization is not None:
        click.echo(bundle.manifest.quantization.sentence)
    click.echo("Checked against PyTorch: quick suite green." if check else "Not checked against PyTorch.")
    place = shlex.quote(str(path))
    if not check:
        click.echo(f"Next: tformer-deploy check {place} --checkpoint {shlex.quote(str(checkpoint))}")
    elif "tokenizer.json" in files:
        click.echo(f'Next: tformer-deploy generate {place} "Once upon a time"')
    else:
        click.echo(f"""Next: echo '{{"input_ids": [1, 2, 3]}}' | tformer-deploy run {place} - -o -""")
