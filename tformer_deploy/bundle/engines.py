"""Engines beside a bundle's core: their sealed record ``engine.json``, found and verified without TensorRT.

``<bundle>/engines/<flavour>-<version>-<target>-<dtype>-c<capacity>/`` holds ``shared.engine`` (an executable plan) and
``engine.json``, which names the core that it was compiled from. A plan is executable: nothing may hand it to a runtime
before :func:`require_engine` has compared it with its record.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tformer_deploy.bundle.engine_fields import Fields
from tformer_deploy.bundle.manifest import FileRecord
from tformer_deploy.bundle.verify import hash_file, read_plain_file
from tformer_deploy.config import DTYPES
from tformer_deploy.errors import CapabilityError, InputError
from tformer_deploy.strict_json import parse_object

if TYPE_CHECKING:
    from pathlib import Path

    from tformer_deploy.bundle.bundle import Bundle

SCHEMA = 1
ENGINES, SIDECAR, PLAN, GRAPH = "engines", "engine.json", "shared.engine", "graph"
FLAVOURS, LAYOUTS, PHASES = ("rtx", "tensorrt"), ("shared",), ("decode", "prefill")
_SIDECAR_LIMIT = 4 * 2**20


@dataclass(frozen=True)
class EngineProfile:
    """One optimization profile, in the engine's order.

    Attributes:
        name: ``decode`` or ``prefill-<most tokens>``.
        phase: ``decode`` has exactly one new token a row; ``prefill`` has several.
        batch: Least, expected and most rows.
        sequence: Least, expected and most new tokens a row.
        plan_kernels: Fused attention kernels by name, as the plan's bytes hold them; they sum to the number of layers.
        log_kernels: The same, as the builder's log lists them.
    """

    name: str
    phase: str
    batch: tuple[int, int, int]
    sequence: tuple[int, int, int]
    plan_kernels: dict[str, int]
    log_kernels: dict[str, int]


@dataclass(frozen=True)
class DerivedGraph:
    """The graphs in the engine's dtype, made from a bundle of another dtype and kept in ``graph/`` beside the engine.

    Attributes:
        core_sha256: Hash of ``graph/manifest.json``.
        checks: Metrics compared with the bundle's own graphs on ONNX Runtime before the engine was built; none was red.
        figures: Worst value and gate of the main metrics, by name: ``[value, gate]``.
        notes: What a reader must know, for instance which graph really ran.
    """

    core_sha256: str
    checks: int
    figures: dict[str, tuple[float, float]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class EngineRecord:
    """What an engine is and what was proven about it: the content of ``engine.json``.

    Attributes:
        core_sha256: The bundle that it was compiled from.
        flavour: ``rtx`` (TensorRT-RTX) or ``tensorrt``.
        version: The compiler's version; only the same one may load the plan.
        target: Short name of the GPUs that it runs on; a part of the folder's name.
        compute_capabilities: Those GPUs, for instance ``8.9``.
        layout: ``shared``: one plan of the decode graph with decode and prefill profiles.
        dtype: dtype of weights and caches in the plan.
        capacity: Slots of every cache row.
        max_batch: Most rows.
        attentions: Attention layers; each profile has that many fused kernels.
        cache_updates: Layers that write a cache in place.
        graph_sha256: Hash of the graph that was compiled, its capacity fixed.
        profiles: In the plan's order.
        plan: Hash and size of ``shared.engine``.
        graph: The derived graphs, where the bundle has another dtype.
        schema: Layout version of this record.
    """

    core_sha256: str
    flavour: str
    version: str
    target: str
    compute_capabilities: tuple[str, ...]
    layout: str
    dtype: str
    capacity: int
    max_batch: int
    attentions: int
    cache_updates: int
    graph_sha256: str
    profiles: tuple[EngineProfile, ...]
    plan: FileRecord
    graph: DerivedGraph | None
    schema: int = SCHEMA

    @property
    def name(self) -> str:
        """The name of the engine's folder."""
        return f"{self.flavour}-{self.version}-{self.target}-{self.dtype}-c{self.capacity}"

    @property
    def summary(self) -> str:
        """One line for a reader. An engine is never called verified: nothing here has run on a GPU."""
        kernels = "; ".join(f"{p.name} {', '.join(f'{n} × {k}' for k, n in p.plan_kernels.items())}" for p in self.profiles)
        derived = f", graph cast to {self.dtype} and checked ({self.graph.checks} checks green)" if self.graph else ""
        return (
            f"{self.dtype}, capacity {self.capacity}, batch ≤ {self.max_batch}, GPUs {' '.join(self.compute_capabilities)}, "
            f"{self.plan.size / 2**20:.1f} MiB{derived}; fused attention proven: {kernels}; not executed"
        )


@dataclass(frozen=True)
class EngineEntry:
    """One folder under ``engines/``, good or not.

    Attributes:
        folder: Its name.
        flavour: From the record, ``?`` without one.
        version: From the record, ``?`` without one.
        summary: One line for a reader.
        fault: Why it cannot be used; None where its record is good, belongs to this core and the plan's size agrees.
        record: The record, where it can be read.
    """

    folder: str
    flavour: str
    version: str
    summary: str
    fault: str | None
    record: EngineRecord | None


def dump_record(record: EngineRecord) -> bytes:
    """Stable bytes with a seal over themselves: an edit or a torn write shows. No time and no host is in them."""
    fields = dataclasses.asdict(record)
    return _text(fields | {"seal": _seal(fields)})


