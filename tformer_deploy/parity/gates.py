"""The lines that must hold, by dtype. They may be tightened, never loosened to get green."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tformer_deploy.config import DType

Verdict = Literal["green", "red", "ambiguous", "reported"]


@dataclass(frozen=True)
class Gates:
    """One dtype's lines (see :class:`parity.metrics.LogitMetrics` for the metrics).

    Attributes:
        margin: Reference margin from which the argmax must agree.
        greedy_exact: True: every greedy token must agree; False: the first divergence is reported with its margin.
        cache_rows: Largest difference of a cached key or value.
        step: Largest difference between two ways to the same logits: n+1 prefilled or n prefilled and 1 decoded, a
            row in a batch or alone.
        perplexity: Largest distance from 1 of the ratio of two perplexities, to either side: a graph that sees the
            future is better than the reference.
    """

    max_abs: float
    rel_l2_p95: float
    cosine_p5: float
    margin: float
    top1_agreement: float
    mean_kl: float
    greedy_exact: bool
    cache_rows: float
    step: float
    perplexity: float


GATES: dict[DType, Gates] = {
    "fp32": Gates(1e-3, 1e-5, 0.99999, 0.1, 1.0, 1e-7, True, 1e-4, 1e-4, 1e-5),
    "fp16": Gates(0.12, 0.01, 0.999, 0.1, 0.99, 5e-4, False, 1e-2, 1e-2, 1e-3),
    "bf16": Gates(0.5, 0.05, 0.99, 0.5, 0.99, 5e-3, False, 1.6e-2, 2e-2, 5e-3),
}
# Begins the group of checks that say what quantisation costs: red there, the graphs are right all the same.
ACCURACY = "deployed against the unquantised model"
# A reference margin under which two fp32 runs may pick either token: reported, not red.
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Check:
    """One metric with its gate.

    Attributes:
        group: What was compared.
        metric: Which figure.
        value: What came out.
        gate: The line; None for a figure that is only reported.
        relation: How value must stand to gate.
        verdict: ``red`` fails the report; ``ambiguous`` is a near-tie.
        detail: A few words for a reader.
    """

    group: str
    metric: str
    value: float
    gate: float | None
    relation: Literal["<=", ">=", "=="]
    verdict: Verdict
    detail: str = ""


def judge(
    group: str, metric: str, value: float, gate: float, relation: Literal["<=", ">=", "=="] = "<=", detail: str = ""
) -> Check:
    """A check that is red when ``value`` does not hold ``relation`` to ``gate``, and always when one of them is not finite."""
    holds = {"<=": value <= gate, ">=": value >= gate, "==": value == gate}[relation]
    verdict: Verdict = "green" if math.isfinite(value) and math.isfinite(gate) and holds else "red"
    return Check(group, metric, value, gate, relation, verdict, detail)
