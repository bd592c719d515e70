"""What is compared, one file a subject; every function takes a :class:`parity.candidate.Candidate` and returns its checks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.parity.comparisons.edges import edges
from tformer_deploy.parity.comparisons.greedy import greedy
from tformer_deploy.parity.comparisons.perplexity import perplexity
from tformer_deploy.parity.comparisons.ragged import batch, chunk
from tformer_deploy.parity.comparisons.slots import poisoned, reused
from tformer_deploy.parity.comparisons.two_ways import alone, one_more, two_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tformer_deploy.parity.candidate import Candidate
    from tformer_deploy.parity.gates import Check
    from tformer_deploy.parity.plan import Suite

    Comparison = Callable[[Candidate], list[Check]]

_QUICK: tuple[Comparison, ...] = (batch, chunk, alone, one_more, poisoned, greedy, perplexity)
_COMPARISONS: dict[Suite, tuple[Comparison, ...]] = {"quick": _QUICK, "full": (*_QUICK, two_turns, reused, edges)}


def compare(candidate: Candidate, suite: Suite, on_progress: Callable[[str], None] = lambda _: None) -> Iterator[Check]:
    """Every comparison of a suite that one backend is enough for, one after the other.

    Raises:
        InputError: The backend cannot run a graph.
    """
    for comparison in _COMPARISONS[suite]:
        on_progress(comparison.__name__.replace("_", " "))
        yield from comparison(candidate)
