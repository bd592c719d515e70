"""What an engine is and what was proven about it: the content of ``engine.json``, its seal and its strict reader."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tformer_deploy.bundle.engine_fields import Fields
from tformer_deploy.bundle.quantization import WHOLE
from tformer_deploy.bundle.signature import PHASES
from tformer_deploy.config import DTYPES
from tformer_deploy.errors import InputError
from tformer_deploy.strict_json import parse_object

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = 3
ENGINES, SIDECAR, GRAPH = "engines", "engine.json", "graph"
FLAVOURS = ("rtx", "tensorrt")
# Matrices of 8-bit floating-point numbers (E4M3), with rows rounded to them too.
FP8 = "fp8"
# Layout → its plans, each a file <name>.engine.
LAYOUTS: dict[str, tuple[str, ...]] = {"shared": ("shared",), "split": ("decode", "prefill"), "decode": ("decode",)}
# decode: one new token a row. prefill: a whole prompt. extend: several new tokens behind what the cache holds.
PROFILE_PHASES = ("decode", "prefill", "extend")
# How fusion is proven; the log of full TensorRT is not documented, so that its inspector may stand alone.
WAYS: dict[str, tuple[tuple[str, ...], ...]] = {"rtx": (("plan", "log"),), "tensorrt": (("inspector", "log"), ("inspector",))}
_MATRIX = re.compile(r"head|blocks\.\d{1,6}(?:\.[a-z_]{1,40}){2}")
REBUILD = "Build the engine again with `tformer-deploy build-engine BUNDLE --force` and the --dtype that it had."


@dataclass(frozen=True)
class EngineProfile:
    """One optimization profile, in the plan's order.

    Attributes:
        name: ``decode``, ``prefill-<most tokens>`` or ``extend-<most tokens>``.
        phase: ``decode`` has exactly one new token a row; ``prefill`` and ``extend`` have several.
        batch: Least, expected and most rows.
        sequence: Least, expected and most new tokens a row.
        logits: Least, expected and most positions a row whose logits are asked for.
        plan_kernels: Fused attention kernels by name, as the first way of the proof found them.
        log_kernels: The same, as the builder's log lists them.
        decomposed: Attention layers that are *not* one fused kernel here, ``blocks.3.attention``; empty unless they were
            allowed by name. With the fused ones they are all attention layers.
        unpacked: Quantised matrices, ``blocks.3.attention.query``, that no product reads as they are stored here: each step writes
            them to memory in the engine's dtype first.
    """

    name: str
    phase: str
    batch: tuple[int, int, int]
    sequence: tuple[int, int, int]
    logits: tuple[int, int, int]
    plan_kernels: dict[str, int]
    log_kernels: dict[str, int]
    decomposed: tuple[str, ...] = ()
    unpacked: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnginePlan:
    """One plan: an executable file.

    Attributes:
        name: ``shared``, ``decode`` or ``prefill``.
        file: Its file beside ``engine.json``.
        sha256: Of the file.
        size: Bytes of the file.
        graph: Which graph of the bundle it was compiled from: ``decode`` (inputs with ``past_lengths``) or ``prefill`` (without).
        graph_sha256: Hash of the graph that was compiled: its capacity fixed, its nodes named by layer.
        profiles: In the plan's order; a profile's number is its place here.
    """

    name: str
    file: str
    sha256: str
    size: int
    graph: str
    graph_sha256: str
    profiles: tuple[EngineProfile, ...]


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
    """What an engine is and what was proven about it.

    Attributes:
        core_sha256: The bundle that it was compiled from.
        flavour: ``rtx`` (TensorRT-RTX) or ``tensorrt``.
        version: The compiler's version; only the same one may load the plans.
        target: Short name of the GPUs that it runs on; a part of the folder's name.
        compute_capabilities: Those GPUs, for instance ``8.9``.
        layout: ``shared``: one plan of the decode graph with decode and prefill profiles, weights once; ``split``: a plan of
            each graph; ``decode``: a plan of the decode graph alone.
        dtype: dtype of weights and caches in the plans.
        matrices: How the blocks' matrices lie in the plans: ``dtype``, or ``int8``, ``int4``, ``fp8``.
        capacity: Slots of every cache row.
        max_batch: Most rows.
        attentions: Attention layers; each profile has that many, fused but for those it names.
        cache_updates: Layers of each plan that write a cache in place.
        weights_bytes: Bytes of the weights that each plan holds.
        cache_row_bytes: Bytes that one row's caches take.
        ways: How fusion was proven: ``plan`` (its bytes) or ``inspector``, and ``log``.
        plans: In the order of the layout.
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
    matrices: str
    capacity: int
    max_batch: int
    attentions: int
    cache_updates: int
    weights_bytes: int
    cache_row_bytes: int
    ways: tuple[str, ...]
    plans: tuple[EnginePlan, ...]
    graph: DerivedGraph | None
    schema: int = SCHEMA

    @property
    def name(self) -> str:
        """The name of the engine's folder."""
        layout = "" if self.layout == "shared" else f"-{self.layout}"
        # A bundle has one sort of whole numbers; fp8 is made for the engine, beside one without.
        matrices = f"-{FP8}" if self.matrices == FP8 else ""
        return f"{self.flavour}-{self.version}-{self.target}-{self.dtype}{matrices}-c{self.capacity}{layout}"

    @property
    def profiles(self) -> tuple[EngineProfile, ...]:
        """Of every plan, in order."""
        return tuple(profile for plan in self.plans for profile in plan.profiles)

    @property
    def size(self) -> int:
        """Bytes of all plans."""
        return sum(plan.size for plan in self.plans)

    @property
    def unfused(self) -> dict[str, tuple[str, ...]]:
        """Profile → attention layers that are not fused; empty for an engine whose fusion is proven throughout."""
        return {profile.name: profile.decomposed for profile in self.profiles if profile.decomposed}

    @property
    def unpacked(self) -> dict[str, int]:
        """Profile → number of quantised matrices that no product reads as they are stored."""
        return {profile.name: len(profile.unpacked) for profile in self.profiles if profile.unpacked}

    @property
    def products(self) -> str | None:
        """How quantised matrices are multiplied, for a reader; None where there are none."""
        if self.matrices == self.dtype:
            return None
        if not self.unpacked:
            return f"{self.matrices} matrices multiplied as stored"
        found = ", ".join(f"{count} in {name}" for name, count in self.unpacked.items())
        return f"{self.matrices} matrices UNPACKED to {self.dtype} at each step: {found}"

    @property
    def proof(self) -> str:
        """What was proven about the attention, for a reader; what is decomposed is never called fused."""
        found = []
        for profile in self.profiles:
            kernels = [f"{n} × {kernel}" for kernel, n in profile.plan_kernels.items()]
            if profile.decomposed:
                kernels.append(f"{len(profile.decomposed)} of {self.attentions} NOT FUSED ({_span(profile.decomposed)})")
            found.append(f"{profile.name} {', '.join(kernels)}")
        what = "attention decomposed where allowed, NOT all fused" if self.unfused else "fused attention proven"
        return f"{what}: {'; '.join(found)}"

    @property
    def summary(self) -> str:
        """One line for a reader. An engine is never called verified: nothing here has run on a GPU."""
        derived = f", graph cast to {self.dtype} and checked ({self.graph.checks} checks green)" if self.graph else ""
        plans = " + ".join(f"{plan.file} {_mib(plan.size)}" for plan in self.plans)
        return (
            f"layout {self.layout}, {self.dtype}, capacity {self.capacity}, batch ≤ {self.max_batch}, GPUs "
            f"{' '.join(self.compute_capabilities)}, {plans} (weights {_mib(self.weights_bytes)} a plan), caches "
            f"{_mib(self.cache_row_bytes)} a row and {_mib(self.cache_row_bytes * self.max_batch)} for {self.max_batch}"
            f"{derived}; {self.proof}{'; ' + self.products if self.products else ''}; not executed"
        )


