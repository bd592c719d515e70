"""Bundle → engine and its sealed record, beside the frozen core."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from tformer_deploy import errors
from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.bundle.engine_record import (
    ENGINES,
    FP8,
    GRAPH,
    SIDECAR,
    DerivedGraph,
    EnginePlan,
    EngineProfile,
    EngineRecord,
    dump_record,
    parse_record,
    plan_file,
)
from tformer_deploy.bundle.fusable import unpacking
from tformer_deploy.bundle.manifest import WEIGHTS
from tformer_deploy.bundle.writer import new_folder, refuse_existing, write_file
from tformer_deploy.errors import CapabilityError, ResourceError, TformerError, UsageError
from tformer_deploy.exporters.tensorrt.buckets import buckets_for, read_lengths
from tformer_deploy.exporters.tensorrt.costs import Costs, estimate, require_room, room_for, room_sentence
from tformer_deploy.exporters.tensorrt.flavours import Flavour, load_flavour, require_precision
from tformer_deploy.exporters.tensorrt.preflight import DEFAULT_BATCH, Layout, Plan, PlanPart, capacity_for, fp8_file, make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tformer_deploy.config import DType
    from tformer_deploy.exporters.tensorrt.flavours import FlavourName


_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV")
_PREFIXES = ("LD_", "PYTHON", "CUDA", "NVIDIA", "TRT", "TENSORRT")


@dataclass(frozen=True)
class BuiltEngine:
    """A finished engine.

    Attributes:
        path: Its folder: plans and ``engine.json``.
        record: The content of ``engine.json``.
        build_s: Seconds that the builder took; not in the record, whose bytes depend on the input only.
        peak_mib: Peak memory of the builder's process, the largest of its plans.
    """

    path: Path
    record: EngineRecord
    build_s: float
    peak_mib: float


def build(
    bundle_path: str | Path,
    *,
    flavour: FlavourName | Literal["auto"] = "auto",
    layout: Layout = "shared",
    dtype: DType | None = None,
    capacity: int | None = None,
    max_batch: int = DEFAULT_BATCH,
    prompt_buckets: tuple[int, ...] = (),
    prompt_buckets_from: str | Path | None = None,
    targets: tuple[str, ...] = (),
    allow_decomposed: bool = False,
    range_rows: Sequence[tuple[int, ...]] = (),
    fp8_rows: Sequence[tuple[int, ...]] = (),
    force: bool = False,
    on_note: Callable[[str], None] = lambda note: None,
    on_progress: Callable[[str, float], None] = lambda phase, done: None,
) -> BuiltEngine:
    """Compiles a bundle's graphs, and proves that every attention of every profile fused.

    Args:
        bundle_path: The bundle; its core is not touched.
        flavour: Which TensorRT; ``auto`` takes RTX where it is installed and knows the GPU here, if there is one.
        layout: ``shared``: one plan serves both phases; ``split``: a plan a phase; ``decode``: only the decode plan of split.
        dtype: The engine's dtype; the bundle's where None. Another one is derived and checked first, and kept.
        capacity: Cache slots of a row.
        max_batch: Most rows.
        prompt_buckets: Most tokens of each prefill profile; one of ``capacity`` tokens where empty.
        prompt_buckets_from: A file of prompt lengths that the buckets are derived from.
        targets: Compute capabilities (rtx only), ``("8.6", "8.9")``; the flavour's portable set where empty.
        allow_decomposed: An attention that cannot fuse is built from its parts, recorded, and never called fused.
        range_rows: Ids of real prompts on which values inside the model are looked at, for an fp16 engine: one that would
            overflow is named. Where there are none and fp16 is derived, the bundle's calibration or random tokens are run.
        fp8_rows: Ids of real prompts: the blocks' matrices are multiplied in FP8, with scales that fit these prompts.
        force: Replace an engine of the same name.
        on_note: Called, before the builder starts, with what will fuse, what the engine costs, what is available and what a
            range scan found.
        on_progress: Called with what is being done and the fraction done of the engine, 0 before the builder starts.

    Raises:
        CapabilityError: The flavour is not installed, or cannot do it.
        InputError: An attention cannot fuse, or did not; nothing is written.
        UsageError: The engine exists and ``force`` is False, or a number is out of range.
        ResourceError: There is, or was, too little memory.
        StorageError: There is too little room on the disk.
    """
    bundle = open_bundle(bundle_path)
    chosen = load_flavour(flavour)
    if prompt_buckets_from is not None:
        if prompt_buckets:
            raise UsageError("Prompt buckets are given and to be derived from a file.", "Give one of the two.")
        prompt_buckets = buckets_for(read_lengths(Path(prompt_buckets_from)), capacity_for(bundle.manifest, capacity))
    plan = make_plan(
        bundle.manifest, dtype or bundle.manifest.dtype, capacity, max_batch, prompt_buckets, layout, allow_decomposed,
        fp8=bool(fp8_rows),
    )  # fmt: skip
    if range_rows and plan.dtype != "fp16":
        raise UsageError(
            f"A range scan is for fp16 engines; this one is {plan.dtype}, which overflows where fp32 does.",
            "Leave --range-scan out.",
        )
    costs = estimate(plan, bundle.manifest)
    draft = _draft(bundle, chosen, plan, targets, costs)
    require_precision(draft.compute_capabilities, bf16=plan.dtype == "bf16", fp8=plan.fp8)
    folder = bundle.path / ENGINES / draft.name
    refuse_existing(folder, force, SIDECAR, "give another --dtype, --capacity, --layout or --target")
    if plan.dtype != bundle.manifest.dtype:
        _require_derivation(bundle, plan.dtype)
    _say_before(plan, costs, chosen, draft, folder, on_note)
    if unpacked := unpacking(bundle.manifest.quantization):
        on_note(f"WARNING: {unpacked}")
    scanned = _scan(bundle, plan, range_rows, on_progress)
    for sentence in scanned:
        on_note(sentence)
    with new_folder(folder, force, SIDECAR) as finished:
        source, graph = bundle, None
        if plan.dtype != bundle.manifest.dtype:
            source, graph = _derive(bundle, plan.dtype, fp8_rows, finished / GRAPH, lambda part: on_progress(part, 0.0))
            graph = dataclasses.replace(graph, notes=(*graph.notes, *scanned))
        started, plans, peak = time.perf_counter(), [], 0.0
        for i, part in enumerate(plan.parts):
            request, share = worker_request(source, draft, plan, part), _share(on_progress, part.name, i, len(plan.parts))
            found = run_worker(request, source.path, finished / plan_file(part.name), share)
            plans.append(_engine_plan(part, found))
            draft = dataclasses.replace(draft, cache_updates=found["cache_updates"], ways=tuple(found["ways"]))
            peak = max(peak, found["peak_mib"])
        seconds = time.perf_counter() - started
        data = dump_record(dataclasses.replace(draft, plans=tuple(plans), graph=graph))
        record = parse_record(data)  # refuses, for instance, a profile that proves too little
        write_file(finished / SIDECAR, data)
    return BuiltEngine(folder, record, round(seconds, 2), peak)


def _scan(
    bundle: Bundle, plan: Plan, rows: Sequence[tuple[int, ...]], on_progress: Callable[[str, float], None]
) -> tuple[str, ...]:
    """What a reader must know of values that fp16 may not hold: for each fp16 engine that is derived, else where asked for."""
    if not rows and (plan.dtype != "fp16" or bundle.manifest.dtype != "fp32"):
        return ()
    # Imported here: only a scan needs ONNX Runtime.
    from tformer_deploy.exporters.tensorrt.ranges import prompts_for, scan_ranges

    on_progress("range scan", 0.0)
    return scan_ranges(bundle, prompts_for(bundle, rows)).sentences


def _say_before(
    plan: Plan, costs: Costs, flavour: Flavour, draft: EngineRecord, folder: Path, on_note: Callable[[str], None]
) -> None:
    """What will fuse, what it costs, what is there; then refuses what does not fit."""
    for report in plan.reports:
        on_note(report.sentence)
    if plan.unfusable_phases:
        on_note(
            f"WARNING: the attention of {' and '.join(plan.unfusable_phases)} may be DECOMPOSED, as allowed: slow, and with memory "
            "that grows with prompt × capacity. Each layer that is will be named and recorded."
        )
    for sentence in costs.sentences:
        on_note(sentence)
    room = room_for(folder)
    on_note(room_sentence(costs, room))
    if advice := flavour.advice(draft.compute_capabilities):
        on_note(f"WARNING: {advice}")
    require_room(costs, room)


def _share(on_progress: Callable[[str, float], None], name: str, i: int, count: int) -> Callable[[str, float], None]:
    """The progress of one plan of several as a part of the whole."""
    prefix = f"{name}: " if count > 1 else ""
    return lambda phase, done: on_progress(f"{prefix}{phase}", (i + done) / count)


def worker_request(source: Bundle, draft: EngineRecord, plan: Plan, part: PlanPart) -> dict[str, Any]:
    """What the worker is told; see :func:`worker.build_plan`. No path is in it."""
    return {
        "flavour": draft.flavour,
        "graph": fp8_file(part.graph) if plan.fp8 else f"{part.graph}.onnx",
        "square": part.graph == "prefill",
        "capacity": plan.capacity,
        "n_layers": source.manifest.config.n_layers,
        "compute_capabilities": list(draft.compute_capabilities),
        "profiles": [dataclasses.asdict(p) for p in part.profiles],
        # TensorRT's parser takes no soft cap: where it is allowed, such attention becomes plain operators before the parser.
        "expand_attention": source.manifest.config.attention_softcap is not None,
        "decomposable": bool({p.phase for p in part.profiles} & set(plan.unfusable_phases)),
        "may_decompose": list(plan.unfusable_phases),
    }


def run_worker(request: dict[str, Any], folder: Path, output: Path, on_progress: Callable[[str, float], None]) -> dict[str, Any]:
    """Runs the builder in a child process; when this one is stopped, so is the child.

    The builder's order of work depends on addresses, and so its bytes on how much memory was asked for before, down to the length
    of a path. Hence the child sees no path of the user's and few variables: it starts in a folder of links and writes to an open
    file.

    Args:
        request: From :func:`worker_request`.
        folder: Where graph and weights lie.
        output: The plan, written only when everything is proven.
        on_progress: Called with the builder's phase and the fraction done.

    Raises:
        TformerError: What the worker reported, or how it ended.
    """
    done = False
    try:
        with output.open("xb") as plan, tempfile.TemporaryDirectory(prefix="tformer-deploy-") as links, _log() as log:
            for name in (request["graph"], WEIGHTS):
                (Path(links) / name).symlink_to((folder / name).resolve())
            worker = subprocess.Popen(
                # -P: the folder that it starts in is no place to import from.
                [sys.executable, "-P", "-m", "tformer_deploy.exporters.tensorrt.worker", str(plan.fileno())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=links, env=_environment(), pass_fds=(plan.fileno(),),
                start_new_session=True,  # so that Ctrl-C reaches this process alone, which then ends the child
            )  # fmt: skip
            try:
                _tell(worker, request)
                last = _follow(worker, on_progress)
                worker.wait()
            except BaseException:
                worker.kill()
                worker.wait()
                raise
            log.seek(0)
            tail = log.read().decode("utf-8", errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
            done = last.get("event") == "result" and worker.returncode == 0
    finally:
        if not done:
            output.unlink(missing_ok=True)
    if done:
        return last
    if last.get("event") == "error":
        raise _error(last)
    if worker.returncode == -9:
        raise ResourceError(
            "The builder was killed, most likely because memory ran out.", "Lower --max-batch or --prompt-bucket."
        )
    raise TformerError(
        f"The builder ended with exit code {worker.returncode}: {tail[0]}", "Run the command again; report it if it stays so."
    )


def _log() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="tformer-deploy-")


def _environment() -> dict[str, str]:
    """What a builder may depend on; nothing that differs from one shell to the next."""
    return {name: value for name, value in sorted(os.environ.items()) if name in _VARIABLES or name.startswith(_PREFIXES)}


def _tell(worker: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError), worker.stdin:  # a worker that died at once says so by its exit code
        worker.stdin.write(json.dumps(request).encode())


def _follow(worker: subprocess.Popen[bytes], on_progress: Callable[[str, float], None]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    assert worker.stdout is not None
    with worker.stdout:
        for line in worker.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "progress":
                on_progress(event["phase"], event["done"])
            else:
                last = event
    return last


def _error(event: dict[str, Any]) -> TformerError:
    kinds = (errors.UsageError, errors.InputError, errors.CapabilityError, errors.StorageError, errors.ResourceError)
    kind = next((k for k in kinds if k.exit_code == event["exit_code"]), TformerError)
    return kind(event["message"], event["hint"])


def _require_derivation(bundle: Bundle, dtype: DType) -> None:
    """Refuses before anything is said what would fail after it."""
    try:
        importlib.import_module("tformer_deploy.exporters.tensorrt.derive")
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("tformer_deploy"):
            raise
        export = f", or export the checkpoint with --dtype {dtype}: its engine needs no more than is here"
        raise CapabilityError(
            f"The bundle is {bundle.manifest.dtype}; deriving an engine in {dtype} from it needs the Python package {e.name}, which is not installed.",
            f"pip install 'tformer-deploy[export]'{export if bundle.manifest.quantization is None else ''}.",
        ) from None


def _derive(
    bundle: Bundle, dtype: DType, fp8_rows: Sequence[tuple[int, ...]], folder: Path, say: Callable[[str], None]
) -> tuple[Bundle, DerivedGraph]:
    # Imported here: an engine in the bundle's own dtype needs neither torch nor ONNX Runtime.
    from tformer_deploy.exporters.tensorrt.derive import derive_bundle
    from tformer_deploy.exporters.tensorrt.fp8 import add_fp8_graphs

    derived, record = derive_bundle(bundle, dtype, folder, say)
    return derived, add_fp8_graphs(bundle, derived, record, fp8_rows, say) if fp8_rows else record


def _draft(bundle: Bundle, flavour: Flavour, plan: Plan, targets: tuple[str, ...], costs: Costs) -> EngineRecord:
    """The record before anything is built: what is asked for."""
    capabilities = flavour.compute_capabilities(targets)
    target = "portable" if flavour.name == "rtx" and not targets else "sm" + "_".join(c.replace(".", "") for c in capabilities)
    return EngineRecord(
        core_sha256=bundle.core_sha256,
        flavour=flavour.name,
        version=flavour.version,
        target=target,
        compute_capabilities=capabilities,
        layout=plan.layout,
        dtype=plan.dtype,
        matrices=_matrices(bundle, plan),
        capacity=plan.capacity,
        max_batch=plan.max_batch,
        attentions=bundle.manifest.config.n_layers,
        cache_updates=2 * bundle.manifest.config.n_layers,
        weights_bytes=costs.weights,
        cache_row_bytes=costs.cache_row,
        ways=(),
        plans=(),
        graph=None,
    )


def _matrices(bundle: Bundle, plan: Plan) -> str:
    if plan.fp8:
        return FP8
    quantization = bundle.manifest.quantization
    return plan.dtype if quantization is None else quantization.stored


def _engine_plan(part: PlanPart, found: dict[str, Any]) -> EnginePlan:
    profiles = tuple(
        EngineProfile(
            p.name,
            p.phase,
            p.batch,
            p.sequence,
            p.logits,
            proof["plan"],
            proof["log"],
            decomposed=tuple(proof["decomposed"]),
            unpacked=tuple(proof["unpacked"]),
        )
        for p, proof in zip(part.profiles, found["proofs"], strict=True)
    )
    return EnginePlan(
        part.name, plan_file(part.name), found["sha256"], found["size"], part.graph, found["graph_sha256"], profiles
    )
