"""Batches of similar lengths: what is padded is computed, so rows that share a batch should be about as long."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import TypeVar

from tformer_deploy.errors import InputError

Item = TypeVar("Item", bound=Sized)


def bucket_by_length(sequences: Sequence[Item], bucket_size: int = 64) -> list[list[Item]]:
    """Sorts ``sequences`` by length, shortest first, and cuts them into buckets of at most ``bucket_size``.

    Sequences of one length keep their order. The sequences themselves are returned, not copies; none is lost or repeated.

    Raises:
        InputError: (a ValueError) ``bucket_size`` is below one.
    """
    if bucket_size < 1:
        raise InputError(f"bucket_size is {bucket_size}; expected at least 1.")
    ordered = sorted(sequences, key=len)
    return [ordered[i : i + bucket_size] for i in range(0, len(ordered), bucket_size)]
