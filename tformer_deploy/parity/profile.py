"""Where errors lie: by row, by position and by layer. Figures for a reader; the gates are in the checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.parity.metrics import KL, MAX_ABS, worse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class RowError:
    """One row of the ragged batch in one graph.

    Attributes:
        graph: ``prefill`` or ``decode``.
        row: Its number.
        prompt_tokens: Tokens that were prefilled.
        ids: All its ids, prompt and teacher-forced ones.
        max_abs: Largest difference of a logit.
        position: Where that is.
        mean_kl: Mean over its positions, nats.
    """

    graph: str
    row: int
    prompt_tokens: int
    ids: tuple[int, ...]
    max_abs: float
    position: int
    mean_kl: float


@dataclass(frozen=True)
class PositionError:
    """One position in one graph: how many rows reach it, and the largest difference of a logit there."""

    graph: str
    position: int
    rows: int
    max_abs: float


@dataclass(frozen=True)
class LayerError:
    """One layer's cache after one graph: largest difference of a key and of a value."""

    graph: str
    layer: int
    key: float
    value: float


@dataclass
class Profile:
    """All of them, in the order in which they were measured."""

    rows: list[RowError] = field(default_factory=list)
    positions: list[PositionError] = field(default_factory=list)
    layers: list[LayerError] = field(default_factory=list)

    def add_logits(
        self,
        graph: str,
        tables: Sequence[NDArray[np.float64]],
        starts: Sequence[int],
        rows: Sequence[tuple[int, ...]],
        prompts: Sequence[int],
    ) -> None:
        """Takes one table of :func:`metrics.measure` a row; ``starts`` are the positions of their first lines."""
        at: dict[int, list[float]] = {}
        for i, (table, start) in enumerate(zip(tables, starts, strict=True)):
            if not len(table):
                continue
            errors = table[:, MAX_ABS]
            worst = int(np.isnan(errors).argmax() if np.isnan(errors).any() else errors.argmax())
            kl = float(table[:, KL].mean())
            self.rows.append(RowError(graph, i, prompts[i], rows[i], float(errors[worst]), start + worst, kl))
            for place, error in enumerate(errors):
                at.setdefault(start + place, []).append(float(error))
        for position in sorted(at):
            worst_here = 0.0
            for error in at[position]:
                worst_here = worse(worst_here, error)
            self.positions.append(PositionError(graph, position, len(at[position]), worst_here))
