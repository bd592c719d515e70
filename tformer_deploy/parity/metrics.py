"""Distances between logits, in float64. No value, or a value that is not finite, is never a good one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class LogitMetrics:
    """How far ``found`` logits are from ``wanted`` ones, over all positions.

    Attributes:
        positions: Positions compared.
        max_abs: Largest absolute difference.
        rel_l2_p95: 95th percentile over positions of |found - wanted| / |wanted|.
        cosine_p5: 5th percentile over positions of the cosine.
        mean_kl: Mean over positions of KL(wanted ‖ found), nats.
        top1_agreement: Share of same argmax where the reference's margin reaches the gate's; NaN where none does.
        top1_positions: Positions with that margin.
    """

    positions: int
    max_abs: float
    rel_l2_p95: float
    cosine_p5: float
    mean_kl: float
    top1_agreement: float
    top1_positions: int


# Columns of a table of :func:`measure`.
MAX_ABS, RELATIVE, COSINE, KL, SAME_BEST, MARGIN = range(6)


def compare_logits(wanted: Sequence[NDArray[np.float32]], found: Sequence[NDArray[np.float32]], margin: float) -> LogitMetrics:
    """Compares pairs of [N_i, V] arrays position by position.

    Args:
        wanted: The reference's logits.
        found: The candidate's, of the same shapes.
        margin: Distance of the reference's two best logits from which the argmax must agree.
    """
    return summarise([measure(want, have) for want, have in zip(wanted, found, strict=True)], margin)


def measure(want: NDArray[np.float32], have: NDArray[np.float32]) -> NDArray[np.float64]:
    """Figures of each position of two [N, V] arrays: [N, 6], the columns named above; NaN where a logit is not finite."""
    assert want.shape == have.shape, (want.shape, have.shape)
    return np.array([_position(w, h) for w, h in zip(want, have, strict=True)], dtype=np.float64).reshape(-1, 6)


def summarise(tables: Sequence[NDArray[np.float64]], margin: float) -> LogitMetrics:
    """The metrics over all positions of some tables."""
    table = np.concatenate([np.empty((0, 6)), *tables])
    if not len(table):
        nan = float("nan")
        return LogitMetrics(0, nan, nan, nan, nan, nan, 0)
    with np.errstate(invalid="ignore"):
        clear = table[:, MARGIN] >= margin
        return LogitMetrics(
            positions=len(table),
            max_abs=float(table[:, MAX_ABS].max()),
            rel_l2_p95=float(np.percentile(table[:, RELATIVE], 95)),
            cosine_p5=float(np.percentile(table[:, COSINE], 5)),
            mean_kl=float(table[:, KL].mean()),
            top1_agreement=float(table[clear, SAME_BEST].mean()) if clear.any() else float("nan"),
            top1_positions=int(clear.sum()),
        )


def _position(want: NDArray[np.float32], have: NDArray[np.float32]) -> NDArray[np.float64]:
    """max_abs, rel_l2, cosine, kl, same argmax, reference margin of one position [V]."""
    w, h = want.astype(np.float64), have.astype(np.float64)
    if not (np.isfinite(w).all() and np.isfinite(h).all()):
        return np.full(6, np.nan)
    difference = h - w
    norm_w, norm_h = np.linalg.norm(w), np.linalg.norm(h)
    # All-zero logits have no direction: only equal ones are alike.
    relative = np.linalg.norm(difference) / norm_w if norm_w else float(np.abs(difference).max() > 0)
    cosine = w @ h / (norm_w * norm_h) if norm_w and norm_h else float(norm_w == norm_h)
    log_w, log_h = _log_softmax(w), _log_softmax(h)
    kl = float((np.exp(log_w) * (log_w - log_h)).sum())
    best = int(w.argmax())
    margin = w[best] - np.delete(w, best).max() if len(w) > 1 else np.inf
    return np.array([np.abs(difference).max(), relative, cosine, max(kl, 0.0), best == h.argmax(), margin])


def _log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = x - x.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def max_abs(wanted: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """Largest absolute difference; NaN when there is nothing to compare or something is not finite."""
    if not wanted.size or wanted.shape != found.shape:
        return float("nan")
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, as it should be
        difference = np.abs(wanted.astype(np.float64) - found.astype(np.float64)).max()
    return float(difference) if np.isfinite(difference) else float("nan")


def negative_log_likelihood(logits: NDArray[np.float32], ids: Sequence[int]) -> NDArray[np.float64]:
    """-log of the probability that each row of [N, V] gives to the id that came, [N] nats; NaN where a logit is not finite."""
    with np.errstate(invalid="ignore"):
        return np.array([-_log_softmax(row.astype(np.float64))[i] for row, i in zip(logits, ids, strict=True)], dtype=np.float64)


def worse(a: float, b: float) -> float:
    """The larger one; NaN wins, because Python's max may lose it."""
    return float("nan") if np.isnan(a) or np.isnan(b) else max(a, b)


def margin_of(logits: NDArray[np.float32]) -> float:
    """Distance between the two largest logits of [V]."""
    if len(logits) < 2:
        return float("inf")
    second, first = np.partition(logits.astype(np.float64), -2)[-2:]
    return float(first - second)
