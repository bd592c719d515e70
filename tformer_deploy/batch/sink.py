"""Where result rows go: handed in as they finish, written in the order of the input."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, Self

from tformer_deploy.errors import StorageError, UsageError

if TYPE_CHECKING:
    from types import TracebackType


_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
_TEMPORARY = ".tformer-tmp-"


class Sink(Protocol):
    """Takes the result of each input row exactly once, in any order."""

    def put(self, index: int, row: dict[str, Any]) -> None:
        """The result of the row that stands at ``index`` in the input."""


class OrderedFile:
    """Writes rows to a temporary sibling and renames it at the end; ``-`` is stdout.

    Raises:
        UsageError: The output exists and ``force`` is False, or it is no regular file.
        StorageError: Its folder is not there.
    """

    def __init__(self, path: Path, force: bool) -> None:
        self._path, self._waiting, self._next = path, dict[int, str](), 0
        self._temporary: Path | None = None
        if str(path) != "-":
            refuse_output(path, force)
            if not path.parent.is_dir():
                raise StorageError(f"The output's folder {path.parent} is not there.", "Make it first, or name another path.")
            self._temporary = path.with_name(f"{path.name}{_TEMPORARY}{os.getpid()}")

    def __enter__(self) -> Self:
        if self._temporary is not None:
            _remove_leftovers(self._path)
        self._file: IO[bytes] = sys.stdout.buffer if self._temporary is None else self._temporary.open("wb")
        return self

    def put(self, index: int, row: dict[str, Any]) -> None:
        """See :class:`Sink`."""
        # Some readers take these characters for the end of a line.
        text = json.dumps(row, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
        self._waiting[index] = text
        while self._next in self._waiting:
            # A lone surrogate cannot be in a result: ids and prompts that hold one are refused.
            self._file.write(f"{self._waiting.pop(self._next)}\n".encode())
            self._next += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._temporary is None:
            self._file.flush()
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if kind is None:
                self._temporary.replace(self._path)
        finally:
            with contextlib.suppress(OSError):
                self._file.close()
            self._temporary.unlink(missing_ok=True)


def refuse_output(path: Path, force: bool) -> None:
    """Refuses an output file that would lose something, or that a rename would turn into another thing."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise UsageError(f"The output {path} exists and is no regular file.", "Name another output path.")
    if not force:
        raise UsageError(f"The output {path} exists.", "Give --force to replace it, or name another path.")


def _remove_leftovers(path: Path) -> None:
    """Removes what a killed run left beside the output; a run that is still alive keeps its own."""
    for leftover in path.parent.iterdir():
        name, mark, pid = leftover.name.rpartition(_TEMPORARY)
        if mark and name == path.name and pid.isdecimal() and not _alive(int(pid)):
            leftover.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    return True
