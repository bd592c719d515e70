"""What runs where: the profile of a piece, the pieces of a prompt, the rows of a call, when a step is captured. No TensorRT."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tformer_deploy.bundle.engine_record import REBUILD
from tformer_deploy.bundle.signature import cache_names
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

ALIGNMENT = 256  # of every address that TensorRT is given


@dataclass(frozen=True)
class ProfileShape:
    """What one optimization profile takes.

    Attributes:
        plan: Number of its plan.
        index: Its number in that plan.
        name: As the record calls it.
        max_rows: Most rows; one row is always taken.
        tokens: Least and most new tokens a row.
        positions: Most positions a row that one call gives logits of.
        takes_past: Whether rows may hold tokens already; a plan of the prefill graph begins at slot 0.
    """

    plan: int
    index: int
    name: str
    max_rows: int
    tokens: tuple[int, int]
    positions: int
    takes_past: bool


@dataclass(frozen=True)
class Piece:
    """New tokens ``start … stop - 1`` of every row, and the profile that runs them."""

    profile: ProfileShape
    start: int
    stop: int


def pieces(profiles: Sequence[ProfileShape], tokens: int, fresh: bool) -> list[Piece]:
    """Cuts ``tokens`` new tokens a row into calls; none is padded, for padding is written too and may not fit the cache.

    A piece goes to the smallest profile that takes it whole, for fresh rows one of the prefill graph, else to the largest that it fills, at last token by token.

    Args:
        profiles: Of the engine; one takes a single token after others.
        tokens: New tokens a row, at least 1.
        fresh: The rows hold nothing yet.
    """
    found: list[Piece] = []
    done = 0
    while done < tokens:
        left = tokens - done
        usable = [p for p in profiles if p.takes_past or (fresh and done == 0)]
        whole = [p for p in usable if p.tokens[0] <= left <= p.tokens[1]]
        if whole:
            # A plan of the prefill graph computes a square; others look at the whole cache.
            chosen, width = min(whole, key=lambda p: (p.takes_past, p.tokens[1])), left
        else:
            chosen = max((p for p in usable if p.tokens[1] <= left), key=lambda p: p.tokens[1])
            width = chosen.tokens[1]
        found.append(Piece(chosen, done, done + width))
        done += width
    return found


def row_groups(rows: int, max_rows: int) -> list[tuple[int, int]]:
    """Rows ``start … stop - 1`` of each call, as even as they can be: 9 of at most 8 are 5 and 4."""
    calls = -(-rows // max_rows)
    edges = [rows * i // calls for i in range(calls + 1)]
    return list(itertools.pairwise(edges))


def require_profiles(profiles: Sequence[ProfileShape]) -> None:
    """Every prompt and every step must find a profile.

    Raises:
        InputError: There is none for one new token after others.
    """
    if not any(p.takes_past and p.tokens[0] == 1 for p in profiles):
        raise InputError("The engine has no profile for one new token after others, so that nothing can be decoded.", REBUILD)


def aliased_pairs(n_layers: int, answer: Callable[[str], str | None] | None) -> tuple[tuple[str, str], ...]:
    """(past, present) names that share one buffer, in the order of the caches.

    Args:
        n_layers: Of the model.
        answer: The engine's own: output → the input whose buffer it writes; None where this TensorRT cannot be asked, and the
            pairs follow from the graph's signature.

    Raises:
        InputError: The engine pairs them otherwise: a cache would be copied, or written where nobody reads it.
    """
    pairs = tuple(zip(cache_names(n_layers, "past_key_values"), cache_names(n_layers, "present"), strict=True))
    for past, present in pairs if answer is not None else ():
        found = answer(present) if answer is not None else past
        if found != past:
            words = f"shares the buffer of {found}" if found else "has a buffer of its own"
            raise InputError(
                f"The engine's output {present} {words}; expected {past}'s, so that the cache is updated in place.", REBUILD
            )
    return pairs


def layout(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Offsets in one block for parts of these sizes, each a multiple of :data:`ALIGNMENT`, and the block's size."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


Action = Literal["bind", "capture", "replay", "plain"]


class StepPlan:
    """When a profile's shapes and addresses are set, when its step is captured, when the captured one runs again.

    A context holds one set of shapes and addresses, and a captured graph is right for those alone. The first call of a set
    runs plainly (the runtime may still allocate or choose kernels), the second is captured, later ones replay.

    Args:
        captures: False where calls are never captured here: prefill, whose shapes seldom repeat, and RTX, which does it itself.
    """

    def __init__(self, captures: bool) -> None:
        self._captures, self._captured = captures, False
        self._key: Hashable | None = None

    def next(self, key: Hashable) -> Action:
        """What to do for a call of these shapes and addresses. After ``bind``, a graph captured before is stale."""
        if key != self._key:
            self._key, self._captured = key, False
            return "bind"
        if not self._captures:
            return "plain"
        if self._captured:
            return "replay"
        self._captured = True
        return "capture"

    def give_up(self) -> None:
        """This context cannot be captured; every later call runs plainly."""
        self._captures = self._captured = False

    def forget(self) -> None:
        """A call failed: the next one sets everything again."""
        self._key, self._captured = None, False
