"""Greedy tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tformer_deploy.parity.gates import NEAR_TIE, Check, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tformer_deploy.parity.candidate import Candidate


def greedy(candidate: Candidate) -> list[Check]:
    """Greedy tokens; where fp32 leaves the reference at a near-tie that is ambiguous, not red."""
    checks = []
    for i, wanted in enumerate(candidate.oracle.greedy):
        if not wanted:
            continue
        prefix = _prefix(candidate, candidate.prompts[i], [token for token, _ in wanted])
        checks.append(judge_tokens(f"prompt {i}: tokens agreed", prefix, [m for _, m in wanted], candidate.gates.greedy_exact))
    return checks


def judge_tokens(metric: str, prefix: int, margins: Sequence[float], exact: bool) -> Check:
    """The verdict on ``prefix`` tokens that agreed; ``margins`` are the reference's at each token."""
    if any(math.isnan(m) for m in margins):  # then its best token means nothing, and agreeing with it means nothing
        return judge("greedy", metric, math.nan, len(margins), "==", "the reference's logits are not finite")
    margin = margins[prefix] if prefix < len(margins) else math.inf
    detail = "" if prefix == len(margins) else f"reference margin {margin:.3g} at the first divergence"
    check = judge("greedy", metric, prefix, len(margins), "==", detail)
    if check.verdict == "red" and not exact:
        return Check("greedy", metric, prefix, None, "==", "reported", detail)
    if check.verdict == "red" and margin < NEAR_TIE:
        return Check("greedy", metric, prefix, len(margins), "==", "ambiguous", detail)
    return check


def _prefix(candidate: Candidate, prompt: Sequence[int], wanted: list[int]) -> int:
    cache = candidate.backend.allocate(1, len(prompt) + len(wanted))
    logits = candidate.prefill([prompt], cache)
    for step, token in enumerate(wanted):
        if int(logits[0, 0].argmax()) != token:
            return step
        if step + 1 < len(wanted):
            logits = candidate.decode([[token]], [len(prompt) + step], cache)
    return len(wanted)
