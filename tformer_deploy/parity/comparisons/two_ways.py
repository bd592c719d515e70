"""Two ways to the same logits: a row in a batch or alone, a token prefilled or decoded, one shot or two turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.backends.session import Session
from tformer_deploy.parity.comparisons.logits import against_oracle
from tformer_deploy.parity.gates import judge
from tformer_deploy.parity.metrics import max_abs, worse

if TYPE_CHECKING:
    from tformer_deploy.parity.candidate import Candidate
    from tformer_deploy.parity.gates import Check


def alone(candidate: Candidate) -> list[Check]:
    """Every row of the ragged batch against the same row alone, prefill and one step."""
    plan, prompts, new = candidate.plan, candidate.prompts, candidate.next_tokens
    cache = candidate.cache(len(prompts))
    together = [candidate.prefill(prompts, cache)[:, 0]]
    if plan.steps:
        together.append(candidate.decode(new, plan.lengths, cache)[:, 0])
    worst = [0.0] * len(together)
    for i, n in enumerate(plan.lengths):
        single = candidate.cache(1)
        apart = [candidate.prefill([prompts[i]], single)[0, 0]]
        if plan.steps:
            apart.append(candidate.decode([new[i]], [n], single)[0, 0])
        worst = [worse(w, max_abs(t[i], a)) for w, t, a in zip(worst, together, apart, strict=True)]
    names = ("prefill: max abs", "decode: max abs")
    return [judge("each row alone", name, w, candidate.gates.step) for name, w in zip(names, worst, strict=False)]


def one_more(candidate: Candidate) -> list[Check]:
    """n+1 tokens prefilled against n prefilled and one decoded."""
    plan = candidate.plan
    if not plan.steps:
        return []
    rows = len(plan.rows)
    longer = candidate.prefill([r[: n + 1] for r, n in zip(plan.rows, plan.lengths, strict=True)], candidate.cache(rows))
    cache = candidate.cache(rows)
    candidate.prefill(candidate.prompts, cache)
    stepped = candidate.decode(candidate.next_tokens, plan.lengths, cache)
    return [judge("prefill n+1 against prefill n, decode 1", "max abs", max_abs(longer, stepped), candidate.gates.step)]


def two_turns(candidate: Candidate) -> list[Check]:
    """A prompt and a ragged second turn on its cache, then one token, against one prefill of everything, and the oracle."""
    plan, group = candidate.plan, "two turns against one shot"
    if plan.steps < 2:
        return []
    turns = [1 + i % (plan.steps - 1) for i in range(len(plan.rows))]
    ends = [n + turn for n, turn in zip(plan.lengths, turns, strict=True)]
    last = [row[end] for row, end in zip(plan.rows, ends, strict=True)]
    session = Session(candidate.backend)
    session.prefill(candidate.prompts)
    twice = [session.extend([row[n:end] for row, n, end in zip(plan.rows, plan.lengths, ends, strict=True)])]
    twice.append(session.decode(last))
    once = [session.prefill([row[:end] for row, end in zip(plan.rows, ends, strict=True)])]
    once.append(session.decode(last))
    wanted = [logits[end - 1 : end + 1] for logits, end in zip(candidate.oracle.logits, ends, strict=True)]
    return [
        judge(group, "max abs", max_abs(once[0], twice[0]), candidate.gates.step),
        judge(group, "one token later: max abs", max_abs(once[1], twice[1]), candidate.gates.step),
        *against_oracle(candidate, "two turns", wanted, list(np.stack(twice, axis=1))),
    ]
