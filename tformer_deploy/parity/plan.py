"""Which rows of ids a check uses: fixed by the model and the suite, so that every run compares the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from tformer_deploy.config import ModelConfig

Suite = Literal["quick", "full"]
# Prompt lengths of the ragged batch; none is the traced example's (5).
_LENGTHS: dict[Suite, tuple[int, ...]] = {"quick": (9, 1, 33, 17, 24), "full": (9, 1, 129, 17, 64, 33, 127, 2)}
_STEPS: dict[Suite, int] = {"quick": 6, "full": 16}
_GREEDY = 64


@dataclass(frozen=True)
class Plan:
    """Rows of a check.

    Attributes:
        rows: Ids of each row: its prompt, then ``steps`` teacher-forced ones.
        lengths: Prompt length of each row.
        steps: Teacher-forced decode steps.
        capacity: Cache slots; the longest row ends exactly in the last one.
        greedy: Tokens generated greedily after the first two prompts.
    """

    rows: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    steps: int
    capacity: int
    greedy: int


def make_plan(config: ModelConfig, max_length: int, suite: Suite) -> Plan:
    """The rows for a model; shorter ones where ``max_length`` is short."""
    limit = min(max_length, config.max_length)
    steps = min(_STEPS[suite], limit // 2)  # half at most: prompts that are all one token long are no ragged batch
    lengths = tuple(min(n, limit - steps) for n in _LENGTHS[suite])
    random = np.random.Generator(np.random.Philox(key=20))
    rows = [tuple(int(i) for i in random.integers(0, config.vocab_size, n + steps)) for n in lengths]
    # One row repeats a token: attention that loses its order shows there.
    rows[-1] = tuple([rows[-1][0]] * (lengths[-1] // 2) + list(rows[-1][lengths[-1] // 2 :]))
    capacity = max(lengths) + steps
    greedy = max(0, min(_GREEDY, limit - max(lengths[:2])))
    return Plan(tuple(rows), lengths, steps, capacity, greedy)
