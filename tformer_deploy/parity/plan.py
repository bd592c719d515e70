"""Which rows of ids a check uses: fixed by the model and the suite, so that every run compares the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from tformer_deploy.backends.base import FIRST_BUCKET, capacity_bucket

if TYPE_CHECKING:
    from tformer_deploy.config import ModelConfig
    from tformer_deploy.parity.text import Text

Suite = Literal["quick", "full"]
# Prompt lengths of the ragged batch; none is the traced example's (5).
_LENGTHS: dict[Suite, tuple[int, ...]] = {"quick": (9, 1, 33, 17, 24), "full": (9, 1, 129, 17, 64, 33, 127, 2)}
_STEPS: dict[Suite, int] = {"quick": 6, "full": 16}
_GREEDY = 64
# The two smallest capacities of a runtime's cache, and the model's own bound where it is no larger than this.
_LARGEST_EDGE = 512
_EDGE_STEPS = 2
# A prefill beyond a window this long takes minutes and gigabytes; a longer window is not crossed, and the report says so.
_LARGEST_WINDOW = 4096


@dataclass(frozen=True)
class EdgeRow:
    """A row whose prompt ends at the edge of a capacity, or beyond a window: its ``prompt`` first ids, and those that are decoded after it."""

    ids: tuple[int, ...]
    prompt: int

    @property
    def steps(self) -> int:
        """Ids after the prompt."""
        return len(self.ids) - self.prompt


@dataclass(frozen=True)
class Plan:
    """Rows of a check.

    Attributes:
        rows: Ids of each row: its prompt, then ``steps`` teacher-forced ones.
        lengths: Prompt length of each row.
        steps: Teacher-forced decode steps.
        capacity: Cache slots; the longest row ends exactly in the last one.
        greedy: Tokens generated greedily after the first two prompts.
        edges: Rows that end at the edge of a capacity, or beyond a window.
        text: A text of which perplexity is taken, or None.
    """

    rows: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    steps: int
    capacity: int
    greedy: int
    edges: tuple[EdgeRow, ...] = ()
    text: Text | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(row) for row in (*self.rows, *(edge.ids for edge in self.edges)))


def make_plan(config: ModelConfig, max_length: int, suite: Suite, text: Text | None = None) -> Plan:
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
    edges = []
    for prompt in _edge_lengths(limit, config.window) if suite == "full" else ():
        ids = random.integers(0, config.vocab_size, min(prompt + _EDGE_STEPS, limit))
        edges.append(EdgeRow(tuple(int(i) for i in ids), prompt))
    return Plan(tuple(rows), lengths, steps, capacity, greedy, tuple(edges), text)


def _edge_lengths(limit: int, window: int | None) -> list[int]:
    """Capacity - 1, capacity and capacity + 1 of each of the capacities that are looked at, and one more than a window."""
    capacities = {capacity_bucket(n, limit) for n in (FIRST_BUCKET, FIRST_BUCKET + 1)}
    if limit <= _LARGEST_EDGE:
        capacities.add(limit)
    lengths = {n for c in capacities for n in (c - 1, c, c + 1)}
    if window is not None and window <= _LARGEST_WINDOW:
        lengths.add(window + 1)
    return sorted(n for n in lengths if 1 <= n <= limit)
