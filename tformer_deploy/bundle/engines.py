"""Engines beside a bundle's core: their sealed record ``engine.json``, found and verified without TensorRT.

``<bundle>/engines/<flavour>-<version>-<target>-<dtype>-c<capacity>[-<layout>]/`` holds the plans and ``engine.json``, which
names the core that they were compiled from. A plan is executable: nothing may hand it to a runtime before
:func:`require_engine` has compared it with its record. The record's own dataclasses are in ``engine_record``.
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
from tformer_deploy.errors import CapabilityError, InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tformer_deploy.bundle.bundle import Bundle

__all__ = [
    "ENGINES", "FLAVOURS", "GRAPH", "REBUILD", "SIDECAR", "DerivedGraph", "EngineEntry", "EnginePlan", "EngineProfile", "EngineRecord",
    "dump_record", "list_engines", "parse_record", "plan_file", "read_engine", "require_engine",
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
    if record.graph is not None:
        path = folder / GRAPH / MANIFEST
        found = hash_file(path).sha256 if path.is_file() else "none: it is missing"
        if found != record.graph.core_sha256:
            raise InputError(f"{path} has sha256 {found}; {SIDECAR} says {record.graph.core_sha256}.", _rebuild(bundle))
    for plan in record.plans:
        found = hash_file(folder / plan.file).sha256
        if found != plan.sha256:
            raise InputError(f"{folder / plan.file} has sha256 {found}; {SIDECAR} says {plan.sha256}.", _rebuild(bundle))
    return record


def require_engine(
    bundle: Bundle, flavour: str, version: str, compute_capability: str | None = None
) -> tuple[Path, EngineRecord]:
    """The verified engine that a runtime may deserialise.

    Args:
        bundle: Whose engine.
        flavour: ``rtx`` or ``tensorrt``.
        version: The installed runtime's version.
        compute_capability: The GPU's, for instance ``8.9``; None: not asked.

    Returns:
        The engine's folder and its record.

    Raises:
        CapabilityError: There is none for this flavour, version and GPU.
        InputError: There is one, and it is damaged or compiled from another core.
    """
    # One that has both phases goes before one that only decodes.
    entries = sorted(list_engines(bundle), key=lambda entry: entry.record is not None and entry.record.layout == "decode")
    reasons = []
    for entry in entries:
        record = entry.record
        if record is None or entry.fault is not None:
            reasons.append(f"{entry.folder}: {entry.fault}")
        elif record.flavour != flavour:
            reasons.append(f"{entry.folder} is for the flavour {record.flavour}, not {flavour}.")
        elif record.version != version:
            reasons.append(f"{entry.folder} is for {flavour} {record.version}; {version} is installed.")
        elif compute_capability is not None and compute_capability not in record.compute_capabilities:
            made_for = ", ".join(record.compute_capabilities)
            reasons.append(f"{entry.folder} runs on compute capability {made_for}; this GPU has {compute_capability}.")
        else:
            path = bundle.path / ENGINES / entry.folder
            return path, read_engine(bundle, path)
    damaged = [r for e, r in zip(entries, reasons, strict=True) if e.fault is not None]
    if damaged and len(damaged) == len(entries):
        raise InputError(f"{bundle.path} has no engine that can be used: {' '.join(reasons)}", _rebuild(bundle))
    found = " ".join(reasons) if reasons else "There is none at all."
    raise CapabilityError(f"{bundle.path} has no engine for {flavour} {version}. {found}", _rebuild(bundle))


def _rebuild(bundle: Bundle) -> str:
    return f"Run `{build_command(bundle)} --force`."


def _entry(bundle: Bundle, folder: Path) -> EngineEntry:
    try:
        record = _read_record(bundle, folder, foreign=True)
    except (InputError, OSError) as e:
        fault = e.message if isinstance(e, InputError) else f"{e.strerror} ({e.filename})."
        return EngineEntry(folder.name, "?", "?", f"cannot be used: {fault} {_rebuild(bundle)}", fault, None)
    stale = None if record.core_sha256 == bundle.core_sha256 else _foreign(folder, bundle, record)
    return EngineEntry(
        folder.name,
        record.flavour,
        record.version,
        record.summary if stale is None else f"cannot be used: {stale} {_rebuild(bundle)}",
        stale,
        record,
    )


def _read_record(bundle: Bundle, folder: Path, foreign: bool = False) -> EngineRecord:
    """The record, once every plan is there in its size; ``foreign`` lets one of another core pass."""
    if not folder.is_dir() or folder.is_symlink():
        raise InputError(f"{folder} is no folder of an engine.", _rebuild(bundle))
    record = parse_record(read_plain_file(folder / SIDECAR, _SIDECAR_LIMIT), str(folder / SIDECAR))
    if folder.name != record.name:
        raise InputError(f"{folder} holds the engine {record.name}.", _rebuild(bundle))
    for plan in record.plans:
        path = folder / plan.file
        try:
            status = path.lstat()
        except FileNotFoundError:
            raise InputError(f"{path} is missing.", _rebuild(bundle)) from None
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is no regular file.", _rebuild(bundle))
        if status.st_size != plan.size:
            raise InputError(f"{path} has {status.st_size} bytes; {SIDECAR} says {plan.size}.", _rebuild(bundle))
    if not foreign and record.core_sha256 != bundle.core_sha256:
        raise InputError(_foreign(folder, bundle, record), _rebuild(bundle))
    return record


def _foreign(folder: Path, bundle: Bundle, record: EngineRecord) -> str:
    return f"{folder} was compiled from the core {record.core_sha256[:12]}; this bundle's is {bundle.core_sha256[:12]}."
