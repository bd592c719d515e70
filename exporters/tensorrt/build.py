"""Bundle → engine and its sealed sidecar, beside the frozen core."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tformer_deploy import errors
from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.bundle.engines import ENGINES, SIDECAR, EngineRecord, ProfileRecord, read_record, seal_record
from tformer_deploy.bundle.verify import hash_file
from tformer_deploy.bundle.writer import new_folder, write_file
from tformer_deploy.errors import ResourceError, TformerError, UsageError
from tformer_deploy.exporters.tensorrt.derive import derive_bundle
from tformer_deploy.exporters.tensorrt.flavours import Flavour, load_flavour
from tformer_deploy.exporters.tensorrt.graph import write_fixed_graph
from tformer_deploy.exporters.tensorrt.preflight import Plan, make_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from tformer_deploy.config import DType

Progress = "Callable[[str, int, int], None]"
ENGINE_FILE = "shared.engine"


def build(
    bundle_path: str | Path,
    *,
    flavour: Literal["auto", "rtx", "tensorrt"] = "auto",
    layout: Literal["shared"] = "shared",
    dtype: DType | None = None,
    capacity: int | None = None,
    max_batch: int = 8,
    prompt_buckets: tuple[int, ...] = (),
    targets: tuple[str, ...] = (),
    force: bool = False,
    on_progress: Callable[[str, int, int], None] = lambda phase, step, of: None,
) -> EngineRecord:
    """Compiles the decode graph with an S = 1 profile and prefill profiles, and proves that every attention fused.

    Args:
        bundle_path: The bundle; its core is not touched.
        flavour: Which TensorRT.
        layout: ``shared``: one plan serves both phases.
        dtype: The engine's dtype; the bundle's where None. Another one is derived and checked first.
        capacity: Cache slots of a row.
        max_batch: Rows at most.
        prompt_buckets: Largest prompt of each prefill profile; one of ``capacity`` tokens where empty.
        targets: Compute capabilities (rtx only), ``("8.6", "8.9")``; the flavour's portable set where empty.
        force: Replace an engine of the same name.
        on_progress: Called with phase, step, steps.

    Raises:
        CapabilityError: The flavour is not installed, or cannot do it.
        InputError: An attention cannot fuse, or did not; nothing is written.
        UsageError: The engine exists and ``force`` is False, or a number is out of range.
    """
    bundle = open_bundle(bundle_path)
    chosen = load_flavour(flavour)
    dtype = dtype or bundle.manifest.dtype
    plan = make_plan(bundle.manifest, dtype, capacity, max_batch, prompt_buckets)
    folder = bundle.path / ENGINES / engine_name(chosen, plan, targets)
    if (folder / SIDECAR).exists() and not force:
        raise UsageError(f"The engine {folder} exists.", "Give --force to build it again.")
    (bundle.path / ENGINES).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=bundle.path / ENGINES) as scratch:
        work, derived = Path(scratch), None
        source = bundle
        if dtype != bundle.manifest.dtype:
            on_progress(f"{dtype} graph", 0, 1)
            source, derived = derive_bundle(bundle, dtype, work / "derived")
        graph = write_fixed_graph(source, plan.capacity, work)
        with new_folder(folder, force=True) as finished:
            found = _run_worker(_request(chosen, plan, targets, graph, finished / ENGINE_FILE, bundle), work, on_progress)
            record = _record(finished, bundle, chosen, plan, targets, graph, found, derived)
            write_file(finished / SIDECAR, seal_record(record))
    return read_record(folder)


def engine_name(flavour: Flavour, plan: Plan, targets: tuple[str, ...]) -> str:
    """``<flavour>-<version>-<target>-<dtype>-c<capacity>``."""
    target = "portable" if flavour.name == "rtx" else "local"
    if targets:
        target = "sm" + "+".join(t.replace(".", "") for t in targets)
    return f"{flavour.name}-{flavour.version}-{target}-{plan.dtype}-c{plan.capacity}"


def _request(flavour: Flavour, plan: Plan, targets: tuple[str, ...], graph: Path, output: Path, bundle: Bundle) -> dict[str, Any]:
    return {
        "flavour": flavour.name,
        "graph": str(graph),
        "plan": str(output),
        "n_layers": bundle.manifest.config.n_layers,
        "targets": list(targets),
        "profiles": [dataclasses.asdict(p) for p in plan.profiles],
        "decomposable": False,
    }


def _run_worker(request: dict[str, Any], work: Path, on_progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Runs the builder in a child; when this process is stopped, so is the child."""
    path, log = work / "request.json", work / "builder.log"
    path.write_text(json.dumps(request), "utf-8")
    with log.open("wb") as stderr:
        worker = subprocess.Popen(
            [sys.executable, "-m", "tformer_deploy.exporters.tensorrt.worker", str(path)], stdout=subprocess.PIPE, stderr=stderr
        )
        try:
            last = _follow(worker, on_progress)
            worker.wait()
        except BaseException:
            worker.kill()
            worker.wait()
            raise
    if last.get("event") == "result":
        return last
    if last.get("event") == "error":
        raise _error(last)
    tail = log.read_text("utf-8", errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
    if worker.returncode == -9:
        raise ResourceError("The builder was killed, most likely because memory ran out.", "Lower --max-batch or --prompt-bucket.")
    raise TformerError(f"The builder ended with exit code {worker.returncode}: {tail[0]}.")


def _follow(worker: subprocess.Popen[bytes], on_progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    last: dict[str, Any] = {}
    assert worker.stdout is not None
    with worker.stdout:
        for line in worker.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "progress":
                on_progress(event["phase"], event["step"], event["of"])
            else:
                last = event
    return last


def _error(event: dict[str, Any]) -> TformerError:
    kinds = (errors.UsageError, errors.InputError, errors.CapabilityError, errors.StorageError, errors.ResourceError)
    kind = next((k for k in kinds if k.exit_code == event["exit_code"]), TformerError)
    return kind(event["message"], event["hint"])


def _record(
    folder: Path, bundle: Bundle, flavour: Flavour, plan: Plan, targets: tuple[str, ...], graph: Path, found: dict[str, Any],
    derived: dict[str, Any] | None,
) -> EngineRecord:  # fmt: skip
    engine = hash_file(folder / ENGINE_FILE)
    profiles = tuple(
        ProfileRecord(p.name, p.batch, p.sequence, planned, logged)
        for p, (planned, logged) in zip(plan.profiles, found["kernels"], strict=True)
    )
    return EngineRecord(
        folder="",
        file=ENGINE_FILE,
        sha256=engine.sha256,
        size=engine.size,
        core_sha256=bundle.core_sha256,
        flavour=flavour.name,
        version=flavour.version,
        targets=targets or ("portable" if flavour.name == "rtx" else "local",),
        dtype=plan.dtype,
        layout="shared",
        capacity=plan.capacity,
        max_batch=plan.max_batch,
        attentions=found["attentions"],
        cache_updates=found["cache_updates"],
        profiles=profiles,
        graph_sha256=hash_file(graph).sha256,
        derived=derived,
    )
