"""A ragged batch against the oracle: prefill, one token at a time, several tokens at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.parity.comparisons.logits import against_oracle, cache_check, logit_checks
from tformer_deploy.parity.gates import judge
from tformer_deploy.parity.metrics import measure, summarise

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from tformer_deploy.backends.base import KVCache
    from tformer_deploy.parity.candidate import Candidate
    from tformer_deploy.parity.gates import Check

# Logits of one prefill call; with a large vocabulary the same batch is asked again for its other positions.
_LOGIT_BYTES = 64 * 2**20


def batch(candidate: Candidate) -> list[Check]:
    """Prefill logits at every position, teacher-forced steps, the caches, the slots left alone."""
    plan, cache = candidate.plan, candidate.cache(len(candidate.plan.rows))
    width, before = max(plan.lengths), list(candidate.read(cache))
    tables = _prefill_everywhere(candidate, cache)
    pairs = zip(before, candidate.read(cache), strict=True)
    touched = sum(not np.array_equal(b[:, :, width:], a[:, :, width:]) for b, a in pairs)
    candidate.profile.add_logits("prefill", tables, [0] * len(tables), plan.rows, plan.lengths)
    checks = logit_checks("prefill, ragged batch", summarise(tables, candidate.gates.margin), candidate.gates)
    checks.append(cache_check(candidate, "prefill caches", "prefill", cache, plan.lengths))
    checks.append(judge("prefill caches", "tensors touched past the prompt", touched, 0, "=="))
    if not plan.steps:
        return checks
    found: list[list[NDArray[np.float64]]] = [[] for _ in plan.rows]
    strayed = 0
    for step in range(plan.steps):
        before = list(candidate.read(cache))
        lengths = [n + step for n in plan.lengths]
        new = [row[n : n + 1] for row, n in zip(plan.rows, lengths, strict=True)]
        logits = candidate.decode(new, lengths, cache)
        strayed += _strayed(before, candidate.read(cache), lengths)
        for row, n in enumerate(lengths):
            found[row].append(measure(candidate.oracle.logits[row][n : n + 1], logits[row]))
    tables = [np.concatenate(row) for row in found]
    candidate.profile.add_logits("decode", tables, plan.lengths, plan.rows, plan.lengths)
    ends = [n + plan.steps for n in plan.lengths]
    checks += logit_checks("decode, teacher-forced", summarise(tables, candidate.gates.margin), candidate.gates)
    checks.append(cache_check(candidate, "decode caches", "decode", cache, ends))
    checks.append(judge("decode caches", "slots changed beside the written one", strayed, 0, "=="))
    return checks


def chunk(candidate: Candidate) -> list[Check]:
    """Several new tokens a row in one call of the decode graph, logits at every one."""
    plan = candidate.plan
    if plan.steps < 2:
        return []
    cache = candidate.cache(len(plan.rows))
    candidate.prefill(candidate.prompts, cache)
    new = [r[n : n + plan.steps] for r, n in zip(plan.rows, plan.lengths, strict=True)]
    logits = candidate.decode(new, plan.lengths, cache)
    wanted = [o[n : n + plan.steps] for o, n in zip(candidate.oracle.logits, plan.lengths, strict=True)]
    ends = [n + plan.steps for n in plan.lengths]
    return [
        *against_oracle(candidate, "decode, several tokens at once", wanted, list(logits)),
        cache_check(candidate, "several-token caches", None, cache, ends),
    ]


def _prefill_everywhere(candidate: Candidate, cache: KVCache) -> list[NDArray[np.float64]]:
    """The figures of every position of every prompt, one table a row."""
    prompts, lengths = candidate.prompts, candidate.plan.lengths
    width, vocab = max(lengths), candidate.backend.config.vocab_size
    share = max(1, _LOGIT_BYTES // (4 * len(prompts) * vocab))
    tables: list[list[NDArray[np.float64]]] = [[] for _ in prompts]
    for start in range(0, width, share):
        stop = min(start + share, width)
        logits = candidate.prefill(prompts, cache, np.tile(np.arange(start, stop, dtype=np.int64), (len(prompts), 1)))
        for row, n in enumerate(lengths):
            wanted = candidate.oracle.logits[row][start : min(stop, n)]
            tables[row].append(measure(wanted, logits[row, : len(wanted)]))
    return [np.concatenate(row) for row in tables]


def _strayed(before: list[NDArray[np.float32]], after: Iterable[NDArray[np.float32]], lengths: Sequence[int]) -> int:
    """Slots that changed although they were not to be written."""
    count = 0
    for b, a in zip(before, after, strict=True):
        changed = (b != a).any(axis=(1, 3))
        for row, n in enumerate(lengths):
            changed[row, n] = False
        count += int(changed.sum())
    return count
