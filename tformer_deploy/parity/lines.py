"""The lines of a model that amplifies rounding, from what PyTorch's own rounding does to it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tformer_deploy.backends.torch import TorchBackend
from tformer_deploy.parity.candidate import Candidate
from tformer_deploy.parity.comparisons.ragged import batch
from tformer_deploy.parity.comparisons.two_ways import alone, one_more
from tformer_deploy.parity.gates import GATES, Check, Gates, judge
from tformer_deploy.parity.metrics import compare_logits, max_abs
from tformer_deploy.parity.oracle import exact

if TYPE_CHECKING:
    from tformer_deploy.config import DType
    from tformer_deploy.parity.oracle import Oracle
    from tformer_deploy.parity.plan import Plan
    from tformer_deploy.reference import Decoder

# What float32 itself may be away from float64, times this, is the line of a deep or hot model.
_HOT = 4.0
# What PyTorch's own half precision is away from its float32, times this, is the line of such a model in that dtype.
_HALF = 2.0


def own_lines(decoder: Decoder, dtype: DType, plan: Plan, oracle: Oracle) -> tuple[Gates, str]:
    """The lines of a model that amplifies rounding, from what PyTorch's own rounding in that dtype does to it.

    Args:
        decoder: The reference in float32; it is converted.
        dtype: The bundle's dtype.
        plan: The rows.
        oracle: The float32 reference's answers to them.

    Returns:
        The lines, and a sentence that prints them; the sentence is empty where the plain gates stand.
    """
    return hot_lines(decoder, plan, oracle) if dtype == "fp32" else half_lines(decoder, dtype, plan, oracle)


def judge_again(checks: list[Check], lines: Gates) -> list[Check]:
    """The red checks under the lines of a model that amplifies rounding; a green one keeps its plain gate."""
    found = []
    for check in checks:
        line = _line_of(check)
        if check.verdict == "red" and line is not None:
            check = judge(check.group, check.metric, check.value, getattr(lines, line), check.relation, check.detail)
        found.append(check)
    return found


def _line_of(check: Check) -> str | None:
    """The line that may be wider for a check; None for one whose gate never is."""
    return _LINES.get(check.group, {}).get(check.metric)


def half_lines(decoder: Decoder, dtype: DType, plan: Plan, oracle: Oracle) -> tuple[Gates, str]:
    """fp16 and bf16 lines: twice the error that PyTorch itself makes in that dtype against its float32.

    Logits of size 16 to 32 are 0.016 apart in fp16, so that two correct ways to one logit differ by more than the plain
    line of a step.
    """
    plain = GATES[dtype]
    backend = TorchBackend(decoder.to(torch.float16 if dtype == "fp16" else torch.bfloat16))
    candidate = Candidate(backend, dtype, plan, oracle)
    own: dict[str, float] = {}
    for check in (*batch(candidate), *alone(candidate), *one_more(candidate)):
        line = _line_of(check)
        if line is not None:
            own[line] = max(own.get(line, 0.0), check.value)
    lines = replace(plain, **{name: max(getattr(plain, name), _HALF * value) for name, value in own.items()})
    if lines == plain:
        return plain, ""
    wider = ", ".join(f"{name} {getattr(lines, name):.2g}" for name in sorted(own) if getattr(lines, name) > getattr(plain, name))
    return lines, (
        f"This model amplifies {dtype} rounding: a line is {_HALF:g} × what PyTorch's own {dtype} is away from its float32 "
        f"where a plain one does not hold ({wider})."
    )


# Metric → line, of logits against the oracle, of cache rows, and of two ways to the same logits. Nothing else has one.
_OF_LOGITS = {"max abs": "max_abs", "relative L2, p95": "rel_l2_p95", "mean KL": "mean_kl"}
_OF_CACHES = dict.fromkeys(("max abs", "max abs, relative above 1"), "cache_rows")
_OF_TWO_WAYS = dict.fromkeys(("max abs", "prefill: max abs", "decode: max abs", "one token later: max abs"), "step")
_LINES = {
    "prefill, ragged batch": _OF_LOGITS,
    "decode, teacher-forced": _OF_LOGITS,
    "decode, several tokens at once": _OF_LOGITS,
    "two turns": _OF_LOGITS,
    "bucket edges": _OF_LOGITS,
    "runtime without optimisations": _OF_LOGITS,
    "prefill caches": _OF_CACHES,
    "decode caches": _OF_CACHES,
    "several-token caches": _OF_CACHES,
    "each row alone": _OF_TWO_WAYS,
    "prefill n+1 against prefill n, decode 1": _OF_TWO_WAYS,
    "two turns against one shot": _OF_TWO_WAYS,
    "bucket edges, each row alone": _OF_TWO_WAYS,
    "two optimisation levels": _OF_TWO_WAYS,
}


def hot_lines(decoder: Decoder, plan: Plan, oracle: Oracle) -> tuple[Gates, str]:
    """fp32 lines of a deep or hot model: 4 × the error that PyTorch's own float32 has against float64.

    Returns:
        The lines, and a sentence that prints them; the sentence is empty where nothing is wider than the plain gates.
    """
    plain = GATES["fp32"]
    exact_logits, exact_caches = exact(decoder, plan)
    own = compare_logits(exact_logits, oracle.logits, plain.margin)
    pairs = [pair for e, o in zip(exact_caches, oracle.caches, strict=True) for pair in zip(e, o, strict=True)]
    own_cache = max(max_abs(e[kind], o[kind]) for e, o in pairs for kind in (0, 1))
    lines = replace(
        plain,
        max_abs=max(plain.max_abs, _HOT * own.max_abs),
        rel_l2_p95=max(plain.rel_l2_p95, _HOT * own.rel_l2_p95),
        mean_kl=max(plain.mean_kl, _HOT * own.mean_kl),
        cache_rows=max(plain.cache_rows, _HOT * own_cache),
        step=max(plain.step, _HOT * own.max_abs),
    )
    if lines == plain:
        return plain, ""
    return lines, (
        f"This model amplifies rounding: PyTorch's own float32 is {own.max_abs:.2g} (max abs), {own.rel_l2_p95:.2g} "
        f"(relative L2), {own.mean_kl:.2g} (KL) and {own_cache:.2g} (cache rows) away from float64; a line is {_HOT:g} × that "
        "where a plain one does not hold."
    )
