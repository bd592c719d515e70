"""Errors as line charts on a logarithmic axis: coordinates for the page's SVG, no drawing of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tformer_deploy.parity.bisection import STATIONS_A_LAYER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tformer_deploy.parity.report import Report

WIDTH, HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 44
_MAX_DECADES, _MAX_X_TICKS = 14, 12


@dataclass(frozen=True)
class Dot:
    """One value: where it is drawn, and what a reader sees when pointing at it."""

    x: float
    y: float
    title: str
    bad: bool


@dataclass(frozen=True)
class Line:
    """One series. ``style`` is a class of the page: s0 … s3, ``dashed`` or ``limit`` after it."""

    name: str
    style: str
    path: str
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Everything that is drawn, in pixels."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM
    width: int = WIDTH
    height: int = HEIGHT


@dataclass(frozen=True)
class Series:
    """What a line shows: its name, style, places, values (NaN: not finite) and the name of each place."""

    name: str
    style: str
    x: Sequence[float]
    y: Sequence[float]
    places: Sequence[str]


def charts_of(report: Report) -> list[Chart]:
    """The charts that a report has figures for."""
    found = [by_position(report), by_layer(report), *along_the_model(report)]
    return [chart for chart in found if chart is not None]


def by_position(report: Report) -> Chart | None:
    """Largest error of a logit at each position, both graphs, with the gate."""
    series = []
    for i, graph in enumerate(("prefill", "decode")):
        errors = [p for p in report.profile.positions if p.graph == graph]
        places = [f"{graph}, position {p.position}, {p.rows} rows" for p in errors]
        series.append(Series(graph, f"s{i}", [p.position for p in errors], [p.max_abs for p in errors], places))
    gate = next((c.gate for c in report.checks if c.metric == "max abs" and c.group.startswith("prefill, ragged")), None)
    return draw("Error by position", "position in the row", "largest |Δ logit|", series, gate)


def by_layer(report: Report) -> Chart | None:
    """Largest error of a cached key and value in each layer, with the gate."""
    series = []
    for graph, dashed in (("prefill", ""), ("decode", " dashed")):
        errors = [x for x in report.profile.layers if x.graph == graph]
        layers = [x.layer for x in errors]
        for i, kind in enumerate(("key", "value")):
            values = [x.key if kind == "key" else x.value for x in errors]
            places = [f"{kind}s after {graph}, layer {x.layer}" for x in errors]
            series.append(Series(f"{kind}s, {graph}", f"s{i}{dashed}", layers, values, places))
    gate = next((c.gate for c in report.checks if c.group == "prefill caches" and c.metric.startswith("max abs")), None)
    return draw("Error by layer: what the caches hold", "layer", "largest error", series, gate)


def along_the_model(report: Report) -> list[Chart | None]:
    """Relative error at every station of a bisection, one chart a run, with the line of each station."""
    charts = []
    for run in () if report.bisection is None else report.bisection.runs:
        at = [(s.order - 1) / STATIONS_A_LAYER for s in run.stations]  # so that a layer's number is where it begins
        names = [s.name for s in run.stations]
        series = [
            Series("graph against reference", "s0", at, [s.error for s in run.stations], names),
            Series("has parted above", "limit", at, [s.line for s in run.stations], names),
        ]
        charts.append(
            draw(f"Bisect: {run.name}", "layer: what it caches, its attention, its output", "relative error", series, None)
        )
    return charts


def draw(title: str, x_label: str, y_label: str, series: Sequence[Series], gate: float | None) -> Chart | None:
    """A chart; None where there is nothing to show."""
    shown = [s for s in series if len(s.x)]
    if not shown:
        return None
    values = [v for s in shown for v in s.y if math.isfinite(v) and v > 0]
    low, high = _decades([*values, *([gate] if gate else [])])
    first, last = min(min(s.x) for s in shown), max(max(s.x) for s in shown)

    def across(x: float) -> float:
        share = (x - first) / (last - first) if last > first else 0.5
        return round(_LEFT + share * (WIDTH - _RIGHT - _LEFT), 1)

    def down(y: float) -> float:
        """0 and less lie on the floor, what is not finite at the top."""
        if not math.isfinite(y):
            return float(_TOP)
        exponent = math.log10(y) if y > 0 else low
        share = (min(max(exponent, low), high) - low) / (high - low)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _BOTTOM - _TOP), 1)

    lines = [_line(s, across, down) for s in shown]
    if gate:
        y = down(gate)
        ends = f"M{_LEFT},{y}L{WIDTH - _RIGHT},{y}"
        lines.append(Line(f"gate {gate:g}", "limit", ends, ()))
    step = max(1, math.ceil((high - low) / 7))
    y_ticks = tuple(Tick(down(10.0**e), f"1e{e}") for e in range(low, high + 1, step))
    return Chart(title, x_label, y_label, tuple(lines), _x_ticks(first, last, across), y_ticks)


def _line(series: Series, across: _Scale, down: _Scale) -> Line:
    points = [(across(x), down(y)) for x, y in zip(series.x, series.y, strict=True)]
    # No line is drawn over places that nobody measured.
    breaks = [i == 0 or series.x[i] - series.x[i - 1] > 1 for i in range(len(points))]
    path = "".join(f"{'M' if new else 'L'}{x},{y}" for new, (x, y) in zip(breaks, points, strict=True))
    if series.style == "limit":
        return Line(series.name, series.style, path, ())
    dots = tuple(
        Dot(x, y, f"{place}: {value:.3g}", not math.isfinite(value))
        for (x, y), value, place in zip(points, series.y, series.places, strict=True)
    )
    return Line(series.name, series.style, path, dots)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Exponents between which all values lie; the smallest ones are cut off where there are too many decades."""
    if not values:
        return -8, 0
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    return max(low, high - _MAX_DECADES), high


def _x_ticks(first: float, last: float, across: _Scale) -> tuple[Tick, ...]:
    """Whole numbers, not too many."""
    span = int(last - first)
    step = next(s for k in range(12) for s in (10**k, 2 * 10**k, 5 * 10**k) if span // s < _MAX_X_TICKS)
    start = math.ceil(first / step) * step
    return tuple(Tick(across(x), str(x)) for x in range(start, int(last) + 1, step))


if TYPE_CHECKING:
    from collections.abc import Callable

    _Scale = Callable[[float], float]
