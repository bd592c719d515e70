"""``check``: a bundle against the checkpoint that it came from; exit 1 on red."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tformer_deploy import api
from tformer_deploy.backends import PROFILES, PROVIDERS, require_consistent
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.verify import REPORTS
from tformer_deploy.bundle.writer import replace_file
from tformer_deploy.commands.console import wide_console
from tformer_deploy.errors import UsageError
from tformer_deploy.parity.console import render
from tformer_deploy.parity.junit import to_junit
from tformer_deploy.parity.page import to_html
from tformer_deploy.parity.report_file import read_report

if TYPE_CHECKING:
    from tformer_deploy.backends.cpu.opening import ProfileName
    from tformer_deploy.backends.providers import ProviderName
    from tformer_deploy.parity.plan import Suite

_DEFAULT = ("onnxruntime", "cpu")
_FILE = click.Path(path_type=Path)


@click.command("check", short_help="Compare a bundle with PyTorch; exit 1 on red.")
@click.argument("bundle", type=_FILE)
@click.option("--checkpoint", type=_FILE, default=None, help="What the bundle was made from.")
@click.option("--suite", type=click.Choice(["quick", "full"]), default=None, help="How much is compared.  [default: quick]")
@click.option("--full", is_flag=True, help="Short for --suite full.")
@click.option("--text", type=_FILE, default=None, help="Also compare perplexity on the beginning of this UTF-8 text.")
@click.option(
    "--profile",
    type=click.Choice(PROFILES),
    default="portable",
    show_default=True,
    help="Whose graphs: the bundle's, or derived for this CPU.",
)
@click.option(
    "--backend",
    type=click.Choice(["onnxruntime", "tensorrt"]),
    default="onnxruntime",
    show_default=True,
    help="What runs; one that cannot run here is an error.",
)
@click.option("--provider", type=click.Choice(list(PROVIDERS)), default="cpu", show_default=True, help="Where ONNX Runtime runs.")
@click.option(
    "--engine", default=None, metavar="NAME", help="Of the bundle's engines (tensorrt); the best that fits where absent."
)
@click.option("--bisect", is_flag=True, help="Name the first layer in which a graph and the reference part.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with every metric, its gate and verdict.")
@click.option("--report", type=_FILE, default=None, help="Also write the JSON to this file.")
@click.option("--junit", type=_FILE, default=None, help="Also write JUnit XML to this file.")
@click.option("--html", type=_FILE, default=None, help="Also write one self-contained page to this file.")
@click.option(
    "--verify-report", type=_FILE, default=None, help="Check nothing; read this report back and require that it is of BUNDLE."
)
def command(
    bundle: Path, checkpoint: Path | None, suite: Suite | None, full: bool, text: Path | None, bisect: bool, profile: ProfileName, backend: str,
    provider: ProviderName, engine: str | None, as_json: bool,
    report: Path | None, junit: Path | None, html: Path | None, verify_report: Path | None,
) -> int:  # fmt: skip
    """Compare BUNDLE with the checkpoint it was made from.

    First every tensor exactly, then values on ONNX Runtime against the PyTorch reference. Without --checkpoint only
    self-consistency can be seen, and the exit code is 1. docs/parity.md says what is compared and describes the reports.
    """
    outputs = {flag: path for flag, path in (("--report", report), ("--junit", junit), ("--html", html)) if path is not None}
    if verify_report is not None:
        if checkpoint or suite or full or text or bisect or as_json or outputs or engine or (backend, provider) != _DEFAULT:
            raise UsageError("--verify-report goes with no other option.", "Give BUNDLE and --verify-report FILE alone.")
        return _verify(bundle, verify_report)
    if full and suite == "quick":
        raise UsageError("--full and --suite quick contradict each other.", "Give one of them.")
    require_consistent(backend, profile, provider, engine)
    _prepare(outputs, bundle, [path for path in (checkpoint, text) if path is not None])
    # Read when torch is loaded: its threads then sleep at a barrier instead of spinning, which on busy cores takes 5 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    found = api.check(
        bundle, checkpoint, suite="full" if full else suite or "quick", text=text, bisect=bisect, profile=profile,
        backend=backend, provider=provider, engine=engine,
        on_progress=lambda part: click.echo(f"… {part}", err=True),
    )  # fmt: skip
    content = json.dumps(found.to_json(), indent=1)
    if report is not None:
        replace_file(report, f"{content}\n".encode())
    if junit is not None:
        replace_file(junit, to_junit(found))
    if html is not None:
        replace_file(html, to_html(found))
    if as_json:
        click.echo(content)
    else:
        render(found, wide_console())
    if not found.passed and not found.complete:
        proven = "Nothing was compared with PyTorch: the bundle was checked against itself alone."
        click.echo(f"Error: {proven} → Give --checkpoint PATH, what the bundle was made from.", err=True)
    return 0 if found.passed else 1


def _verify(bundle: Path, report: Path) -> int:
    found = read_report(report, open_bundle(bundle))
    click.echo(f"{report}: {found['verdict']} ({found['suite']} suite, {found['dtype']} gates, core {found['core_sha256'][:12]})")
    return 0 if found["passed"] else 1


def _prepare(outputs: dict[str, Path], bundle: Path, inputs: list[Path]) -> None:
    """Refuses outputs that would hurt something, and makes their folders, before minutes are spent.

    Raises:
        UsageError: Two are one file, one exists and is no plain file, lies in the bundle's core or in what is read.
    """
    places: dict[Path, str] = {}
    core = Path(os.path.realpath(bundle))
    sources = [Path(os.path.realpath(path)) for path in inputs]
    for flag, path in outputs.items():
        place = Path(os.path.realpath(path.parent)) / path.name
        if place in places:
            raise UsageError(f"{places[place]} and {flag} name the same file {path}.", "Give each a file of its own.")
        places[place] = flag
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise UsageError(f"{flag}: {path} exists and is no plain file.", "Name another path.")
        if core == place or (core in place.parents and core / REPORTS not in place.parents):
            raise UsageError(
                f"{flag}: {path} lies in the core of the bundle.", f"Name a file in {bundle / REPORTS} or elsewhere."
            )
        if any(source == place or source in place.parents for source in sources):
            raise UsageError(f"{flag}: {path} lies in what is read.", "Name another path.")
        path.parent.mkdir(parents=True, exist_ok=True)
