"""Reads the fields of a sidecar one by one; what nobody read is refused at the end."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 2**53


class Fields:
    """One JSON object whose fields are taken by name and kind.

    Args:
        raw: The object.
        place: What to call it in an error.

    Every method raises :class:`InputError` where the field is absent or of another kind.
    """

    def __init__(self, raw: dict[str, Any], place: str) -> None:
        self.raw, self.place, self.taken = raw, place, set[str]()

    def _take(self, name: str) -> Any:
        if name not in self.raw:
            raise InputError(f"{self.place} lacks the field {name}.")
        self.taken.add(name)
        return self.raw[name]

    def _refuse(self, name: str, expected: str) -> InputError:
        return InputError(f"{self.place}: {name} is {str(self.raw[name])[:100]!r}; expected {expected}.")

    def finish(self) -> None:
        """Refuses fields that nobody took."""
        if unknown := sorted(set(self.raw) - self.taken):
            raise InputError(f"{self.place} has unknown fields: {', '.join(unknown)[:200]}.")

    def absent(self, name: str) -> bool:
        """True where the field is null."""
        return self._take(name) is None

    def word(self, name: str) -> str:
        """A short name that is safe in a path."""
        value = self._take(name)
        if not isinstance(value, str) or not _WORD.fullmatch(value):
            raise self._refuse(name, "a short name")
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """At least one short name."""
        value = self._list(name)
        if not value or not all(isinstance(v, str) and _WORD.fullmatch(v) for v in value):
            raise self._refuse(name, "a list of short names")
        return tuple(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """Any number of sentences."""
        value = self._list(name)
        if not all(isinstance(v, str) for v in value):
            raise self._refuse(name, "a list of sentences")
        return tuple(value)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of some words."""
        value = self._take(name)
        if value not in choices:
            raise self._refuse(name, f"one of {', '.join(choices)}")
        return str(value)

    def sha256(self, name: str) -> str:
        """64 hex digits."""
        value = self._take(name)
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            raise self._refuse(name, "a sha256 in hex")
        return value

    def whole(self, name: str) -> int:
        """A whole number from 1."""
        value = self._take(name)
        if type(value) is not int or not 1 <= value <= _LARGEST:
            raise self._refuse(name, "a whole number from 1")
        return value

    def range(self, name: str) -> tuple[int, int, int]:
        """Least, expected, most: whole numbers from 1 that do not fall."""
        value = self._list(name)
        if len(value) != 3 or any(type(v) is not int or not 1 <= v <= _LARGEST for v in value) or value != sorted(value):
            raise self._refuse(name, "least, expected and most")
        return value[0], value[1], value[2]

    def counts(self, name: str) -> dict[str, int]:
        """Short name → whole number from 1."""
        fields = self.object(name)
        if not all(_WORD.fullmatch(key) for key in fields.raw):
            raise self._refuse(name, "counts by short names")
        return {key: fields.whole(key) for key in fields.raw}

    def pairs(self, name: str) -> dict[str, tuple[float, float]]:
        """Name → two numbers."""
        pairs = {}
        for key, value in self.object(name).raw.items():
            if not isinstance(value, list) or len(value) != 2 or any(type(v) not in (int, float) for v in value):
                raise self._refuse(name, "pairs of numbers")
            pairs[key] = (float(value[0]), float(value[1]))
        return pairs

    def object(self, name: str) -> Fields:
        """An object inside this one."""
        value = self._take(name)
        if not isinstance(value, dict):
            raise self._refuse(name, "an object")
        return Fields(value, f"{self.place}: {name}")

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        value = self._list(name)
        if not all(isinstance(v, dict) for v in value):
            raise self._refuse(name, "a list of objects")
        return [Fields(v, f"{self.place}: {name}[{i}]") for i, v in enumerate(value)]

    def _list(self, name: str) -> list[Any]:
        value = self._take(name)
        if not isinstance(value, list):
            raise self._refuse(name, "a list")
        return value
