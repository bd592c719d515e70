"""Prompt buckets from the lengths that are expected: a simple rule.

Each bucket is a prefill profile; a batch runs in the smallest one that holds its longest prompt. Half of the prompts fit
into the first, nine in ten into the second, all into the last; lengths are rounded up to multiples of 64, above 512 to
multiples of 128, so that two buckets lie at least that far apart, but for one that is cut to the capacity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tformer_deploy.errors import InputError, escaped
from tformer_deploy.strict_json import parse_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_QUANTILES = (50, 90, 100)
_FINE, _COARSE, _COARSE_FROM = 64, 128, 512
_FILE_BYTES = 64 * 2**20
_DIGITS = 10
_FIELDS = ("prompt_tokens", "length", "input_ids")


def buckets_for(lengths: Sequence[int], capacity: int) -> tuple[int, ...]:
    """At most three rising edges, the last of which holds every length.

    Args:
        lengths: Tokens of each expected prompt, at least one.
        capacity: Slots of a cache row; an edge is cut to it.

    Raises:
        InputError: A length is above the capacity, or there is none.
    """
    if not lengths:
        raise InputError("There is no length to derive prompt buckets from.", "Give a file with at least one.")
    ordered = sorted(lengths)
    if ordered[-1] > capacity:
        above = sum(length > capacity for length in ordered)
        raise InputError(
            f"{above} of {len(ordered)} prompts are longer than the capacity, {capacity}; the longest has {ordered[-1]} tokens.",
            f"Give --capacity {ordered[-1] + 1} or more, or leave those prompts out.",
        )
    return tuple(sorted({min(_rounded(_quantile(ordered, q)), capacity) for q in _QUANTILES}))


def read_lengths(path: Path) -> list[int]:
    """Lengths from a file: a whole number a line, or a JSON object a line with ``prompt_tokens``, ``length`` or ``input_ids``.

    Raises:
        InputError: It cannot be read, or a line is something else; the line's number is in the message.
    """
    place = escaped(str(path))
    if not path.is_file():
        raise InputError(f"The file of lengths {place} is no file.", "Name a file with a length a line.")
    if (size := path.stat().st_size) > _FILE_BYTES:
        raise InputError(f"The file of lengths {place} has {size} bytes; at most {_FILE_BYTES} are read.", "Name a part of it.")
    lengths = []
    text = path.read_bytes().decode("utf-8-sig", errors="replace")
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            lengths.append(_length(line.strip(), f"{place}, line {number}"))
    if not lengths:
        raise InputError(f"The file of lengths {place} holds none.", "Give a length a line.")
    return lengths


def _length(line: str, place: str) -> int:
    value: Any = None
    if line.startswith("{"):
        value = parse_json(line.encode(), place)
    elif line.isascii() and line.isdigit() and len(line) <= _DIGITS:
        value = int(line)
    if isinstance(value, dict):
        value = next((value[field] for field in _FIELDS if field in value), None)
        value = len(value) if isinstance(value, list) else value
    if type(value) is not int or not 1 <= value < 2**31:
        raise InputError(
            f"{place}: {escaped(line[:100])} is no length; expected a whole number from 1, or an object with {', '.join(_FIELDS)}.",
            "Correct the line or leave it out.",
        )
    return value


def _quantile(ordered: Sequence[int], percent: int) -> int:
    """The smallest value that at least ``percent`` of 100 do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


def _rounded(length: int) -> int:
    step = _FINE if length <= _COARSE_FROM else _COARSE
    return -(-length // step) * step
