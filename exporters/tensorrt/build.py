"""Bundle → engine and its sealed record, beside the frozen core."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tformer_deploy import errors
from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.bundle.engines import (
    ENGINES,
    GRAPH,
    PLAN,
    SIDECAR,
    DerivedGraph,
    EngineProfile,
    EngineRecord,
    dump_record,
    read_engine,
)
from tformer_deploy.bundle.manifest import FileRecord
from tformer_deploy.bundle.verify import hash_file
from tformer_deploy.bundle.writer import new_folder, refuse_existing, write_file
from tformer_deploy.errors import ResourceError, TformerError, UsageError
from tformer_deploy.exporters.tensorrt.flavours import Flavour, load_flavour
from tformer_deploy.exporters.tensorrt.graph import fixed_graph
from tformer_deploy.exporters.tensorrt.preflight import DEFAULT_BATCH, Plan, make_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tformer_deploy.config import DType


@dataclass(frozen=True)
class BuiltEngine:
    """A finished engine.

    Attributes:
        path: ``shared.engine``.
        record: The content of ``engine.json``.
        build_s: Seconds that the builder took; not in the record, whose bytes depend on the input only.
        peak_mib: Peak memory of the builder's process.
    """

    path: Path
    record: EngineRecord
    build_s: float
    peak_mib: float


def build(
    bundle_path: str | Path,
    *,
    flavour: Literal["auto", "rtx", "tensorrt"] = "auto",
    layout: Literal["shared"] = "shared",
    dtype: DType | None = None,
    capacity: int | None = None,
    max_batch: int = DEFAULT_BATCH,
    prompt_buckets: tuple[int, ...] = (),
    targets: tuple[str, ...] = (),
    force: bool = False,
    on_progress: Callable[[str, float], None] = lambda phase, done: None,
) -> BuiltEngine:
    """Compiles the decode graph with an S = 1 profile and prefill profiles, and proves that every attention fused.

    Args:
        bundle_path: The bundle; its core is not touched.
        flavour: Which TensorRT; ``auto`` takes RTX where it is installed.
        layout: ``shared``: one plan serves both phases.
        dtype: The engine's dtype; the bundle's where None. Another one is derived and checked first, and kept.
        capacity: Cache slots of a row.
        max_batch: Most rows.
        prompt_buckets: Most tokens of each prefill profile; one of ``capacity`` tokens where empty.
        targets: Compute capabilities (rtx only), ``("8.6", "8.9")``; the flavour's portable set where empty.
        force: Replace an engine of the same name.
        on_progress: Called with what is being done and the fraction done of the engine, 0 before the builder starts.

    Raises:
        CapabilityError: The flavour is not installed, or cannot do it.
        InputError: An attention cannot fuse, or did not; nothing is written.
        UsageError: The engine exists and ``force`` is False, or a number is out of range.
        ResourceError: Memory ran out.
    """
    if layout != "shared":
        raise UsageError(f"The layout is {layout!r}; this version builds shared only.", "Give --layout shared.")
    bundle = open_bundle(bundle_path)
    chosen = load_flavour(flavour)
    plan = make_plan(bundle.manifest, dtype or bundle.manifest.dtype, capacity, max_batch, prompt_buckets)
    draft = _draft(bundle, chosen, plan, targets)
    folder = bundle.path / ENGINES / draft.name
    refuse_existing(folder, force, SIDECAR)
    with new_folder(folder, force, SIDECAR) as finished:
        source, graph = bundle, None
        if plan.dtype != bundle.manifest.dtype:
            source, graph = _derive(bundle, plan.dtype, finished / GRAPH, lambda part: on_progress(part, 0.0))
        started = time.perf_counter()
        found = run_worker(worker_request(source, draft, plan, finished / PLAN), on_progress)
        seconds = time.perf_counter() - started
        record = _finish(draft, plan, found, source, graph, finished / PLAN)
        write_file(finished / SIDECAR, dump_record(record))
    return BuiltEngine(folder / PLAN, read_engine(bundle, folder), round(seconds, 2), found["peak_mib"])


def worker_request(source: Bundle, draft: EngineRecord, plan: Plan, output: Path) -> dict[str, Any]:
    """What the worker is told; see :func:`worker.build_plan`."""
    return {
        "flavour": draft.flavour,
        "graph": str(source.decode_path.resolve()),
        "capacity": plan.capacity,
        "plan": str(output),
        "n_layers": source.manifest.config.n_layers,
        "compute_capabilities": list(draft.compute_capabilities),
        "profiles": [dataclasses.asdict(p) for p in plan.profiles],
        "decomposable": False,
    }


def run_worker(request: dict[str, Any], on_progress: Callable[[str, float], None]) -> dict[str, Any]:
    """Runs the builder in a child process; when this one is stopped, so is the child.

    Raises:
        TformerError: What the worker reported, or how it ended.
    """
    with tempfile.TemporaryDirectory(prefix="tformer-deploy-") as scratch:
        path, log = Path(scratch) / "request.json", Path(scratch) / "builder.log"
        path.write_text(json.dumps(request), "utf-8")
        command = [sys.executable, "-m", "tformer_deploy.exporters.tensorrt.worker", str(path)]
        with log.open("wb") as stderr:
            # In a session of its own, so that Ctrl-C reaches this process alone, which then ends the child.
            worker = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
            try:
                last = _follow(worker, on_progress)
                worker.wait()
            except BaseException:
                worker.kill()
                worker.wait()
                raise
        if last.get("event") == "result" and worker.returncode == 0:
            return last
        if last.get("event") == "error":
            raise _error(last)
        tail = log.read_text("utf-8", errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
    if worker.returncode == -9:
        raise ResourceError(
            "The builder was killed, most likely because memory ran out.", "Lower --max-batch or --prompt-bucket."
        )
    raise TformerError(
        f"The builder ended with exit code {worker.returncode}: {tail[0]}", "Run the command again; report it if it stays so."
    )


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


def _derive(bundle: Bundle, dtype: DType, folder: Path, say: Callable[[str], None]) -> tuple[Bundle, DerivedGraph]:
    # Imported here: an engine in the bundle's own dtype needs neither torch nor ONNX Runtime.
    from tformer_deploy.exporters.tensorrt.derive import derive_bundle

    return derive_bundle(bundle, dtype, folder, say)


def _draft(bundle: Bundle, flavour: Flavour, plan: Plan, targets: tuple[str, ...]) -> EngineRecord:
    """The record before anything is built: what is asked for."""
    capabilities = flavour.compute_capabilities(targets)
    target = "portable" if flavour.name == "rtx" and not targets else "sm" + "_".join(c.replace(".", "") for c in capabilities)
    return EngineRecord(
        core_sha256=bundle.core_sha256,
        flavour=flavour.name,
        version=flavour.version,
        target=target,
        compute_capabilities=capabilities,
        layout="shared",
        dtype=plan.dtype,
        capacity=plan.capacity,
        max_batch=plan.max_batch,
        attentions=bundle.manifest.config.n_layers,
        cache_updates=2 * bundle.manifest.config.n_layers,
        graph_sha256="",
        profiles=(),
        plan=FileRecord("", 0),
        graph=None,
    )


def _finish(
    draft: EngineRecord, plan: Plan, found: dict[str, Any], source: Bundle, graph: DerivedGraph | None, file: Path
) -> EngineRecord:
    profiles = tuple(
        EngineProfile(p.name, p.phase, p.batch, p.sequence, planned, logged)
        for p, (planned, logged) in zip(plan.profiles, found["kernels"], strict=True)
    )
    compiled = hashlib.sha256(fixed_graph(source.decode_path, plan.capacity)).hexdigest()
    return dataclasses.replace(
        draft, cache_updates=found["cache_updates"], graph_sha256=compiled, profiles=profiles, plan=hash_file(file), graph=graph
    )
