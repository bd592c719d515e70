"""A quantised bundle as it is deployed: what rounding costs against the unquantised model, and what it may not touch at all.

That the graphs are right is proven beforehand and exactly: with their weights dequantised they are compared with the
reference under the fp32 gates. Deployed, a runtime multiplies whole numbers and rounds rows to int8 on the way, so that two
right ways to the same logits differ; here such ways are compared in KL, under twice what the same rounding does in PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tformer_deploy.backends.cpu.opening import open_cpu
from tformer_deploy.interrupts import collect_garbage
from tformer_deploy.parity.accuracy import accuracy
from tformer_deploy.parity.candidate import Candidate
from tformer_deploy.parity.comparisons.edges import edges
from tformer_deploy.parity.comparisons.ragged import batch, chunk
from tformer_deploy.parity.comparisons.slots import poisoned, reused
from tformer_deploy.parity.comparisons.two_ways import two_turns
from tformer_deploy.parity.gates import Check, judge
from tformer_deploy.parity.metrics import KL, measure
from tformer_deploy.parity.products import compare_products
from tformer_deploy.parity.rounded_rows import rounded_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tformer_deploy.backends.cpu.opening import ProfileName
    from tformer_deploy.bundle import Bundle
    from tformer_deploy.bundle.quantization import Quantization
    from tformer_deploy.checkpoints import Checkpoint
    from tformer_deploy.parity.oracle import Oracle
    from tformer_deploy.parity.plan import Plan, Suite
    from tformer_deploy.reference import Decoder

# What the same rounding does in PyTorch, times this, is the line of two right ways; and never less than rounding in float32.
_SAME_ROUNDING, _LEAST_LINE = 2.0, 1e-6
_GROUP = "deployed"


def deployed(
    bundle: Bundle, checkpoint: Checkpoint | None, plan: Plan, oracle: Oracle, suite: Suite, profile: ProfileName,
    dequantised: Callable[[], Decoder], on_progress: Callable[[str], None],
) -> tuple[list[Check], tuple[str, ...]]:  # fmt: skip
    """Every check of the deployed graphs.

    Args:
        bundle: A quantised one.
        checkpoint: What it came from; without it nothing is known of the unquantised model.
        plan: The rows.
        oracle: The dequantised reference's answers to them.
        suite: ``quick`` or ``full``.
        profile: Which graphs run.
        dequantised: Makes the dequantised reference.
        on_progress: Called with a few words at the start of each part.

    Returns:
        The checks, and what a reader must know.
    """
    quantization = bundle.manifest.quantization
    assert quantization is not None
    checks = []
    if quantization.dynamic:
        on_progress("int8 products")
        checks += compare_products(bundle, plan)
    on_progress("rows rounded in PyTorch")
    line, own = _line(dequantised(), quantization, plan, oracle)
    collect_garbage()
    candidate = Candidate(open_cpu(bundle, profile=profile), "fp32", plan, oracle)
    notes = (
        *candidate.backend.notes,
        f"{quantization.sentence} Deployed, rows are rounded to int8 too, which in PyTorch costs {own:.2g} of KL; two ways to "
        f"the same logits may be {line:.2g} apart.",
    )
    checks += _ways(candidate, suite, line, on_progress)
    if checkpoint is not None:
        on_progress("deployed against the unquantised model")
        checks += accuracy(candidate, bundle, checkpoint, suite)
    return checks, notes


def _line(decoder: Decoder, quantization: Quantization, plan: Plan, oracle: Oracle) -> tuple[float, float]:
    """The KL that two right ways may be apart, and what the same rounding does in PyTorch."""
    with rounded_rows(decoder, quantization.block), torch.inference_mode():
        rounded = [decoder(torch.tensor([row]))[0].numpy() for row in plan.rows]
    own = float(np.mean([_kl(want, have) for want, have in zip(oracle.logits, rounded, strict=True)]))
    return max(_LEAST_LINE, _SAME_ROUNDING * own), own


def _ways(candidate: Candidate, suite: Suite, line: float, on_progress: Callable[[str], None]) -> list[Check]:
    """Deployed logits against the dequantised reference, one way against another, and slots that nobody may touch."""
    checks = []
    comparisons = [batch, chunk, poisoned, *((two_turns, reused, edges) if suite == "full" else ())]
    for comparison in comparisons:
        on_progress(f"{_GROUP}: {comparison.__name__.replace('_', ' ')}")
        checks += list(_kept(comparison(candidate), line))
    on_progress(f"{_GROUP}: two ways")
    return [*checks, *_alone(candidate, line), *_one_more(candidate, line)]


def _kept(checks: list[Check], line: float) -> Iterator[Check]:
    """Of an exact comparison what must be exact here too, and its KL under another line."""
    for check in checks:
        group = f"{_GROUP}, {check.group}"
        if check.metric == "mean KL":
            yield judge(group, check.metric, check.value, line)
        elif check.gate is not None and (check.relation == "==" or check.gate == 0 or check.metric == "rows compared"):
            yield judge(group, check.metric, check.value, check.gate, check.relation, check.detail)


def _alone(candidate: Candidate, line: float) -> list[Check]:
    """Each row of the ragged batch against itself alone. One row and several are multiplied by different kernels."""
    plan, prompts, new = candidate.plan, candidate.prompts, candidate.next_tokens
    cache = candidate.cache(len(prompts))
    together = [candidate.prefill(prompts, cache)[:, 0]]
    if plan.steps:
        together.append(candidate.decode(new, plan.lengths, cache)[:, 0])
    apart: list[list[NDArray[np.float32]]] = [[] for _ in together]
    for i, n in enumerate(plan.lengths):
        single = candidate.cache(1)
        apart[0].append(candidate.prefill([prompts[i]], single)[0, 0])
        if plan.steps:
            apart[1].append(candidate.decode([new[i]], [n], single)[0, 0])
    names = ("prefill: mean KL", "decode: mean KL")
    pairs = zip(names, together, apart, strict=False)
    return [judge(f"{_GROUP}, each row alone", name, _kl(a, np.stack(b)), line) for name, a, b in pairs]


def _one_more(candidate: Candidate, line: float) -> list[Check]:
    """n+1 tokens prefilled against n prefilled and one decoded."""
    plan = candidate.plan
    if not plan.steps:
        return []
    rows = len(plan.rows)
    longer = candidate.prefill([r[: n + 1] for r, n in zip(plan.rows, plan.lengths, strict=True)], candidate.cache(rows))
    cache = candidate.cache(rows)
    candidate.prefill(candidate.prompts, cache)
    stepped = candidate.decode(candidate.next_tokens, plan.lengths, cache)
    kl = _kl(longer[:, 0], stepped[:, 0])
    return [judge(f"{_GROUP}, prefill n+1 against prefill n, decode 1", "mean KL", kl, line)]


def _kl(wanted: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """Mean over positions of two [N, V] arrays, nats; NaN where a logit is not finite."""
    return float(measure(wanted, found)[:, KL].mean())
