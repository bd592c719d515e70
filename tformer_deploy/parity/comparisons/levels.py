"""The runtime as it is deployed against the runtime that optimises nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.parity.comparisons.logits import against_oracle
from tformer_deploy.parity.gates import judge
from tformer_deploy.parity.metrics import max_abs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tformer_deploy.parity.candidate import Candidate
    from tformer_deploy.parity.gates import Check

_STEPS = 3


def trace(candidate: Candidate) -> NDArray[np.float32]:
    """Logits after each prompt of the ragged batch and after a few steps, [B, 1 + steps, V]."""
    plan = candidate.plan
    cache = candidate.cache(len(plan.rows))
    found = [candidate.prefill(candidate.prompts, cache)[:, 0]]
    for step in range(min(_STEPS, plan.steps)):
        lengths = [n + step for n in plan.lengths]
        new = [row[n : n + 1] for row, n in zip(plan.rows, lengths, strict=True)]
        found.append(candidate.decode(new, lengths, cache)[:, 0])
    return np.stack(found, axis=1)


def levels(plain: Candidate, deployed: NDArray[np.float32]) -> list[Check]:
    """The graphs as they are, unoptimised, against what they gave when deployed, and against the oracle.

    The deployed level itself is what every other comparison holds against the oracle.

    Args:
        plain: A backend that optimises nothing.
        deployed: What :func:`trace` gave for the deployed one.
    """
    found = trace(plain)
    wanted = [o[n - 1 : n - 1 + found.shape[1]] for o, n in zip(plain.oracle.logits, plain.plan.lengths, strict=True)]
    return [
        judge("two optimisation levels", "max abs", max_abs(deployed, found), plain.gates.step),
        *against_oracle(plain, "runtime without optimisations", wanted, list(found)),
    ]
