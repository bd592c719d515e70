"""What is compared: a candidate backend against the oracle, and against itself where two ways must meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.parity.gates import GATES, NEAR_TIE, Check, Gates, judge
from tformer_deploy.parity.metrics import LogitMetrics, compare_logits, max_abs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from tformer_deploy.backends.base import Backend, KVCache
    from tformer_deploy.config import DType
    from tformer_deploy.parity.oracle import Oracle
    from tformer_deploy.parity.plan import Plan

Array = "NDArray[np.float32]"
# Far larger than a real key or value. In fp16 a score is a sum of products that must itself stay below 65504, or it is
# infinite before the mask is applied: no slot that a row ever held can do that where its own scores were finite.
_POISON = {"fp32": 1e30, "fp16": 64.0, "bf16": 1e30}


class Comparison:
    """Runs one candidate over one plan; every method is one comparison and returns its checks."""

    def __init__(self, backend: Backend, dtype: DType, plan: Plan, oracle: Oracle) -> None:
        self.backend, self.dtype, self.plan, self.oracle = backend, dtype, plan, oracle
        self.gates = GATES[dtype]
        self.layers = range(backend.config.n_layers)

    def all(self, on_progress: Callable[[str], None] = lambda _: None) -> list[Check]:
        """Every comparison."""
        checks: list[Check] = []
        for part in (self.batch, self.chunk, self.alone, self.one_more, self.poisoned, self.greedy):
            on_progress(part.__name__)
            checks += part()
        return checks

    def batch(self) -> list[Check]:
        """A ragged batch: prefill logits at every position, teacher-forced steps, the caches, the slots left alone."""
        plan, cache = self.plan, self._cache(len(self.plan.rows))
        width, before = max(plan.lengths), self._read(cache)
        prefilled = self._prefill([r[:n] for r, n in zip(plan.rows, plan.lengths, strict=True)], cache, every_position=True)
        after = self._read(cache)
        touched = sum(not np.array_equal(b[:, :, width:], a[:, :, width:]) for b, a in zip(before, after, strict=True))
        checks = self._logits(
            "prefill, ragged batch",
            [o[:n] for o, n in zip(self.oracle.logits, plan.lengths, strict=True)],
            [p[:n] for p, n in zip(prefilled, plan.lengths, strict=True)],
        )
        checks.append(self._caches("prefill caches", after, plan.lengths))
        checks.append(judge("prefill caches", "tensors touched past the prompt", touched, 0, "=="))
        found: list[list[NDArray[np.float32]]] = [[] for _ in plan.rows]
        strayed = 0
        for step in range(plan.steps):
            before = self._read(cache)
            lengths = [n + step for n in plan.lengths]
            logits = self._decode([[row[n]] for row, n in zip(plan.rows, lengths, strict=True)], lengths, cache)
            strayed += self._strayed(before, self._read(cache), lengths, 1)
            for row, position in enumerate(logits[:, 0]):
                found[row].append(position)
        if plan.steps:
            wanted = [o[n : n + plan.steps] for o, n in zip(self.oracle.logits, plan.lengths, strict=True)]
            checks += self._logits("decode, teacher-forced", wanted, [np.stack(f) for f in found])
            checks.append(self._caches("decode caches", self._read(cache), [n + plan.steps for n in plan.lengths]))
            checks.append(judge("decode caches", "slots changed beside the written one", strayed, 0, "=="))
        return checks

    def chunk(self) -> list[Check]:
        """Several new tokens a row in one call of the decode graph (a second turn), logits at every one."""
        plan = self.plan
        if plan.steps < 2:
            return []
        cache = self._cache(len(plan.rows))
        self._prefill([r[:n] for r, n in zip(plan.rows, plan.lengths, strict=True)], cache)
        new = [r[n : n + plan.steps] for r, n in zip(plan.rows, plan.lengths, strict=True)]
        logits = self._decode(new, list(plan.lengths), cache)
        wanted = [o[n : n + plan.steps] for o, n in zip(self.oracle.logits, plan.lengths, strict=True)]
        return [
            *self._logits("decode, several tokens at once", wanted, list(logits)),
            self._caches("several-token caches", self._read(cache), [n + plan.steps for n in plan.lengths]),
        ]

    def alone(self) -> list[Check]:
        """Every row of the ragged batch against the same row alone, prefill and one step."""
        plan = self.plan
        prompts = [r[:n] for r, n in zip(plan.rows, plan.lengths, strict=True)]
        new = [[r[n]] for r, n in zip(plan.rows, plan.lengths, strict=True)] if plan.steps else []
        cache = self._cache(len(prompts))
        together = [self._prefill(prompts, cache)[:, 0]]
        if plan.steps:
            together.append(self._decode(new, plan.lengths, cache)[:, 0])
        worst = [0.0] * len(together)
        for i, (row, n) in enumerate(zip(plan.rows, plan.lengths, strict=True)):
            single = self._cache(1)
            apart = [self._prefill([row[:n]], single)[0, 0]]
            if plan.steps:
                apart.append(self._decode([[row[n]]], [n], single)[0, 0])
            worst = [_worse(w, max_abs(t[i], a)) for w, t, a in zip(worst, together, apart, strict=True)]
        names = ("prefill: max abs", "decode: max abs")
        return [judge("each row alone", name, w, self.gates.step) for name, w in zip(names, worst, strict=False)]

    def one_more(self) -> list[Check]:
        """n+1 tokens prefilled against n prefilled and one decoded."""
        plan = self.plan
        if not plan.steps:
            return []
        longer = self._prefill([r[: n + 1] for r, n in zip(plan.rows, plan.lengths, strict=True)], self._cache(len(plan.rows)))
        cache = self._cache(len(plan.rows))
        self._prefill([r[:n] for r, n in zip(plan.rows, plan.lengths, strict=True)], cache)
        stepped = self._decode([[r[n]] for r, n in zip(plan.rows, plan.lengths, strict=True)], list(plan.lengths), cache)
        return [judge("prefill n+1 against prefill n, decode 1", "max abs", max_abs(longer, stepped), self.gates.step)]

    def poisoned(self) -> list[Check]:
        """Huge values in every slot that a row has not written must change nothing."""
        plan = self.plan
        if not plan.steps:
            return []
        results = []
        new = [[r[n]] for r, n in zip(plan.rows, plan.lengths, strict=True)]
        for poison in (0.0, _POISON[self.backend.dtype], -_POISON[self.backend.dtype]):
            cache = self._cache(len(plan.rows))
            self._prefill([r[:n] for r, n in zip(plan.rows, plan.lengths, strict=True)], cache)
            for layer in self.layers:
                key, value = cache.read(layer)
                for row, n in enumerate(plan.lengths):
                    key[row, :, n:], value[row, :, n:] = poison, poison
                cache.write(layer, key, value)
            results.append(self._decode(new, plan.lengths, cache))
        worst = _worse(max_abs(results[0], results[1]), max_abs(results[0], results[2]))
        return [judge("poisoned cache slots", "max abs", worst, 0.0)]

    def greedy(self) -> list[Check]:
        """Greedy tokens; where fp32 leaves the reference at a near-tie that is ambiguous, not red."""
        checks = []
        for i, wanted in enumerate(self.oracle.greedy):
            if not wanted:
                continue
            prompt = self.plan.rows[i][: self.plan.lengths[i]]
            prefix = self._greedy_prefix(prompt, [token for token, _ in wanted])
            margin = wanted[prefix][1] if prefix < len(wanted) else float("inf")
            detail = "" if prefix == len(wanted) else f"reference margin {margin:.3g} at the first divergence"
            check = judge("greedy", f"prompt {i}: tokens agreed", prefix, len(wanted), "==", detail)
            if check.verdict == "red" and not self.gates.greedy_exact:
                check = Check(check.group, check.metric, prefix, None, "==", "reported", detail)
            elif check.verdict == "red" and margin < NEAR_TIE:
                check = Check(check.group, check.metric, prefix, len(wanted), "==", "ambiguous", detail)
            checks.append(check)
        return checks

    def _greedy_prefix(self, prompt: Sequence[int], wanted: list[int]) -> int:
        cache = self.backend.allocate(1, len(prompt) + len(wanted))
        logits = self._prefill([prompt], cache)
        for step, token in enumerate(wanted):
            if int(logits[0, 0].argmax()) != token:
                return step
            if step + 1 < len(wanted):
                logits = self._decode([[token]], [len(prompt) + step], cache)
        return len(wanted)

    def _logits(self, group: str, wanted: list[NDArray[np.float32]], found: list[NDArray[np.float32]]) -> list[Check]:
        return logit_checks(group, compare_logits(wanted, found, self.gates.margin), self.gates)

    def _caches(self, group: str, found: list[NDArray[np.float32]], lengths: Sequence[int]) -> Check:
        """Rows of every cache. A half-precision key of size 100 is rounded 100 times as coarsely as one of size 1, so there
        the difference is taken relative to the tensor's largest value where that is above 1; fp32 is absolute.
        """
        worst = 0.0
        for layer in self.layers:
            for kind in (0, 1):
                wanted = [self.oracle.caches[row][layer][kind][:, :n] for row, n in enumerate(lengths)]
                largest = max(float(np.abs(w).max()) for w in wanted)
                scale = 1.0 if self.dtype == "fp32" else max(1.0, largest)
                for row, n in enumerate(lengths):
                    worst = _worse(worst, max_abs(wanted[row], found[2 * layer + kind][row, :, :n]) / scale)
        return judge(group, "max abs" if self.dtype == "fp32" else "max abs, relative above 1", worst, self.gates.cache_rows)

    def _cache(self, rows: int) -> KVCache:
        """A cache with a pattern in it, so that a slot written by mistake shows."""
        cache = self.backend.allocate(rows, self.plan.capacity)
        key, _ = cache.read(0)
        pattern = np.random.Generator(np.random.Philox(key=7)).standard_normal(key.shape).astype(np.float32)
        for layer in self.layers:
            cache.write(layer, pattern, -pattern)
        return cache

    def _read(self, cache: KVCache) -> list[NDArray[np.float32]]:
        return [tensor for layer in self.layers for tensor in cache.read(layer)]

    def _strayed(
        self, before: list[NDArray[np.float32]], after: list[NDArray[np.float32]], lengths: Sequence[int], new: int
    ) -> int:
        """Slots that changed although they were not to be written."""
        count = 0
        for b, a in zip(before, after, strict=True):
            changed = (b != a).any(axis=(1, 3))
            for row, n in enumerate(lengths):
                changed[row, n : n + new] = False
            count += int(changed.sum())
        return count

    def _prefill(self, rows: Sequence[Sequence[int]], cache: KVCache, every_position: bool = False) -> NDArray[np.float32]:
        width = max(map(len, rows))
        ids = np.zeros((len(rows), width), dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        if every_position:
            positions = np.tile(np.arange(width, dtype=np.int64), (len(rows), 1))
        else:
            positions = np.array([[len(row) - 1] for row in rows], dtype=np.int64)
        return self.backend.prefill(ids, positions, cache)

    def _decode(self, rows: Sequence[Sequence[int]], lengths: Sequence[int], cache: KVCache) -> NDArray[np.float32]:
        """Rows of one width; logits at every new token."""
        ids = np.array(rows, dtype=np.int64)
        positions = np.tile(np.arange(ids.shape[1], dtype=np.int64), (len(rows), 1))
        return self.backend.decode(ids, np.array(lengths, dtype=np.int64), positions, cache)


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


def _worse(a: float, b: float) -> float:
    """The larger one; NaN wins, because Python's max may lose it."""
    return float("nan") if np.isnan(a) or np.isnan(b) else max(a, b)