def parse_record(data: bytes, place: str = SIDECAR) -> EngineRecord:
    """Reads ``engine.json`` strictly.

    Raises:
        InputError: It is damaged, edited, or of a newer schema.
    """
    raw = parse_object(data, place)
    schema = raw.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise InputError(f"{place} has schema {schema!r}; this version reads {SCHEMA}.", REBUILD)
    seal = raw.pop("seal", None)
    if seal != _seal(raw):
        raise InputError(f"{place} is not as it was sealed: its content has sha256 {_seal(raw)}, its seal is {seal!r}.", REBUILD)
    record = _record(Fields(raw, place))
    proofs = [sum(kernels.values()) for p in record.profiles for kernels in (p.plan_kernels, p.log_kernels)]
    if not proofs or any(count != record.attentions for count in proofs):
        raise InputError(f"{place} does not prove {record.attentions} fused attentions in each profile.", REBUILD)
    return record


def list_engines(bundle: Bundle) -> list[EngineEntry]:
    """Every engine beside the core, in the order of their names; plans are not hashed, only measured."""
    folder = bundle.path / ENGINES
    if not folder.is_dir():
        return []
    return [_entry(bundle, p) for p in sorted(folder.iterdir()) if not p.name.startswith(".")]


def read_engine(bundle: Bundle, folder: Path) -> EngineRecord:
    """The record of one engine after comparing the plan's size and hash and the core with it.

    Raises:
        InputError: The record or the plan is damaged, or it was compiled from another core.
    """
    record = _read_record(bundle, folder)
    found = hash_file(folder / PLAN)
    if found.sha256 != record.plan.sha256:
        raise InputError(f"{folder / PLAN} has sha256 {found.sha256}; {SIDECAR} says {record.plan.sha256}.", _rebuild(bundle))
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
    entries, reasons = list_engines(bundle), []
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


REBUILD = "Build the engine again with `tformer-deploy build-engine BUNDLE --force`."


def _rebuild(bundle: Bundle) -> str:
    return f"Run `tformer-deploy build-engine {bundle.path} --force`."


def _entry(bundle: Bundle, folder: Path) -> EngineEntry:
    try:
        record = _read_record(bundle, folder, foreign=True)
    except (InputError, OSError) as e:
        fault = e.message if isinstance(e, InputError) else f"{e.strerror} ({e.filename})."
        return EngineEntry(folder.name, "?", "?", f"cannot be used: {fault}", fault, None)
    stale = None if record.core_sha256 == bundle.core_sha256 else _foreign(folder, bundle, record)
    return EngineEntry(
        folder.name,
        record.flavour,
        record.version,
        record.summary if stale is None else f"cannot be used: {stale}",
        stale,
        record,
    )


def _read_record(bundle: Bundle, folder: Path, foreign: bool = False) -> EngineRecord:
    """The record, once the plan is there in its size; ``foreign`` lets one of another core pass."""
    if not folder.is_dir() or folder.is_symlink():
        raise InputError(f"{folder} is no folder of an engine.", _rebuild(bundle))
    record = parse_record(read_plain_file(folder / SIDECAR, _SIDECAR_LIMIT), str(folder / SIDECAR))
    if folder.name != record.name:
        raise InputError(f"{folder} holds the engine {record.name}.", _rebuild(bundle))
    path = folder / PLAN
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise InputError(f"{path} is missing.", _rebuild(bundle)) from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is no regular file.", _rebuild(bundle))
    if status.st_size != record.plan.size:
        raise InputError(f"{path} has {status.st_size} bytes; {SIDECAR} says {record.plan.size}.", _rebuild(bundle))
    if not foreign and record.core_sha256 != bundle.core_sha256:
        raise InputError(_foreign(folder, bundle, record), _rebuild(bundle))
    return record


def _foreign(folder: Path, bundle: Bundle, record: EngineRecord) -> str:
    return f"{folder} was compiled from the core {record.core_sha256[:12]}; this bundle's is {bundle.core_sha256[:12]}."


def _seal(fields: dict[str, Any]) -> str:
    return hashlib.sha256(_text(fields)).hexdigest()


def _text(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _record(fields: Fields) -> EngineRecord:
    record = EngineRecord(
        core_sha256=fields.sha256("core_sha256"),
        flavour=fields.choice("flavour", FLAVOURS),
        version=fields.word("version"),
        target=fields.word("target"),
        compute_capabilities=fields.words("compute_capabilities"),
        layout=fields.choice("layout", LAYOUTS),
        dtype=fields.choice("dtype", DTYPES),
        capacity=fields.whole("capacity"),
        max_batch=fields.whole("max_batch"),
        attentions=fields.whole("attentions"),
        cache_updates=fields.whole("cache_updates"),
        graph_sha256=fields.sha256("graph_sha256"),
        profiles=tuple(_profile(p) for p in fields.objects("profiles")),
        plan=_file(fields.object("plan")),
        graph=None if fields.absent("graph") else _derived(fields.object("graph")),
        schema=fields.whole("schema"),
    )
    fields.finish()
    return record


def _profile(fields: Fields) -> EngineProfile:
    profile = EngineProfile(
        name=fields.word("name"),
        phase=fields.choice("phase", PHASES),
        batch=fields.range("batch"),
        sequence=fields.range("sequence"),
        plan_kernels=fields.counts("plan_kernels"),
        log_kernels=fields.counts("log_kernels"),
    )
    fields.finish()
    return profile


def _file(fields: Fields) -> FileRecord:
    record = FileRecord(fields.sha256("sha256"), fields.whole("size"))
    fields.finish()
    return record


def _derived(fields: Fields) -> DerivedGraph:
    graph = DerivedGraph(fields.sha256("core_sha256"), fields.whole("checks"), fields.pairs("figures"), fields.texts("notes"))
    fields.finish()
    return graph
