"""Cache slots that no row has written, or that another row wrote before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.parity.gates import judge
from tformer_deploy.parity.metrics import max_abs, worse

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tformer_deploy.backends.base import KVCache
    from tformer_deploy.parity.candidate import Candidate
    from tformer_deploy.parity.gates import Check

# Far larger than a real key or value. In fp16 a score is a sum of products that must itself stay below 65504, or it is
# infinite before the mask is applied: no slot that a row ever held can do that where its own scores were finite.
_POISON = {"fp32": 1e30, "fp16": 64.0, "bf16": 1e30}


def poisoned(candidate: Candidate) -> list[Check]:
    """Huge values in every slot that a row has not written must change nothing."""
    plan = candidate.plan
    if not plan.steps:
        return []
    results = []
    poison = _POISON[candidate.backend.dtype]
    for filling in (0.0, poison, -poison):
        cache = candidate.cache(len(plan.rows))
        candidate.prefill(candidate.prompts, cache)
        for layer in candidate.layers:
            key, value = cache.read(layer)
            for row, n in enumerate(plan.lengths):
                key[row, :, n:], value[row, :, n:] = filling, filling
            cache.write(layer, key, value)
        results.append(candidate.decode(candidate.next_tokens, plan.lengths, cache))
    worst = worse(max_abs(results[0], results[1]), max_abs(results[0], results[2]))
    return [judge("poisoned cache slots", "max abs", worst, 0.0)]


def reused(candidate: Candidate) -> list[Check]:
    """Slots are zero when they are allocated or grown, and what an earlier, longer row left in them changes nothing.

    Not a number times a masked 0 is not a number: a slot that was never zeroed, or that holds one, spoils its row for good.
    """
    plan, group = candidate.plan, "allocated and reused slots"
    cache = candidate.backend.allocate(len(plan.rows), plan.capacity)
    dirty = _not_zero(candidate, cache, 0)
    # An engine's capacity is fixed, and may be just this one.
    room = max(plan.capacity, min(plan.capacity + 1, candidate.backend.max_length))
    grown = cache.resize(list(range(len(plan.rows))), room)
    checks = [
        judge(group, "slots not zero when allocated", dirty, 0, "=="),
        judge(group, "slots not zero when grown", _not_zero(candidate, grown, plan.capacity), 0, "=="),
    ]
    if not plan.steps:
        return checks
    # The longest prompt's slots go to the shortest one, and so on.
    falling = sorted(range(len(plan.rows)), key=lambda i: -plan.lengths[i])
    _start(candidate, cache, falling)
    again = _start(candidate, cache, falling[::-1])
    stray = sum(int((~np.isfinite(tensor)).sum()) for tensor in candidate.read(cache))
    fresh = _start(candidate, candidate.backend.allocate(len(plan.rows), plan.capacity), falling[::-1])
    worst = worse(max_abs(fresh[0], again[0]), max_abs(fresh[1], again[1]))
    return [
        *checks,
        judge(group, "values not finite after reuse", stray, 0, "=="),
        judge(group, "reused against fresh: max abs", worst, 0.0),
    ]


def _start(candidate: Candidate, cache: KVCache, order: list[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Prefills each row into its slots alone, so that what lies behind its prompt stays, and decodes one token of all."""
    prompts, new = candidate.prompts, candidate.next_tokens
    first = [candidate.prefill([prompts[i]], cache.rows(row, row + 1))[0, 0] for row, i in enumerate(order)]
    second = candidate.decode([new[i] for i in order], [candidate.plan.lengths[i] for i in order], cache)
    return np.stack(first), second[:, 0]


def _not_zero(candidate: Candidate, cache: KVCache, start: int) -> int:
    """Values from slot ``start`` on that are not 0."""
    return sum(int((tensor[:, :, start:] != 0).sum()) for tensor in candidate.read(cache))
