"""What a check found: for a reader, and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from tformer_deploy.parity.gates import Check

SCHEMA = 1
_COLOURS = {"green": "green", "red": "bold red", "ambiguous": "yellow", "reported": "dim"}


@dataclass(frozen=True)
class Report:
    """A check of one bundle.

    Attributes:
        bundle: Its path as given.
        core_sha256: Which bundle it was.
        dtype: The gates that apply.
        suite: ``quick`` or ``full``.
        against: What it was compared with.
        checks: Every metric with its gate and verdict.
        notes: What a reader must know, for instance which graph really ran.
        complete: False without a checkpoint: self-consistent is not proven.
        peak_mib: Peak memory of the process that checked.
    """

    bundle: str
    core_sha256: str
    dtype: str
    suite: str
    against: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    complete: bool
    peak_mib: float

    @property
    def passed(self) -> bool:
        """True when something was compared with a checkpoint and nothing is red."""
        return self.complete and bool(self.checks) and all(c.verdict != "red" for c in self.checks)

    @property
    def verdict(self) -> str:
        """``green``, ``red``, or ``self-consistent only`` where there was no checkpoint to compare with."""
        if self.passed:
            return "green"
        red = not self.checks or any(c.verdict == "red" for c in self.checks)
        return "red" if red else "self-consistent only"

    def to_json(self) -> dict[str, Any]:
        """Every metric with its gate and verdict; a value that is not finite is null."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "passed": self.passed,
            "bundle": self.bundle,
            "core_sha256": self.core_sha256,
            "dtype": self.dtype,
            "suite": self.suite,
            "against": self.against,
            "notes": list(self.notes),
            "peak_mib": round(self.peak_mib, 1),
            "checks": [
                {
                    "group": c.group,
                    "metric": c.metric,
                    "value": _finite(c.value),
                    "gate": _finite(c.gate),
                    "relation": c.relation,
                    "verdict": c.verdict,
                    "detail": c.detail,
                }
                for c in self.checks
            ],
        }

    def render(self, console: Console) -> None:
        """A table with the verdict under it."""
        table = Table("compared", "metric", "value", "gate", "verdict", "", title=f"{self.bundle} against {self.against}")
        group = None
        for c in self.checks:
            if group not in (None, c.group):
                table.add_section()
            gate = "" if c.gate is None else f"{c.relation} {c.gate:g}"
            first = c.group if c.group != group else ""
            verdict, detail = f"[{_COLOURS[c.verdict]}]{c.verdict}[/]", c.detail.replace("[", r"\[")
            table.add_row(first, c.metric, f"{c.value:.3g}", gate, verdict, detail)
            group = c.group
        console.print(table)
        for note in self.notes:
            console.print(f"Note: {note}", highlight=False, markup=False)
        colour = "green" if self.passed else "bold red"
        against = f"{self.suite} suite, {self.dtype} gates, core {self.core_sha256[:12]}"
        console.print(f"Verdict: [{colour}]{self.verdict}[/] ({against})")


def _finite(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None
