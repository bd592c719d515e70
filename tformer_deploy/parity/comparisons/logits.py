"""The gates on logits and on caches, which many comparisons share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.parity.gates import Check, Gates, judge
from tformer_deploy.parity.metrics import LogitMetrics, compare_logits, max_abs, worse
from tformer_deploy.parity.profile import LayerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tformer_deploy.backends.base import KVCache
    from tformer_deploy.parity.candidate import Candidate


def logit_checks(group: str, metrics: LogitMetrics, gates: Gates) -> list[Check]:
    """The five gates on logits."""
    where = f"{metrics.positions} positions"
    checks = [
        judge(group, "max abs", metrics.max_abs, gates.max_abs, detail=where),
        judge(group, "relative L2, p95", metrics.rel_l2_p95, gates.rel_l2_p95),
        judge(group, "cosine, p5", metrics.cosine_p5, gates.cosine_p5, ">="),
        judge(group, "mean KL", metrics.mean_kl, gates.mean_kl),
    ]
    if metrics.positions and not metrics.top1_positions and np.isfinite(metrics.max_abs):
        none = f"no reference margin reaches {gates.margin:g}"
        return [*checks, Check(group, "same top-1", 0.0, None, ">=", "reported", none)]
    top1 = f"{metrics.top1_positions} positions with a reference margin of {gates.margin:g} or more"
    return [*checks, judge(group, "same top-1", metrics.top1_agreement, gates.top1_agreement, ">=", top1)]


def against_oracle(
    candidate: Candidate, group: str, wanted: Sequence[NDArray[np.float32]], found: Sequence[NDArray[np.float32]]
) -> list[Check]:
    """The five gates on pairs of [N_i, V] arrays."""
    return logit_checks(group, compare_logits(wanted, found, candidate.gates.margin), candidate.gates)


def cache_check(candidate: Candidate, group: str, graph: str | None, cache: KVCache, lengths: Sequence[int]) -> Check:
    """The first ``lengths`` slots of every cache against the oracle's.

    A half-precision key of size 100 is rounded 100 times as coarsely as one of size 1, so there the difference is taken
    relative to the tensor's largest value where that is above 1; fp32 is absolute.

    Args:
        candidate: The backend under test.
        group: What the check is called.
        graph: Which graph's layers the figures are noted for; None notes nothing.
        cache: What was written.
        lengths: Slots of each row that are compared.
    """
    plain, worst = candidate.dtype == "fp32", 0.0
    for layer in candidate.layers:
        by_kind, found = [], cache.read(layer)
        for kind in (0, 1):
            wanted = [candidate.oracle.caches[row][layer][kind][:, :n] for row, n in enumerate(lengths)]
            scale = 1.0 if plain else max(1.0, *(float(np.abs(w).max()) for w in wanted))
            error = 0.0
            for row, n in enumerate(lengths):
                error = worse(error, max_abs(wanted[row], found[kind][row, :, :n]) / scale)
            by_kind.append(error)
            worst = worse(worst, error)
        if graph is not None:
            candidate.profile.layers.append(LayerError(graph, layer, *by_kind))
    return judge(group, "max abs" if plain else "max abs, relative above 1", worst, candidate.gates.cache_rows)
