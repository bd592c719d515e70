"""Engines beside a bundle's core: their sealed record ``engine.json``, found and verified without TensorRT.

``<bundle>/engines/<flavour>-<version>-<target>-<dtype>-c<capacity>[-<layout>]/`` holds the plans and ``engine.json``, which
names the core that they were compiled from. A plan is executable: nothing may hand it to a runtime before its bytes, and the
graph that it was compiled from, were compared with the record. The record's own dataclasses are in ``engine_record``; which
engine fits a machine is decided in ``engine_choice``.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tformer_deploy.bundle.engine_record import (
    ENGINES,
    FLAVOURS,
    GRAPH,
    REBUILD,
    SIDECAR,
    DerivedGraph,
    EnginePlan,
    EngineProfile,
    EngineRecord,
    dump_record,
    parse_record,
    plan_file,
)
from tformer_deploy.bundle.fusable import build_command
from tformer_deploy.bundle.manifest import MANIFEST
from tformer_deploy.bundle.verify import hash_file, read_plain_file
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tformer_deploy.bundle.bundle import Bundle

__all__ = [
    "ENGINES", "FLAVOURS", "GRAPH", "REBUILD", "SIDECAR", "DerivedGraph", "EngineEntry", "EnginePlan", "EngineProfile", "EngineRecord",
    "dump_record", "list_engines", "parse_record", "plan_file", "read_engine", "rebuild",
    "verify_graph",
]  # fmt: skip
_SIDECAR_LIMIT = 4 * 2**20


@dataclass(frozen=True)
class EngineEntry:
    """One folder under ``engines/``, good or not.

    Attributes:
        folder: Its name.
        flavour: From the record, ``?`` without one.
        version: From the record, ``?`` without one.
        summary: One line for a reader.
        fault: Why it cannot be used; None where its record is good, belongs to this core and the plans' sizes agree.
        record: The record, where it can be read.
    """

    folder: str
    flavour: str
    version: str
    summary: str
    fault: str | None
    record: EngineRecord | None


def list_engines(bundle: Bundle) -> list[EngineEntry]:
    """Every engine beside the core, in the order of their names; plans are not hashed, only measured."""
    folder = bundle.path / ENGINES
    if not folder.is_dir():
        return []
    return [_entry(bundle, p) for p in sorted(folder.iterdir()) if not p.name.startswith(".")]


def read_engine(bundle: Bundle, folder: Path) -> EngineRecord:
    """The record of one engine after comparing every plan's size and hash, the core and the derived graph with it.

    Raises:
        InputError: The record or a plan is damaged, or it was compiled from another core or graph.
    """
    record = _read_record(bundle, folder)
    verify_graph(bundle, folder, record)
    for plan in record.plans:
        found = hash_file(folder / plan.file).sha256
        if found != plan.sha256:
            raise InputError(f"{folder / plan.file} has sha256 {found}; {SIDECAR} says {plan.sha256}.", rebuild(bundle))
    return record


def verify_graph(bundle: Bundle, folder: Path, record: EngineRecord) -> None:
    """Compares the manifest of the derived graph, where the engine has one, with the record.

    Raises:
        InputError: It is missing, or another.
    """
    if record.graph is None:
        return
    path = folder / GRAPH / MANIFEST
    found = hash_file(path).sha256 if path.is_file() else "none: it is missing"
    if found != record.graph.core_sha256:
        raise InputError(f"{path} has sha256 {found}; {SIDECAR} says {record.graph.core_sha256}.", rebuild(bundle))


def rebuild(bundle: Bundle) -> str:
    """The command that makes an engine for what is here."""
    return f"Run `{build_command(bundle)} --force`."


def _entry(bundle: Bundle, folder: Path) -> EngineEntry:
    try:
        record = _read_record(bundle, folder, foreign=True)
        verify_graph(bundle, folder, record)
    except (InputError, OSError) as e:
        fault = e.message if isinstance(e, InputError) else f"{e.strerror} ({e.filename})."
        return EngineEntry(folder.name, "?", "?", f"cannot be used: {fault} {rebuild(bundle)}", fault, None)
    stale = None if record.core_sha256 == bundle.core_sha256 else _foreign(folder, bundle, record)
    return EngineEntry(
        folder.name,
        record.flavour,
        record.version,
        record.summary if stale is None else f"cannot be used: {stale} {rebuild(bundle)}",
        stale,
        record,
    )


def _read_record(bundle: Bundle, folder: Path, foreign: bool = False) -> EngineRecord:
    """The record, once every plan is there in its size; ``foreign`` lets one of another core pass."""
    if not folder.is_dir() or folder.is_symlink():
        raise InputError(f"{folder} is no folder of an engine.", rebuild(bundle))
    record = parse_record(read_plain_file(folder / SIDECAR, _SIDECAR_LIMIT), str(folder / SIDECAR))
    if folder.name != record.name:
        raise InputError(f"{folder} holds the engine {record.name}.", rebuild(bundle))
    for plan in record.plans:
        path = folder / plan.file
        try:
            status = path.lstat()
        except FileNotFoundError:
            raise InputError(f"{path} is missing.", rebuild(bundle)) from None
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is no regular file.", rebuild(bundle))
        if status.st_size != plan.size:
            raise InputError(f"{path} has {status.st_size} bytes; {SIDECAR} says {plan.size}.", rebuild(bundle))
    if not foreign and record.core_sha256 != bundle.core_sha256:
        raise InputError(_foreign(folder, bundle, record), rebuild(bundle))
    return record


def _foreign(folder: Path, bundle: Bundle, record: EngineRecord) -> str:
    return f"{folder} was compiled from the core {record.core_sha256[:12]}; this bundle's is {bundle.core_sha256[:12]}."
