"""Attention in plain Python on nested lists: the equation that every faster form is compared with. No numpy, no torch.

Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Vector = Sequence[float]
    Matrix = Sequence[Vector]


def softmax(scores: Vector) -> list[float]:
    """Probabilities of ``scores`` [m]: positive, summing to one. The maximum is subtracted, so that exp never overflows.

    A score of -inf gets exactly 0.

    Raises:
        ValueError: There is no score, one is nan or +inf, or all are -inf: there is no way to share the probability.
    """
    if not scores:
        raise ValueError("softmax of 0 scores; expected at least 1.")
    if any(math.isnan(score) for score in scores):  # max() would find or miss it by its place
        raise ValueError(f"softmax of {len(scores)} scores, one of them nan; expected numbers.")
    largest = max(scores)
    if not math.isfinite(largest):
        raise ValueError(f"softmax of {len(scores)} scores whose maximum is {largest}; expected a finite one.")
    exponentials = [math.exp(score - largest) for score in scores]
    total = math.fsum(exponentials)
    return [e / total for e in exponentials]


def attention(queries: Matrix, keys: Matrix, values: Matrix, causal: bool = False) -> list[list[float]]:
    """``softmax(queries · keysᵀ / sqrt(d_k)) · values``, a row at a time.

    Args:
        queries: [n][d_k].
        keys: [m][d_k].
        values: [m][d_v].
        causal: Position i sees positions j ≤ i only, both counted from the start.

    Returns:
        [n][d_v]; no rows for no queries.

    Raises:
        ValueError: There is no key, keys and values differ in number, rows are ragged or empty, or widths do not match.
    """
    if not keys:
        raise ValueError(f"attention over 0 keys with {len(queries)} queries; expected at least 1 key.")
    if len(keys) != len(values):
        raise ValueError(f"attention over {len(keys)} keys and {len(values)} values; expected as many values as keys.")
    d_k, d_v = _width("keys", keys), _width("values", values)
    if queries and _width("queries", queries) != d_k:
        raise ValueError(f"queries are {len(queries[0])} wide and keys {d_k}; expected the same width.")
    rows = []
    for i, query in enumerate(queries):
        seen = min(i + 1, len(keys)) if causal else len(keys)
        weights = softmax([_dot(query, key) / math.sqrt(d_k) for key in keys[:seen]])
        rows.append([math.fsum(weights[j] * values[j][c] for j in range(seen)) for c in range(d_v)])
    return rows


def _dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _width(name: str, rows: Matrix) -> int:
    """Numbers in each of ``rows``, which all have as many and at least one."""
    width = len(rows[0])
    if width == 0:
        raise ValueError(f"{name} row 0 has 0 numbers; expected at least 1.")
    for i, row in enumerate(rows):
        if len(row) != width:
            raise ValueError(f"{name} row {i} has {len(row)} numbers and row 0 has {width}; expected the same in every row.")
    return width
