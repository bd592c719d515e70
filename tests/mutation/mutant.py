"""What a mutant is, what a bench measures for it, and the verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

Tag = Literal["gate", "oracle-test"]
Verdict = Literal["caught", "missed", "equivalent"]
Metric = tuple[str, str]  # what was compared, which figure


@dataclass(frozen=True)
class Reading:
    """One metric of one run.

    Attributes:
        value: What came out.
        line: Its gate in words, such as ``<= 0.001``.
        red: Whether it is red.
        distance: Whether it is a largest difference of values, which rounding moves too.
    """

    value: float
    line: str
    red: bool
    distance: bool = False


Readings = dict[Metric, Reading]


@dataclass(frozen=True)
class Mutant:
    """One fault at one site.

    Attributes:
        name: The fault.
        tag: Who must catch it: the product's ``gate``, or, where oracle and product share the fault, the ``oracle-test``.
        bench: Where it is put in; a bench measures all mutants of one kind.
        site: The model, graph or module that it is put into.
        red: The metrics that must go red, each.
        equivalent: Why nothing can see it; its effect is then shown to be under twice the noise, and it counts in no score.
    """

    name: str
    tag: Tag
    bench: str
    site: str
    red: tuple[Metric, ...] = ()
    equivalent: str = ""

    def __post_init__(self) -> None:
        assert bool(self.red) != bool(self.equivalent), f"{self}: name the metrics that go red, or say why none can"

    def __str__(self) -> str:
        return f"{self.site}-{self.name}"

    @property
    def unchanged(self) -> str:
        """What the control is of: mutants of one bench with the same one share it."""
        return self.site

    def misplaces(self, metric: Metric) -> bool:
        """Whether this metric may not be red: a fault must be found where it is."""
        return False


class Bench(Protocol):
    """Measures mutants of one kind."""

    def control(self, mutant: Mutant) -> Readings:
        """The readings of a mutant's site with nothing changed."""

    def measure(self, mutant: Mutant) -> Readings:
        """The readings with the fault put in."""


@dataclass(frozen=True)
class Outcome:
    """A measured mutant.

    Attributes:
        mutant: Which.
        verdict: ``caught``, ``missed`` (a survivor; also an equivalent that is none), or ``equivalent``.
        detail: The named metrics with their values and lines, or effect and noise.
    """

    mutant: Mutant
    verdict: Verdict
    detail: str

    @property
    def survived(self) -> bool:
        """Whether it fails the run."""
        return self.verdict == "missed"


def judge(mutant: Mutant, found: Readings, control: Readings) -> Outcome:
    """The verdict: each named metric is red and none elsewhere; or, for an equivalent one, nothing is red and its effect is
    under twice the noise.

    The effect is the largest distance of the metrics that the fault moved at all; the noise is theirs without the fault.
    """
    moved = {m for m, r in found.items() if r.distance and m in control and r.value != control[m].value}
    effect, noise = (_largest(moved, readings) for readings in (found, control))
    measured = f"effect {effect:.2g}, noise {noise:.2g}" if moved else "no value moved"
    red = {metric for metric, reading in found.items() if reading.red}
    if mutant.equivalent:
        if not red and effect <= 2 * noise:
            return Outcome(mutant, "equivalent", f"{measured}: {mutant.equivalent}")
        return Outcome(mutant, "missed", f"not equivalent: {measured}; red: {_named(red, found)}")
    parts = [_named(set(mutant.red), found)]
    quiet, misplaced = set(mutant.red) - red, {metric for metric in red if mutant.misplaces(metric)}
    if quiet:
        parts.append(f"NOT RED: {_named(quiet, found)} ({measured})")
    if misplaced:
        parts.append(f"RED ELSEWHERE: {_named(misplaced, found)}")
    return Outcome(mutant, "missed" if quiet or misplaced else "caught", "; ".join(parts))


def _largest(metrics: set[Metric], readings: Readings) -> float:
    """The largest value; NaN wins, and of none it is 0."""
    values = [readings[metric].value for metric in metrics]
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def _named(metrics: set[Metric], readings: Readings) -> str:
    """``prefill, ragged batch: max abs 3.2 (<= 0.001)``, and so on."""
    texts = []
    for metric in sorted(metrics):
        reading = readings.get(metric)
        value = "was not measured" if reading is None else f"{reading.value:.3g} ({reading.line})"
        texts.append(f"{': '.join(metric)} {value}")
    return ", ".join(texts) or "nothing"
