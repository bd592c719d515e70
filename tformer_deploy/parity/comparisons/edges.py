"""Prompts that end at the edge of a cache's capacity, through the session that every caller uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.backends.session import Session
from tformer_deploy.parity.comparisons.logits import against_oracle
from tformer_deploy.parity.gates import judge
from tformer_deploy.parity.metrics import max_abs, worse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tformer_deploy.parity.candidate import Candidate
    from tformer_deploy.parity.gates import Check
    from tformer_deploy.parity.plan import EdgeRow


def edges(candidate: Candidate) -> list[Check]:
    """Prompts of capacity - 1, capacity and capacity + 1 tokens, and of one more than a window, and the tokens after them,
    for which the cache may have to grow: against the oracle, and rows of one capacity together against each alone.
    """
    rows = candidate.plan.edges
    alone = [_run(candidate, [row])[0] for row in rows]
    groups = [group for group in _groups(candidate, rows) if len(group) > 1]
    worst = 0.0
    for group in groups:
        together = _run(candidate, [rows[i] for i in group])
        for i, logits in zip(group, together, strict=True):
            worst = worse(worst, max_abs(alone[i][: len(logits)], logits))
    lengths = ", ".join(str(row.prompt) for row in rows)
    checks = [
        judge("bucket edges", "rows compared", len(rows), 1, ">=", f"prompts of {lengths} tokens"),
        *against_oracle(candidate, "bucket edges", candidate.oracle.edges, alone),
    ]
    if groups:
        checks.append(judge("bucket edges, each row alone", "max abs", worst, candidate.gates.step))
    return checks


def _groups(candidate: Candidate, rows: Sequence[EdgeRow]) -> list[list[int]]:
    """Numbers of the rows that start in caches of one capacity."""
    by_capacity: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        by_capacity.setdefault(candidate.backend.capacity_for(row.prompt), []).append(i)
    return list(by_capacity.values())


def _run(candidate: Candidate, rows: Sequence[EdgeRow]) -> list[NDArray[np.float32]]:
    """Logits after each prompt and after each token that all of the rows have room for, [1 + steps, V] a row."""
    session = Session(candidate.backend)
    found = [session.prefill([row.ids[: row.prompt] for row in rows])]
    found += [session.decode([row.ids[row.prompt + step] for row in rows]) for step in range(min(row.steps for row in rows))]
    return list(np.stack(found, axis=1))
