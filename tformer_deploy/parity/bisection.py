"""Where a graph and the reference part: what ``check --bisect`` found."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tformer_deploy.bundle.signature import LOGITS

# What it caches, its attention's output, its own output.
STATIONS_A_LAYER = 3


@dataclass(frozen=True)
class Station:
    """One place, in the order of the computation.

    Attributes:
        order: Its number among all stations of the model; a graph may have lost some.
        name: For a reader.
        value: Name of the value in the graph (the key's, where it is both key and value).
        layer: Its layer; None before the first and after the last one.
        half: ``attention`` or ``feed-forward``: what has gone wrong when the station before it is right; None outside.
        error: Largest distance over positions, relative to the reference's size; NaN where a value is not finite.
        line: Above this the two have parted.
    """

    order: int
    name: str
    value: str
    layer: int | None
    half: str | None
    error: float
    line: float

    @property
    def parted(self) -> bool:
        """Whether it is wrong."""
        return not self.error <= self.line


@dataclass(frozen=True)
class Run:
    """One run of one graph.

    Attributes:
        name: ``prefill``, ``decode, one token`` or ``decode, several tokens``.
        stations: Those that the graph has.
        missing: Names of the values that it has lost.
        failure: Why it did not run; empty where it did.
    """

    name: str
    stations: tuple[Station, ...]
    missing: tuple[str, ...] = ()
    failure: str = ""

    @property
    def first(self) -> Station | None:
        """The first station that has parted."""
        return next((s for s in self.stations if s.parted), None)

    @property
    def before(self) -> Station | None:
        """The last station before the first that has parted."""
        index = next((i for i, s in enumerate(self.stations) if s.parted), 0)
        return self.stations[index - 1] if index else None

    @property
    def exact(self) -> bool:
        """Whether nothing lies between those two that was not looked at."""
        return self.first is not None and self.first.order == (0 if self.before is None else self.before.order + 1)

    @property
    def place(self) -> str:
        """The layer and its half, or between what the fault must lie; empty where nothing parted."""
        first, before = self.first, self.before
        if first is None:
            return ""
        if not self.exact:
            return f"what lies between {'the ids' if before is None else before.name} and {first.name}"
        if first.layer is None:
            return "the embedding, before layer 0" if before is None else "the final norm or the head"
        return f"layer {first.layer}, {first.half} half"

    def sentence(self) -> str:
        """What a reader is told."""
        if self.failure:
            return f"Bisect, {self.name}: the graph did not run: {self.failure}"
        lost = ""
        if self.missing:
            lost = f" The graph has lost {len(self.missing)} of the names that export gives ({self.missing[0]} first)"
            lost += "; only the caches are left to look at." if self.only_caches else "; the others were looked at."
        if self.first is None:
            return f"Bisect, {self.name}: graph and reference agree everywhere.{lost}"
        so_far = "" if self.before is None else f"; up to {self.before.name} they agree"
        size = f"relative error {self.first.error:.2g}, line {self.first.line:.2g}"
        if math.isnan(self.first.error):
            size = "not finite, or of another shape"
        return f"Bisect, {self.name}: graph and reference part in {self.place}: {self.first.name} ({size}){so_far}.{lost}"

    @property
    def only_caches(self) -> bool:
        """Whether every name inside the blocks is lost."""
        return all(s.value.startswith("present.") or s.value == LOGITS for s in self.stations)


@dataclass(frozen=True)
class Bisection:
    """All runs."""

    runs: tuple[Run, ...]

    def sentences(self, red: bool) -> list[str]:
        """Notes for the report; ``red``: whether a check of values is."""
        found = [run.sentence() for run in self.runs]
        if red and not any(run.first or run.failure for run in self.runs):
            found.append(
                "Bisect: a check is red, but no value inside a graph differs in these runs. The fault shows only in other shapes, "
                "or in what the runtime fuses: a value that is looked at is not fused away."
            )
        return found
