"""Which prompts run together: those of like length, so that little is padded and short rows need no large cache."""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def plan(lengths: Sequence[int], edges: Sequence[int] = DEFAULT_EDGES) -> list[list[int]]:
    """Indices of the prompts by bucket, short buckets first and short prompts first in each.

    Args:
        lengths: Tokens of each prompt.
        edges: Ascending bucket edges: a prompt goes into the first bucket whose edge holds it; longer ones share one.
    """
    buckets: list[list[int]] = [[] for _ in range(len(edges) + 1)]
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        place = next((b for b, edge in enumerate(edges) if lengths[index] <= edge), len(edges))
        buckets[place].append(index)
    return [bucket for bucket in buckets if bucket]
