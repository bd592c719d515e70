"""Writes a folder so that its path holds nothing, the old content or the new one: never half of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from tformer_deploy.errors import StorageError, UsageError
from tformer_deploy.interrupts import signals_wait

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = ".tformer-tmp-"
_OLD = "-old"
_EXCHANGE, _AT_FDCWD = 2, -100  # renameat2(2)


@contextlib.contextmanager
def new_folder(path: Path, force: bool, marker: str = "manifest.json") -> Iterator[Path]:
    """A sibling temporary folder that becomes ``path`` when the block ends without an error.

    Args:
        path: The folder to write.
        force: Replace one that holds ``marker``.
        marker: The file that says that a folder is one of ours.

    Raises:
        UsageError: ``path`` exists and ``force`` is not given, or it is no folder.
        StorageError: Another live process is writing ``path``.
    """
    path = Path(os.path.abspath(path))
    refuse_existing(path, force, marker)
    path.parent.mkdir(parents=True, exist_ok=True)
    _clean_siblings(path)
    temporary, lock = _locked_sibling(path)
    try:
        yield temporary
        _sync_tree(temporary)
        _replace(temporary, path, force, marker)
    finally:
        # After an exchange this is the old bundle; after an error the unfinished one.
        with signals_wait():
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(lock)


def refuse_existing(path: Path, force: bool, marker: str = "manifest.json", otherwise: str = "name another path") -> None:
    """Refuses an output path that would lose something: only an empty folder, or with ``force`` one of ours, is replaced.

    ``otherwise`` says what else than ``--force`` helps.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise UsageError(f"The output {path} exists and is no folder.", f"Remove it if nobody needs it, or {otherwise}.")
    if any(path.iterdir()):
        if not force:
            raise UsageError(f"The output {path} exists.", f"Give --force to replace it, or {otherwise}.")
        if not (path / marker).exists():
            raise UsageError(
                f"The output {path} holds files and no {marker}, so this tool did not write it.",
                f"Remove it if nobody needs it, or {otherwise}; --force replaces only what this tool wrote.",
            )


def write_file(path: Path, data: bytes) -> None:
    """Writes and syncs one file."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replaces one file at once: readers see the old bytes or the new."""
    temporary = path.with_name(f"{MARK}{os.getpid()}")
    try:
        write_file(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _prefix(path: Path) -> str:
    """What the names of this output's temporary siblings begin with; short, for a name may have 255 bytes at most."""
    return f"{MARK}{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}-"


def _locked_sibling(path: Path) -> tuple[Path, int]:
    """A new empty sibling, and a descriptor that holds its lock until it is closed or the process dies."""
    while True:
        temporary = path.parent / f"{_prefix(path)}{os.getpid()}-{uuid.uuid4().hex[:8]}"
        temporary.mkdir()
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
            # Another process may take it for a dead one's before it is locked, and remove it.
            if _lock(lock) is not False and temporary.exists():
                return temporary, lock
            os.close(lock)


def _lock(descriptor: int) -> bool | None:
    """Locks a folder; False: another process holds it; None: this file system cannot lock folders."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _clean_siblings(path: Path) -> None:
    """Removes what dead processes left, puts an old bundle back if one died between two renames, refuses a live one."""
    prefix = _prefix(path)
    for sibling in sorted(p for p in path.parent.iterdir() if p.name.startswith(prefix)):
        pid = sibling.name.removeprefix(prefix).split("-", 1)[0]
        try:
            lock = os.open(sibling, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            if _in_use(sibling, lock, pid):
                raise StorageError(f"{path} is locked: process {pid} is writing it.", "Wait for it to end, or name another path.")
            if sibling.name.endswith(_OLD) and not path.exists():
                sibling.rename(path)
            else:
                shutil.rmtree(sibling, ignore_errors=True)
        finally:
            os.close(lock)


def _in_use(sibling: Path, descriptor: int, pid: str) -> bool:
    taken = _lock(descriptor)
    if taken is None or sibling.name.endswith(_OLD):  # what lies between two renames is not locked
        return pid.isdigit() and int(pid) != os.getpid() and _alive(int(pid))
    return not taken


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _replace(temporary: Path, path: Path, force: bool, marker: str) -> None:
    """Gives the finished folder its name; what was there lies at ``temporary`` then, or is gone."""
    refuse_existing(path, force, marker)
    if not path.exists():
        temporary.rename(path)
    elif not _exchange(temporary, path):
        _swap(temporary, path)
    _sync(path.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two paths in one step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _swap(temporary: Path, path: Path) -> None:
    old = temporary.with_name(temporary.name + _OLD)
    path.rename(old)
    try:
        temporary.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


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
