"""Writes a folder so that its path holds nothing, the old content or the new one: never half of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from tformer_deploy.errors import StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_MARK = ".tformer-tmp-"


@contextlib.contextmanager
def new_folder(path: Path, force: bool) -> Iterator[Path]:
    """A sibling temporary folder that becomes ``path`` when the block ends without an error.

    Raises:
        UsageError: ``path`` exists and ``force`` is not given, or it is no folder.
        StorageError: Another live process is writing ``path``.
    """
    path = Path(os.path.abspath(path))
    refuse_existing(path, force)
    path.parent.mkdir(parents=True, exist_ok=True)
    _clean_siblings(path)
    temporary = path.parent / f"{path.name}{_MARK}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        _replace(temporary, path, force)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refuse_existing(path: Path, force: bool) -> None:
    """Refuses an output path that would lose something."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise UsageError(f"The output {path} exists and is no folder.", "Name another output path.")
    if any(path.iterdir()):
        if not force:
            raise UsageError(f"The output {path} exists.", "Give --force to replace it, or name another path.")
        if not (path / "manifest.json").exists():
            raise UsageError(
                f"The output {path} holds files and no manifest.json, so it is no bundle.", "Name another path; --force replaces bundles only."
            )


def write_file(path: Path, data: bytes) -> None:
    """Writes and syncs one file."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replaces one file at once: readers see the old bytes or the new."""
    temporary = path.with_name(f"{path.name}{_MARK}{os.getpid()}")
    try:
        write_file(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _replace(temporary: Path, path: Path, force: bool) -> None:
    refuse_existing(path, force)
    old = path.parent / f"{temporary.name}-old"
    if path.exists():
        path.rename(old)
    try:
        temporary.rename(path)
    except BaseException:
        if old.exists():
            old.rename(path)
        raise
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _clean_siblings(path: Path) -> None:
    """Removes what dead processes left, puts an old bundle back if one died between two renames, refuses a live one."""
    for sibling in sorted(path.parent.glob(f"{_escape(path.name)}{_MARK}*")):
        pid = sibling.name.split(_MARK, 1)[1].split("-", 1)[0]
        if pid.isdigit() and int(pid) != os.getpid() and _alive(int(pid)):
            raise StorageError(f"{path} is locked: process {pid} is writing it.", "Wait for it to end, or name another path.")
        if sibling.name.endswith("-old") and not path.exists():
            sibling.rename(path)
        else:
            shutil.rmtree(sibling, ignore_errors=True)


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
