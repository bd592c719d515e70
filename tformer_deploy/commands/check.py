"""``check``: a bundle against the checkpoint that it came from; exit 1 on red."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from tformer_deploy import api
from tformer_deploy.bundle.writer import replace_file

if TYPE_CHECKING:
    from tformer_deploy.parity.plan import Suite


@click.command("check", short_help="Compare a bundle with PyTorch; exit 1 on red.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Path(path_type=Path), default=None, help="What the bundle was made from.")
@click.option("--suite", type=click.Choice(["quick", "full"]), default="quick", show_default=True, help="How much is compared.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with every metric, its gate and verdict.")
@click.option("--report", type=click.Path(path_type=Path), default=None, help="Also write the JSON to this file.")
def command(bundle: Path, checkpoint: Path | None, suite: Suite, as_json: bool, report: Path | None) -> int:
    """Compare BUNDLE with the checkpoint it was made from.

    First every tensor exactly, then values on ONNX Runtime against the PyTorch reference. Without --checkpoint only
    self-consistency can be seen, and the exit code is 1.
    """
    # Read when torch is loaded: its threads then sleep at a barrier instead of spinning, which on busy cores takes 5 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    check_bundle = api.load("tformer_deploy.parity", "export").check_bundle
    found = check_bundle(bundle, checkpoint, suite=suite, on_progress=lambda part: click.echo(f"… {part}", err=True))
    text = json.dumps(found.to_json(), indent=1)
    if report is not None:
        replace_file(report, f"{text}\n".encode())
    if as_json:
        click.echo(text)
    else:
        api.load("tformer_deploy.parity.console", "export").render(found, Console(width=None if Console().is_terminal else 140))
    return 0 if found.passed else 1
