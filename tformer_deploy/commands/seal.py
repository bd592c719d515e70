"""``seal``: re-hash a bundle that was edited on purpose."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path

import click

from tformer_deploy import api
from tformer_deploy.bundle.seal import seal
from tformer_deploy.errors import escaped


@click.command("seal", short_help="Re-hash a bundle that was edited on purpose.")
@click.argument("bundle", type=click.Path(path_type=Path))
def command(bundle: Path) -> None:
    """Write a manifest with the hashes of BUNDLE's files as they are now.

    Whether the edited bundle still computes what the checkpoint does is for `check` to say.
    """
    sealed, changed = seal(bundle)
    click.echo(f"{bundle}  core {sealed.core_sha256[:12]}")
    click.echo(f"Changed: {', '.join(changed)}" if changed else "Nothing had changed.")
    if changed and importlib.util.find_spec("onnx_ir") is not None:
        for fault in api.load("tformer_deploy.exporters.onnx.lint", "export").bundle_faults(sealed):
            click.echo(f"Warning: {fault}", err=True)
    if changed:
        name = sealed.manifest.source.name
        click.echo(f"Next: tformer-deploy check {shlex.quote(str(bundle))} --checkpoint PATH, where PATH is {escaped(name)}'s;")
        click.echo("engines of the old core must be built again.")
