"""The benches of sampling and stopping: a fault in choosing tokens, or in ending a row, against answers that are written down.

Neither has anything to do with a model, and ``check`` compares logits; so these count as oracle tests.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache

from sampling_rule import draws, goldens, slow_sample
from scripted import EOS, request, scripted

from mutation.mutant import Metric, Mutant, Reading, Readings
from mutation.oracle import Fault
from tformer_deploy.errors import TformerError
from tformer_deploy.generation import Completion, Generator, Request, sampling

GOLDEN_IDS = ("sampling, published ids", "cases that differ")
SLOW_RULE = ("sampling, the rule in plain Python", "draws that differ")
COMPLETIONS = ("stopping, completions written down", "requests that differ")
SAMPLING_METRICS: tuple[Metric, ...] = (GOLDEN_IDS, SLOW_RULE)
_DRAWS = 300


@dataclass(frozen=True)
class GoldenMutant(Mutant):
    """A fault in ``generation/``.

    Attributes:
        fault: Puts it in while it is entered.
    """

    fault: Fault = field(default=nullcontext, compare=False)


class GoldenBench:
    """Counts answers that differ; what is written down differs in none."""

    def __init__(self) -> None:
        self.controls: dict[str, Readings] = {}

    def control(self, mutant: Mutant) -> Readings:
        """Nothing changed."""
        if mutant.site not in self.controls:
            self.controls[mutant.site] = _readings(mutant.site)
        return self.controls[mutant.site]

    def measure(self, mutant: Mutant) -> Readings:
        """The fault put in."""
        assert isinstance(mutant, GoldenMutant)
        self.control(mutant)
        with mutant.fault():
            return _readings(mutant.site)


def _readings(site: str) -> Readings:
    counts = _sampling() if site == "sampling" else {COMPLETIONS: _stopping()}
    return {metric: Reading(count, "== 0", count != 0) for metric, count in counts.items()}


def _sampling() -> dict[Metric, int]:
    differ = 0
    for case, logits in goldens():
        options = sampling.SamplingOptions(**case["options"])
        differ += case["ids"] != [sampling.sample(logits, options, case["seed"], p, case["history"]) for p in range(8)]
    found = [sampling.sample(logits, options, seed, 7, history) for seed, (logits, options, history) in enumerate(draws(_DRAWS))]
    return {GOLDEN_IDS: differ, SLOW_RULE: sum(a != b for a, b in zip(found, _by_the_rule(), strict=True))}


@cache
def _by_the_rule() -> tuple[int, ...]:
    return tuple(slow_sample(logits, options, seed, 7, history) for seed, (logits, options, history) in enumerate(draws(_DRAWS)))


# Ids 258 … 262 are "ab", "a", "b", "xa", "by"; after its script a row goes on with an id of no text.
_A, _B, _XA, _BY = 259, 260, 261, 262
_SILENT = 299
# What a row's model says, what is asked of it, and the completion.
_ROWS: list[tuple[list[int], Request, Completion]] = [
    ([_A, _B, EOS, _A], request(0), Completion((_A, _B, EOS), "ab", "stop")),
    ([_A, 5, _B], request(1), Completion((_A, 5), "a", "stop")),  # the second id that ends a text
    ([EOS], request(2), Completion((EOS,), "", "stop")),
    ([_A, _A, _A, _A], request(3, max_new_tokens=3), Completion((_A, _A, _A), "aaa", "length")),
    ([_A], request(4, max_new_tokens=0), Completion((), "", "length")),
    ([_XA, _BY, _A, EOS], request(5, stop=("ab",)), Completion((_XA, _BY), "x", "stop")),  # over two tokens
    ([_A, _B, EOS], request(6, max_new_tokens=2, stop=("ab",)), Completion((_A, _B), "", "stop")),  # with the last token
    ([_XA, _BY, _A, EOS], request(7, stop=("y", "xab")), Completion((_XA, _BY), "", "stop")),  # the one that begins first
    ([_A, EOS], request(8, max_new_tokens=2), Completion((_A, EOS), "a", "stop")),
    ([_A, _A], request(9), Completion((_A, _A, *[_SILENT] * 7), "aa", "length")),  # as long as a row may be
    ([_B, _XA, EOS], request(10, stop=("zz",)), Completion((_B, _XA, EOS), "bxa", "stop")),
    ([_A, _B], Request((11, EOS), max_new_tokens=1), Completion((_B,), "b", "length")),  # one that ended before
]  # fmt: skip
_MAX_LENGTH = 10


def _stopping() -> int:
    """Completions that differ, all together in few slots; a fault that makes generation fail counts as all."""
    generator: Generator = scripted(*(script for script, _, _ in _ROWS), eos=(EOS, 5), max_length=_MAX_LENGTH)
    try:
        found = generator.generate([asked for _, asked, _ in _ROWS], max_batch=4)
    except TformerError:
        return len(_ROWS)
    return sum(a != wanted for a, (_, _, wanted) in zip(found, _ROWS, strict=True))
