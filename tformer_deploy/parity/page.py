"""A report as one HTML page that needs nothing else: no script, no font, no picture, no network."""

from __future__ import annotations

import math
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING

import jinja2

from tformer_deploy.errors import escaped
from tformer_deploy.parity.charts import charts_of
from tformer_deploy.parity.report import figure

if TYPE_CHECKING:
    from tformer_deploy.parity.profile import RowError
    from tformer_deploy.parity.report import Report

_WORST_ROWS = 8
_IDS_SHOWN = 24


def to_html(report: Report) -> bytes:
    """The page; whatever comes from outside is escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = escaped
    environment.filters["figure"] = figure
    source = files("tformer_deploy.parity").joinpath("page.html").read_text("utf-8")
    verdicts = [c.verdict for c in report.checks]
    page = environment.from_string(source).render(
        report=report,
        groups=[(name, list(checks)) for name, checks in groupby(report.checks, key=lambda c: c.group)],
        red=[c for c in report.checks if c.verdict == "red"],
        counts=[(v, verdicts.count(v)) for v in ("green", "red", "ambiguous", "reported")],
        charts=charts_of(report),
        rows=_worst(report.profile.rows),
        ids_shown=_IDS_SHOWN,
        versions=sorted(report.versions.items()),
    )
    return page.encode("utf-8") + b"\n"


def _worst(rows: list[RowError]) -> list[RowError]:
    """Rows with the largest errors first; one that is not finite is larger than any."""
    return sorted(rows, key=lambda r: -math.inf if math.isnan(r.max_abs) else -r.max_abs)[:_WORST_ROWS]
