"""What a check found."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tformer_deploy.parity.profile import Profile

if TYPE_CHECKING:
    from tformer_deploy.parity.bisection import Bisection, Run
    from tformer_deploy.parity.gates import Check

SCHEMA = 2
HASH = "content_sha256"


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
        seconds: What it took.
        versions: Of the packages that took part, by name.
        profile: Errors by row, position and layer.
        bisection: Where graph and reference part; None where nobody asked.
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
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    profile: Profile = field(default_factory=Profile)
    bisection: Bisection | None = None

    @property
    def passed(self) -> bool:
        """True when something was compared with a checkpoint and nothing is red."""
        return self.complete and bool(self.checks) and all(c.verdict != "red" for c in self.checks)

    @property
    def verdict(self) -> str:
        """``green``, ``red``, or ``self-consistent only`` where there was no checkpoint to compare with."""
        return verdict_of([c.verdict for c in self.checks], self.complete)

    def to_json(self) -> dict[str, Any]:
        """As docs/parity.md describes it; a number that is not finite is null."""
        body = {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "passed": self.passed,
            "bundle": self.bundle,
            "core_sha256": self.core_sha256,
            "dtype": self.dtype,
            "suite": self.suite,
            "against": self.against,
            "complete": self.complete,
            "notes": list(self.notes),
            "peak_mib": round(self.peak_mib, 1),
            "seconds": round(self.seconds, 1),
            "versions": self.versions,
            "checks": [asdict(c) for c in self.checks],
            "rows": [asdict(r) for r in self.profile.rows],
            "positions": [asdict(p) for p in self.profile.positions],
            "layers": [asdict(x) for x in self.profile.layers],
            "bisection": None if self.bisection is None else [_run(run) for run in self.bisection.runs],
        }
        writable = _writable(body)
        return {**writable, HASH: content_hash(writable)}


def figure(value: float) -> str:
    """A number for a reader: a count as it is, anything else with three digits; a share just below 1 is not shown as 1."""
    if float(value).is_integer() and abs(value) < 1e9:
        return str(int(value))
    short = f"{value:.3g}"
    return f"{value:.7g}" if short == "1" else short


def verdict_of(verdicts: list[str], complete: bool) -> str:
    """The verdict of a report whose checks have these."""
    if not verdicts or "red" in verdicts:
        return "red"
    return "green" if complete else "self-consistent only"


def content_hash(body: dict[str, Any]) -> str:
    """sha256 over a report without the hash itself, however it is spaced, ordered, or its numbers are spelled."""
    text = json.dumps(_plain({k: v for k, v in body.items() if k != HASH}), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _run(run: Run) -> dict[str, Any]:
    parts = None
    if run.first is not None:
        parts = {"place": run.place, "layer": run.first.layer, "half": run.first.half, "exact": run.exact}
    stations = [{"name": s.name, "layer": s.layer, "error": s.error, "line": s.line} for s in run.stations]
    return {"run": run.name, "parts": parts, "missing": list(run.missing), "failure": run.failure, "stations": stations}


def _writable(value: Any) -> Any:
    """JSON has no NaN and no infinity, and UTF-8 no lone surrogate, which stands for a byte of a path that is no text."""
    if isinstance(value, dict):
        return {k: _writable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_writable(v) for v in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    """1.0 is 1."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
