"""Opens the files of a checkpoint: regular files only, bounded, without following a device or a FIFO into a hang."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from tformer_deploy.errors import InputError, StorageError, escaped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

_BLOCK = 1 << 22
LFS_POINTERS = (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/")


def regular_size(path: Path) -> int:
    """Bytes of the regular file at ``path`` (symbolic links are followed).

    Raises:
        InputError: There is no file, or it is a folder, FIFO, device or socket.
        StorageError: The file system refuses to say.
    """
    try:
        status = os.stat(path)
    except ValueError:
        raise InputError(f"{str(path)!r:.1000} is not a path.", "Name an existing checkpoint.") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    return _size_of_regular(path, status)


def _size_of_regular(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "FIFO, socket or device"
        raise InputError(
            f"{escaped(str(path))} is a {kind}; expected a regular file.", "Replace it by the checkpoint's own file."
        )
    return status.st_size


def _unreadable(path: Path, error: OSError) -> InputError | StorageError:
    """A path that leads nowhere is the checkpoint's fault; everything else is the system's."""
    shown = escaped(str(path))
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        what = "is a symbolic link to a file that does not exist" if path.is_symlink() else "does not exist"
        return InputError(f"{shown} {what}.", "Name an existing checkpoint that is complete.")
    if error.errno == errno.ELOOP:
        return InputError(f"{shown} is a symbolic link that leads to itself.", "Replace it by the checkpoint's own file.")
    if error.errno == errno.ENAMETOOLONG:
        return InputError(f"{shown} is longer than a name may be here.", "Name an existing checkpoint.")
    return StorageError(f"{shown} cannot be read: {error.strerror}.", "Check its permissions and the disk.")


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The regular file at ``path``, open for reading, and its size.

    Raises:
        InputError: It is not a regular file, or a Git-LFS pointer.
        StorageError: Opening or reading failed.
    """
    regular_size(path)  # before it is opened, for opening alone has effects on some devices
    try:
        # What becomes a FIFO in between must not block either.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            size = _size_of_regular(path, os.fstat(descriptor))
            refuse_pointer(path, file.read(min(64, size)))
            file.seek(0)
            yield file, size
    except OSError as error:
        raise _unreadable(path, error) from None


def listing(folder: Path) -> list[str]:
    """The names in a folder, sorted.

    Raises:
        StorageError: It cannot be read.
    """
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise _unreadable(folder, error) from None


def read_small(path: Path, limit: int) -> bytes:
    """The whole file.

    Raises:
        InputError: It is not a regular file, holds more than ``limit`` bytes or is a Git-LFS pointer.
        StorageError: Reading failed.
    """
    with opened(path) as (file, size):
        if size > limit:
            raise InputError(
                f"{escaped(str(path))} holds {size} bytes; at most {limit} are read.", "Check that it is the right file."
            )
        return file.read(size)  # and not to the end: some files have none


def refuse_pointer(path: Path, start: bytes) -> None:
    """Raises InputError where ``start``, the first bytes of the file, is the text of a Git-LFS pointer."""
    if start.startswith(LFS_POINTERS):
        raise InputError(
            f"{escaped(str(path))} is a Git-LFS pointer (LFS pointer text, not the file itself).",
            "Run `git lfs pull` in its repository.",
        )


def hash_files(files: Iterable[Path]) -> str:
    """SHA-256 (hex) of the ``<sha256>  <file name>`` lines of every file, sorted by name: what ``sha256sum`` would print.

    Raises:
        StorageError: Reading failed.
    """
    lines = [f"{_hash(path)}  {path.name}\n" for path in sorted(files, key=lambda path: path.name)]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with opened(path) as (file, _):
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def replace_file(path: Path, write: Callable[[int], None]) -> None:
    """Calls ``write(descriptor)`` on a sibling file and renames it to ``path``: old or new, never half; mode as the umask says.

    Raises:
        StorageError: The disk is full, read-only …; ``path`` is as before.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(part, path)
    except OSError as error:
        raise StorageError(f"{escaped(str(path))} cannot be written: {error.strerror}.") from None
    finally:
        part.unlink(missing_ok=True)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes every byte; ``os.write`` may take fewer at a time."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view) :]
