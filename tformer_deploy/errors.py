"""The one error a user sees: what went wrong, where, what was found and expected, and what to do next.

``cli.py`` turns a :class:`TformerError` into text and an exit code in one place. The subclasses exist only because
callers (and the exit code) tell them apart.
"""

from __future__ import annotations


class TformerError(Exception):
    """A fault that a user can act on.

    Args:
        message: What is wrong: the thing, the place, what was found, what was expected.
        hint: One imperative sentence that says how to go on.
    """

    exit_code: int = 3

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} {self.hint}"


class UsageError(TformerError):
    """A flag or an argument is wrong (exit 2)."""

    exit_code = 2


class InputError(TformerError, ValueError):
    """A checkpoint, bundle, manifest or prompts file is bad or unsupported (exit 3)."""

    exit_code = 3


class CapabilityError(TformerError):
    """This environment cannot do it: no GPU, provider, package, or an engine made for something else (exit 4)."""

    exit_code = 4


class StorageError(TformerError):
    """Reading or writing failed: disk full, read-only, locked (exit 5)."""

    exit_code = 5


class ResourceError(TformerError):
    """Memory or a time limit ran out (exit 6)."""

    exit_code = 6


_SHOWN = 1000  # characters of foreign text in a message


def escaped(text: str) -> str:
    """``text`` of foreign origin as it may stand in a message: :func:`printable`, and not without end."""
    return printable(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)")


def printable(text: str) -> str:
    """``text`` with escapes for control characters, lone surrogates and whatever else could steer a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