def plan_file(name: str) -> str:
    """File of a plan."""
    return f"{name}.engine"


def attention_layers(n_layers: int) -> list[str]:
    """Our names of the attention layers, which the graph that is compiled gives its Attention nodes."""
    return [f"blocks.{i}.attention" for i in range(n_layers)]


def dump_record(record: EngineRecord) -> bytes:
    """Stable bytes with a seal over themselves: an edit or a torn write shows. No time and no host is in them."""
    fields = dataclasses.asdict(record)
    return _text(fields | {"seal": _seal(fields)})


def parse_record(data: bytes, place: str = SIDECAR) -> EngineRecord:
    """Reads ``engine.json`` strictly.

    Raises:
        InputError: It is damaged, edited, or of another schema, or proves less than it must.
    """
    raw = parse_object(data, place)
    schema = raw.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise InputError(f"{place} has schema {schema!r}; this version reads {SCHEMA}.", REBUILD)
    seal = raw.pop("seal", None)
    if seal != _seal(raw):
        raise InputError(f"{place} is not as it was sealed: its content has sha256 {_seal(raw)}, its seal is {seal!r}.", REBUILD)
    record = _record(Fields(raw, place))
    if fault := next(_faults(record), None):
        raise InputError(f"{place} {fault}", REBUILD)
    return record


