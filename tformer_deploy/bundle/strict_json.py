"""JSON from strangers: duplicate keys, NaN, huge numbers and deep nesting are refused by name."""

from __future__ import annotations

import json
from typing import Any

from tformer_deploy.errors import InputError

MAX_DEPTH = 64
MAX_DIGITS = 400


def load_json(data: bytes, place: str) -> Any:
    """Parses ``data`` strictly.

    Args:
        data: UTF-8 text.
        place: What to call it in an error, usually a file's name.

    Raises:
        InputError: It is not JSON that every parser reads in the same way.
    """
    if not data.strip():
        raise InputError(f"{place} is empty.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise InputError(f"{place} is not UTF-8: byte {e.start} is 0x{data[e.start]:02x}.") from None
    _limit_depth(text, place)

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise InputError(f"{place} has the key {key!r} twice.")
            result[key] = value
        return result

    def constant(name: str) -> Any:
        raise InputError(f"{place} has the value {name}, which JSON does not know.")

    def integer(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise InputError(f"{place} has a number of {len(digits)} digits.")
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits)
        if value in (float("inf"), float("-inf")):
            raise InputError(f"{place} has the number {digits[:20]}, which no float holds.")
        return value

    try:
        return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=constant, parse_int=integer, parse_float=real)
    except json.JSONDecodeError as e:
        raise InputError(f"{place} is not JSON: {e.msg} at byte {len(text[: e.pos].encode())}.") from None


def _limit_depth(text: str, place: str) -> None:
    depth, quoted, escaped = 0, False, False
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    for character in text:
        if quoted:
            quoted, escaped = escaped or character != '"', not escaped and character == "\\"
        elif character == '"':
            quoted = True
        elif character in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise InputError(f"{place} is nested more than {MAX_DEPTH} deep.")
        elif character in "]}":
            depth -= 1
