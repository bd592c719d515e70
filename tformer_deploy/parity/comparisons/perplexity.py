"""Perplexity on a text, both graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.parity.gates import judge
from tformer_deploy.parity.metrics import negative_log_likelihood

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tformer_deploy.parity.candidate import Candidate
    from tformer_deploy.parity.gates import Check


def perplexity(candidate: Candidate) -> list[Check]:
    """The first half of each window is prefilled, the second given to the decode graph in one call."""
    text = candidate.plan.text
    if text is None:
        return []
    wanted: dict[str, list[NDArray[np.float64]]] = {"prefill": [], "decode": []}
    found: dict[str, list[NDArray[np.float64]]] = {"prefill": [], "decode": []}
    for window, likelihood in zip(text.windows, candidate.oracle.text, strict=True):
        half = len(window) // 2
        cache = candidate.backend.allocate(1, len(window))
        everywhere = np.arange(half, dtype=np.int64)[None]
        prefilled = candidate.prefill([window[:half]], cache, everywhere)[0]
        found["prefill"].append(negative_log_likelihood(prefilled, window[1 : half + 1]))
        wanted["prefill"].append(likelihood[:half])
        if len(window) - 1 > half:
            decoded = candidate.decode([window[half:-1]], [half], cache)[0]
            found["decode"].append(negative_log_likelihood(decoded, window[half + 1 :]))
            wanted["decode"].append(likelihood[half:])
    checks = [judge("perplexity", "tokens compared", text.predicted, 1, ">=", text.name)]
    for graph in ("prefill", "decode"):
        reference, have = (_perplexity(x[graph]) for x in (wanted, found))
        detail = f"{have:.6g} against {reference:.6g} over {sum(map(len, wanted[graph]))} tokens"
        distance = abs(have / reference - 1)
        checks.append(
            judge("perplexity", f"{graph}: distance of the ratio from 1", distance, candidate.gates.perplexity, detail=detail)
        )
    return checks


def _perplexity(likelihoods: list[NDArray[np.float64]]) -> float:
    """The exponential of the mean; NaN where there is none."""
    values = np.concatenate([np.empty(0), *likelihoods])
    return float(np.exp(values.mean())) if len(values) else float("nan")
