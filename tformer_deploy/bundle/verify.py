"""Verification of a bundle's files, before any native library sees one of them."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tformer_deploy.bundle.manifest import MANIFEST, FileRecord, Manifest
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

Verify = Literal["auto", "full"]
BESIDE_THE_CORE = {"engines", "reports"}
# Smaller files are hashed at every start: that costs less than remembering them.
_REMEMBERED_FROM = 16 * 2**20
_CHUNK = 4 * 2**20


def cache_folder() -> Path:
    """Where files derived for this machine lie; may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "tformer-deploy"


def hash_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> FileRecord:
    """sha256 and size of a file, read in pieces."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return FileRecord(digest.hexdigest(), size)


def read_plain_file(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes.

    Raises:
        InputError: It is absent, too large, or no regular file (a FIFO would block).
    """
    status = _regular(path)
    if status.st_size > limit:
        raise InputError(f"{path} has {status.st_size} bytes; at most {limit} are expected.")
    return path.read_bytes()


def verify_files(root: Path, manifest: Manifest, verify: Verify) -> None:
    """Compares every core file with the manifest.

    Raises:
        InputError: A file is missing, added, of another kind, size or hash; its name is in the message.
    """
    extra = sorted(p.name for p in root.iterdir() if p.name not in {*manifest.files, MANIFEST, *BESIDE_THE_CORE})
    if extra:
        raise InputError(f"{root} holds files that {MANIFEST} does not name: {', '.join(map(repr, extra))}.", _SEAL)
    for name, record in sorted(manifest.files.items()):
        path = root / name
        status = _regular(path)
        if status.st_size != record.size:
            raise InputError(f"{path} has {status.st_size} bytes; {MANIFEST} says {record.size}.", _SEAL)
        if verify == "auto" and _remembered(path, status, record):
            continue
        found = hash_file(path)
        if found.sha256 != record.sha256:
            raise InputError(f"{path} has sha256 {found.sha256}; {MANIFEST} says {record.sha256}.", _SEAL)
        _remember(path, status, record)


_SEAL = "Export it again, or run `tformer-deploy seal` if you edited it on purpose."


def _regular(path: Path) -> os.stat_result:
    try:
        link, status = path.lstat(), path.stat()
    except FileNotFoundError:
        raise InputError(f"{path} is missing.", "Export the bundle again.") from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is no regular file.", "Copy the bundle's files themselves into its folder.")
    if stat.S_ISLNK(link.st_mode):
        raise InputError(f"{path} is a symbolic link, which ONNX Runtime refuses.", "Copy it with `cp -L`.")
    return status


def _entry(path: Path) -> Path:
    return cache_folder() / "verified" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()


def _identity(status: os.stat_result, record: FileRecord) -> list[int | str]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, record.sha256]


def _remembered(path: Path, status: os.stat_result, record: FileRecord) -> bool:
    if status.st_size < _REMEMBERED_FROM:
        return False
    try:
        return bool(json.loads(_entry(path).read_text("ascii")) == _identity(status, record))
    except (OSError, ValueError):
        return False


def _remember(path: Path, status: os.stat_result, record: FileRecord) -> None:
    if status.st_size < _REMEMBERED_FROM:
        return
    entry = _entry(path)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = entry.with_name(f"{entry.name}.{os.getpid()}")
        temporary.write_text(json.dumps(_identity(status, record)), "ascii")
        temporary.replace(entry)
    except OSError:
        return  # a cache that cannot be written only costs time
