"""JSON as its standard means it: no duplicate keys, no NaN or Infinity, no number or nesting that breaks a reader."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from tformer_deploy.errors import InputError, escaped

_DIGITS = 40  # no field needs more; Python's own limit of 4300 ends in an untranslated ValueError
_DEEPEST = 100  # objects and lists in one another; printing a value must not exhaust the stack either
VALUES = 500_000  # a value that takes two bytes in a file can take some hundred in memory
_HINT = "Get the file again from where it came."


def parse_json(content: bytes, place: str, values: int = VALUES) -> Any:
    """The value that ``content`` (UTF-8) stands for.

    Args:
        content: The whole text.
        place: File name for messages.
        values: Numbers, strings, lists, objects … it may hold at most, roughly; bounds the memory.

    Raises:
        InputError: It is not strict JSON; the message says where (byte offset or key).
    """
    if (found := content.count(b",") + content.count(b"[") + content.count(b"{")) > values:
        raise InputError(f"{place} holds about {found} values; at most {values} are read.", "Check that it is the right file.")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{place} is not UTF-8 text: byte {error.start}.", _HINT) from None
    hooks = _Hooks(place)
    try:
        value = json.loads(
            text, object_pairs_hook=hooks.object, parse_constant=hooks.constant, parse_float=hooks.float, parse_int=hooks.int
        )
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode("utf-8"))
        what = f"is not JSON: {error.msg.removesuffix(' at')} at byte {offset}" if text.strip() else "is empty (byte 0)"
        raise InputError(f"{place} {what}.", _HINT) from None
    except RecursionError:
        raise _too_deep(text, place) from None
    if hooks.refused is not None:
        raise InputError(f"{place} {hooks.refused}.", _HINT)
    if _is_deep(value):
        raise _too_deep(text, place)
    return value


def parse_object(content: bytes, place: str, values: int = VALUES) -> dict[str, Any]:
    """As :func:`parse_json`; the value must be an object, and every string in it text that can be written again.

    Raises:
        InputError: It is not strict JSON, not an object, or holds half of a surrogate pair.
    """
    value = parse_json(content, place, values)
    if not isinstance(value, dict):
        raise InputError(f"{place} holds a JSON {type(value).__name__}; expected an object.", _HINT)
    if b"\\ud" in content.lower():
        _refuse_surrogates(value, place)
    return value


class _Number:
    """Stands for a refused number until the key that holds it is known."""

    def __init__(self, word: str) -> None:
        self.word = word if len(word) <= 20 else f"{word[:20]}… ({len(word)} characters)"


class _Hooks:
    """What ``json.loads`` calls; ``refused`` says what was wrong first."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.refused: str | None = None

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise InputError(f"{self.place} has the key {escaped(twice)!r} twice in one object.", _HINT)
        if self.refused is not None:
            for name, value in result.items():
                if (number := _number_in(value)) is not None:
                    raise InputError(f"{self.place}: {escaped(name)} is {number.word}; expected a finite number.", _HINT)
        return result

    def constant(self, word: str) -> _Number:
        number = _Number(word)
        self.refused = f"holds {number.word}; expected a finite number"
        return number

    def float(self, word: str) -> _Number | float:
        value = float(word)
        return value if math.isfinite(value) else self.constant(word)

    def int(self, word: str) -> _Number | int:
        return int(word) if len(word) <= _DIGITS else self.constant(word)


def _number_in(value: Any) -> _Number | None:
    """A refused number in a value, however deep its lists are; of inner objects it would have been reported already."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, _Number):
            return item
        if isinstance(item, list):
            waiting += item
    return None


def _is_deep(value: Any) -> bool:
    """Whether more than ``_DEEPEST`` objects and lists lie in one another."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(_DEEPEST):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (dict, list))
        ]
    return bool(level)


def _too_deep(text: str, place: str) -> InputError:
    """Names the place where the nesting becomes too deep, and the key of the outermost object that holds it."""
    depth, key, token = 0, "", re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[\[\]{}]')
    for found in token.finditer(text):
        if found[2] and depth == 1:
            key = found[1][1:-1]
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > _DEEPEST:
            at = len(text[: found.start()].encode("utf-8"))
            where = f"{place}: {escaped(key)}" if key else place
            return InputError(f"{where} nests objects or lists more than {_DEEPEST} deep (byte {at}).", _HINT)
    return InputError(f"{place} nests objects or lists more than {_DEEPEST} deep.", _HINT)


def _refuse_surrogates(value: Any, place: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{place} has half of a surrogate pair (\\ud800 … \\udfff) in a string.", _HINT) from None
