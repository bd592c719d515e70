"""Figures of the runs, and tables of them: each peer's median, and how many times as good ours is."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Metric:
    """A column: ``speed`` is better when higher, the others when lower; ``case`` says whose runs it is read from."""

    name: str
    unit: str
    case: str
    speed: bool


def value(metric: Metric, answer: dict[str, Any], batch: int, length: int) -> float | None:
    """The metric of one answer."""
    if metric.unit == "MiB":
        memory = answer["memory"]["pss_mib"]
        return None if memory is None else float(memory)
    if metric.unit == "s":
        return float(answer["cold_s"])
    if metric.name.startswith("prefill"):
        return batch * length / float(answer["first_s"])
    return float(batch * len(answer["steps_s"]) / sum(answer["steps_s"]))


def ratio(metric: Metric, ours: list[float], theirs: list[float]) -> float:
    """How many times as good ours is: medians over rounds that ran in turn."""
    a, b = statistics.median(ours), statistics.median(theirs)
    return a / b if metric.speed else b / a


def agreement(tokens: list[list[int]], reference: list[list[int]]) -> float:
    """Share of greedy tokens that equal the reference's up to the first that does not, over all rows."""
    same = 0
    for mine, other in zip(tokens, reference, strict=True):
        for a, b in zip(mine, other, strict=True):
            if a != b:
                break
            same += 1
    return same / sum(map(len, reference))


def print_tables(group: dict[str, Any], metrics: list[Metric], title: str) -> None:
    """One table of a precision: a line an entry, a column a metric, ``median (ours / theirs)``.

    Args:
        group: ``entries``: name → metric's name → values by round; ``ours``: name of the entry that others are compared with;
            ``unmet``: name → why; ``agreement``: name → share or None, with ``agreement_with``.
        metrics: The columns.
        title: Above it.
    """
    table = Table("", *(f"{m.name}\n{m.unit}" for m in metrics), "same\ntokens", title=title)
    ours = group["entries"].get(group["ours"], {})
    for name, values in group["entries"].items():
        cells = []
        for metric in metrics:
            found, mine = values.get(metric.name), ours.get(metric.name)
            text = "unmet" if not found else f"{statistics.median(found):.4g}"
            if found and mine and name != group["ours"]:
                text += f" ({ratio(metric, mine, found):.2f}×)"
            cells.append(text)
        share = group["agreement"].get(name)
        table.add_row(name, *cells, "–" if share is None else f"{share:.0%}")
    for name in group["unmet"]:
        if name not in group["entries"]:
            table.add_row(name, *("unmet" for _ in metrics), "–")
    best = []
    for metric in metrics:
        ratios = [
            ratio(metric, ours[metric.name], values[metric.name])
            for name, values in group["entries"].items()
            if not name.startswith("ours") and values.get(metric.name) and ours.get(metric.name)
        ]
        best.append(f"{min(ratios):.2f}×" if ratios else "unmet")
    table.add_row(f"{group['ours']} / best peer", *best, "", style="bold")
    console = Console(width=max(Console().width, 40 + 17 * len(metrics)))
    console.print(table)
    if group["agreement_with"]:
        console.print(f"same tokens: share of greedy tokens before the first that differs from {group['agreement_with']}'s.")
    for name, why in group["unmet"].items():
        console.print(f"unmet: {name}: {why}", highlight=False, markup=False)