def _faults(record: EngineRecord) -> Iterator[str]:
    names = tuple(plan.name for plan in record.plans)
    if names != LAYOUTS[record.layout]:
        yield f"has the plans {', '.join(names)}; the layout {record.layout} has {', '.join(LAYOUTS[record.layout])}."
    if record.ways not in WAYS[record.flavour]:
        yield f"names {', '.join(record.ways)} as the ways of its proof; expected {' or '.join(map(', '.join, WAYS[record.flavour]))}."
    layers = set(attention_layers(record.attentions))
    for plan in record.plans:
        if plan.file != plan_file(plan.name):
            yield f"names {plan.file} as the plan {plan.name}; expected {plan_file(plan.name)}."
        if not plan.profiles:
            yield f"proves nothing of {plan.file}: it lists no profile."
    for profile in record.profiles:
        count, unfused = len(profile.decomposed), set(profile.decomposed)
        ways = (profile.plan_kernels, profile.log_kernels)[: len(record.ways)]
        proven = all(sum(kernels.values()) + count == record.attentions for kernels in ways)
        if not proven or len(unfused) != count or unfused - layers:
            yield f"does not prove {record.attentions} fused attentions in each profile: see {profile.name}."
        if not all(_MATRIX.fullmatch(name) for name in profile.unpacked):
            yield f"names as unpacked what is no matrix: see {profile.name}."


def _span(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


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
        layout=fields.choice("layout", tuple(LAYOUTS)),
        dtype=fields.choice("dtype", DTYPES),
        matrices=fields.choice("matrices", (*DTYPES, *WHOLE, FP8)),
        capacity=fields.whole("capacity"),
        max_batch=fields.whole("max_batch"),
        attentions=fields.whole("attentions"),
        cache_updates=fields.whole("cache_updates"),
        weights_bytes=fields.whole("weights_bytes"),
        cache_row_bytes=fields.whole("cache_row_bytes"),
        ways=fields.words("ways"),
        plans=tuple(_plan(p) for p in fields.objects("plans")),
        graph=None if fields.absent("graph") else _derived(fields.object("graph")),
        schema=fields.whole("schema"),
    )
    fields.finish()
    return record


def _plan(fields: Fields) -> EnginePlan:
    plan = EnginePlan(
        name=fields.word("name"),
        file=fields.word("file"),
        sha256=fields.sha256("sha256"),
        size=fields.whole("size"),
        graph=fields.choice("graph", PHASES),
        graph_sha256=fields.sha256("graph_sha256"),
        profiles=tuple(_profile(p) for p in fields.objects("profiles")),
    )
    fields.finish()
    return plan


def _profile(fields: Fields) -> EngineProfile:
    profile = EngineProfile(
        name=fields.word("name"),
        phase=fields.choice("phase", PROFILE_PHASES),
        batch=fields.range("batch"),
        sequence=fields.range("sequence"),
        logits=fields.range("logits"),
        plan_kernels=fields.counts("plan_kernels"),
        log_kernels=fields.counts("log_kernels"),
        decomposed=fields.texts("decomposed"),
        unpacked=fields.texts("unpacked"),
    )
    fields.finish()
    return profile


def _derived(fields: Fields) -> DerivedGraph:
    graph = DerivedGraph(fields.sha256("core_sha256"), fields.whole("checks"), fields.pairs("figures"), fields.texts("notes"))
    fields.finish()
    return graph
