"""A report as a table for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from tformer_deploy.errors import escaped
from tformer_deploy.parity.report import figure

if TYPE_CHECKING:
    from rich.console import Console

    from tformer_deploy.parity.report import Report

_COLOURS = {"green": "green", "red": "bold red", "ambiguous": "yellow", "reported": "dim"}


def render(report: Report, console: Console) -> None:
    """A table with the verdict under it; what comes from outside is shown as text, never obeyed."""
    title = Text(escaped(f"{report.bundle} against {report.against}"))
    table = Table("compared", "metric", "value", "gate", "verdict", "", title=title)
    group = None
    for c in report.checks:
        if group not in (None, c.group):
            table.add_section()
        gate = "" if c.gate is None else f"{c.relation} {c.gate:g}"
        first = c.group if c.group != group else ""
        verdict = Text(c.verdict, _COLOURS[c.verdict])
        table.add_row(first, c.metric, figure(c.value), gate, verdict, Text(escaped(c.detail)))
        group = c.group
    console.print(table)
    for note in report.notes:
        console.print(f"Note: {escaped(note)}", highlight=False, markup=False)
    colour = "green" if report.passed else "bold red"
    against = f"{report.suite} suite, {report.dtype} gates, core {report.core_sha256[:12]}"
    console.print(Text.assemble("Verdict: ", (report.verdict, colour), f" ({against})"))
