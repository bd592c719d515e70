"""JSON as its standard means it: no duplicate keys, no NaN or Infinity, no number or nesting that breaks a reader."""

from __future__ import annotations

import json
import math
from typing import Any

from tformer_deploy.errors import InputError, escaped

_DIGITS = 40  # no field needs more; Python's own limit of 4300 ends in an untranslated ValueError
_HINT = "Get the file again from where it came."


def parse_json(content: bytes, place: str) -> Any:
    """The value that ``content`` (UTF-8) stands for.

    Args:
        content: The whole text.
        place: File name for messages.

    Raises:
        InputError: It is not strict JSON; the message says where (byte offset or key).
    """
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
        raise InputError(f"{place} nests objects or lists too deeply.", _HINT) from None
    if hooks.refused is not None:
        raise InputError(f"{place} {hooks.refused}.", _HINT)
    return value


def parse_object(content: bytes, place: str) -> dict[str, Any]:
    """As :func:`parse_json`; the value must be an object, and every string in it text that can be written again.

    Raises:
        InputError: It is not strict JSON, not an object, or holds half of a surrogate pair.
    """
    value = parse_json(content, place)
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
        for name, value in result.items():
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, _Number):
                    raise InputError(f"{self.place}: {escaped(name)} is {item.word}; expected a finite number.", _HINT)
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


def _refuse_surrogates(value: Any, place: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{place} has half of a surrogate pair (\\ud800 … \\udfff) in a string.", _HINT) from None
