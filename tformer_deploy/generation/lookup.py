"""Prompt lookup: what followed the last few tokens when they stood in the row before is a guess at what follows now.

Source: Saxena 2023, "Prompt Lookup Decoding".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Longest run of last tokens that is looked for, and the shortest that counts.
LONGEST, SHORTEST = 3, 2


def guess(history: Sequence[int], count: int) -> list[int]:
    """At most ``count`` tokens that may follow ``history``; none where its end did not occur before.

    The longest run wins, and of several places the last one.
    """
    for size in range(LONGEST, SHORTEST - 1, -1):
        end = list(history[-size:])
        if len(end) < size:
            continue
        for start in range(len(history) - size - 1, -1, -1):
            if history[start] == end[0] and list(history[start : start + size]) == end:
                return list(history[start + size : start + size + count])
    return []
