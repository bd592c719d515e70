"""Verification of a bundle's files, before any native library sees one of them."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tformer_deploy.bundle.graph_file import ExternalData, read_graph_file
from tformer_deploy.bundle.manifest import MANIFEST, WEIGHTS, FileRecord, Manifest
from tformer_deploy.bundle.signature import PHASES
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

Verify = Literal["auto", "full"]
REPORTS = "reports"
BESIDE_THE_CORE = {"engines", REPORTS}
# Smaller files are hashed at every start: that costs less than remembering them.
_REMEMBERED_FROM = 16 * 2**20
# A file written to within one tick of the file system's clock keeps its times, so a fresh one is not remembered.
_SETTLED_S = 2.0
_CHUNK = 4 * 2**20
_SEAL = "Export it again, or run `tformer-deploy seal` if you edited it on purpose."
_AGAIN = "Export the bundle again."


def cache_folder() -> Path:
    """Where files derived for this machine lie; may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG standard says: ignore it
        base = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(base):  # this user has no home
        return Path(tempfile.gettempdir()) / f"tformer-deploy-{os.getuid()}"
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
    status = require_regular(path)
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
        verify_file(root / name, record, verify)


def verify_file(path: Path, record: FileRecord, verify: Verify) -> None:
    """Compares one file with its record.

    Raises:
        InputError: It is missing, or of another kind, size or hash.
    """
    status = require_regular(path)
    if status.st_size != record.size:
        raise InputError(f"{path} has {status.st_size} bytes; {MANIFEST} says {record.size}.", _SEAL)
    if verify == "auto" and remembered(path, status, record):
        return
    found = hash_file(path)
    if found.sha256 != record.sha256:
        raise InputError(f"{path} has sha256 {found.sha256}; {MANIFEST} says {record.sha256}.", _SEAL)
    remember(path, status, record)


def verify_graphs(root: Path, manifest: Manifest) -> None:
    """Refuses graphs of two exports in one bundle, and a graph that reads anything but this bundle's tensors.

    Raises:
        InputError: With the graph's name and the tensor's.
    """
    graphs = {phase: read_graph_file(root / f"{phase}.onnx") for phase in PHASES}
    for phase, graph in graphs.items():
        if graph.phase != phase:
            raise InputError(f"{root / phase}.onnx says that it is the graph {graph.phase!r}; expected {phase!r}.", _AGAIN)
        for external in graph.external:
            if fault := _external_fault(external, manifest):
                raise InputError(f"{root / phase}.onnx: tensor {external.tensor!r} {fault}", _AGAIN)
        if graph.faults:
            more = f" And {len(graph.faults) - 1} more." if len(graph.faults) > 1 else ""
            raise InputError(f"{root / phase}.onnx: {graph.faults[0]}{more}", _AGAIN)
    if graphs["prefill"].build != graphs["decode"].build:
        raise InputError(f"{root} holds prefill.onnx and decode.onnx of two different exports.", _AGAIN)


def _external_fault(external: ExternalData, manifest: Manifest) -> str | None:
    if external.location != WEIGHTS:
        return f"lies in {external.location!r}; expected {WEIGHTS}."
    record = manifest.tensors.get(external.tensor)
    if record is None:
        return f"is not in the table of {MANIFEST}."
    if (external.offset, external.length) != (record.offset, record.size):
        return f"lies at byte {external.offset}, length {external.length}; {MANIFEST} says {record.offset}, {record.size}."
    return None


def require_regular(path: Path) -> os.stat_result:
    """The status of a regular file with one name.

    Raises:
        InputError: It is absent, a link, a FIFO, a device or a folder.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise InputError(f"{path} is missing.", _AGAIN) from None
    if stat.S_ISLNK(status.st_mode):
        raise InputError(f"{path} is a symbolic link, which ONNX Runtime refuses.", "Copy the bundle with `cp -rL`.")
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is no regular file.", "Copy the bundle's files themselves into its folder.")
    if status.st_nlink > 1:
        raise InputError(
            f"{path} is a hard link: a change under its other name would change the bundle.", "Copy the bundle with `cp -r`."
        )
    return status


def _entry(path: Path, what: str) -> Path:
    return cache_folder() / what / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()


def _identity(status: os.stat_result, record: FileRecord) -> list[int | str]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, record.sha256]


def remembered(path: Path, status: os.stat_result, record: FileRecord, what: str = "verified") -> bool:
    """Whether :func:`remember` was called for this very file."""
    if status.st_size < _REMEMBERED_FROM:
        return False
    entry = _entry(path, what)
    try:
        return entry.stat().st_uid == os.geteuid() and bool(json.loads(entry.read_text("ascii")) == _identity(status, record))
    except (OSError, ValueError):
        return False


def remember(path: Path, status: os.stat_result, record: FileRecord, what: str = "verified") -> None:
    """Notes in the user's cache folder that a large file was looked at, as long as it does not change."""
    if status.st_size < _REMEMBERED_FROM or not 0 <= status.st_ctime < time.time() - _SETTLED_S:
        return
    entry = _entry(path, what)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary = entry.with_name(f"{entry.name}.{os.getpid()}")
        temporary.write_text(json.dumps(_identity(status, record)), "ascii")
        temporary.replace(entry)
    except OSError:
        return  # a cache that cannot be written only costs time
