"""Opens an engine: everything that can be refused without TensorRT is refused before it, and before it sees a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.backends import cuda
from tformer_deploy.backends.tensorrt.backend import TensorRTBackend
from tformer_deploy.backends.tensorrt.engine import Expected, LoadedPlan
from tformer_deploy.backends.tensorrt.package import RuntimePackage, load_packages
from tformer_deploy.backends.tensorrt.records import read_plan
from tformer_deploy.backends.tensorrt.runtime_cache import RuntimeCacheFile
from tformer_deploy.bundle.engine_choice import Choice, choose_engine, good_engines
from tformer_deploy.bundle.engines import rebuild, verify_graph
from tformer_deploy.errors import CapabilityError

if TYPE_CHECKING:
    from tformer_deploy.bundle import Bundle


def open_tensorrt(bundle: Bundle, name: str | None = None) -> TensorRTBackend:
    """Loads the engine that fits this machine: its records, the packages, the GPU, the hashes of graph and plan, and only then the plan.

    Args:
        bundle: Whose engine.
        name: Of the engine; the best that fits where None.

    Raises:
        UsageError: There is no engine of that name.
        InputError: The engine is damaged, of another core, or not what its record says.
        CapabilityError: No engine, package or GPU fits, or the runtime refuses it.
        ResourceError: The GPU has no room.
    """
    packages = load_packages({record.flavour for record in good_engines(bundle, name)})
    versions = {flavour: package.version for flavour, package in packages.items()}
    choose_engine(bundle, versions, None, name)  # what no GPU could change is said first
    gpu, driver = _gpu()
    choice = choose_engine(bundle, versions, gpu.compute_capability, name)
    package = packages[choice.record.flavour]
    verify_graph(bundle, choice.folder, choice.record)
    stored = choice.record.plans
    contents = [read_plan(choice.folder, plan, rebuild(bundle)) for plan in stored]
    device = cuda.Device(driver, gpu)
    try:
        expected = Expected(choice.record, bundle.manifest.config)
        plans = [
            LoadedPlan(package, i, plan, data, expected, gpu, _cache_file(package, plan.sha256, gpu))
            for i, (plan, data) in enumerate(zip(stored, contents, strict=True))
        ]
        del contents
        told = all(plan.told for plan in plans)
        notes = _notes(bundle, choice, package, gpu, told)
        return TensorRTBackend(bundle, choice.record, plans, device, notes, captures=package.flavour == "tensorrt")
    except BaseException:
        device.close()
        raise


def _gpu() -> tuple[cuda.Gpu, cuda.Driver]:
    """The first GPU; CUDA_VISIBLE_DEVICES chooses another.

    Raises:
        CapabilityError: There is none; the probe's words say why.
    """
    found, driver = cuda.probe()
    if driver is None or not found.gpus:
        raise CapabilityError(f"The tensorrt backend needs an NVIDIA GPU: {found.reason}.", "Use --backend onnxruntime.")
    return found.gpus[0], driver


def _cache_file(package: RuntimePackage, plan_sha256: str, gpu: cuda.Gpu) -> RuntimeCacheFile | None:
    return RuntimeCacheFile(plan_sha256, package.version, gpu.name) if package.flavour == "rtx" else None


def _notes(bundle: Bundle, choice: Choice, package: RuntimePackage, gpu: cuda.Gpu, told: bool) -> tuple[str, ...]:
    record, manifest = choice.record, bundle.manifest
    notes = [
        f"The engine {record.name} runs on {gpu.name} (compute capability {gpu.compute_capability}) with "
        f"{package.module.__name__} {package.version}."
    ]
    if choice.others:
        notes.append(f"Of this bundle's engines {', '.join(choice.others)} would run here too; --engine chooses.")
    if record.dtype != manifest.dtype:
        notes.append(f"The engine computes in {record.dtype}; the bundle is {manifest.dtype}.")
    if record.capacity < manifest.max_length:
        notes.append(
            f"A row holds at most {record.capacity} tokens, the engine's capacity; the bundle's max_length is {manifest.max_length}."
        )
    if record.unfused:
        notes.append(f"Not all of its attention is fused: {record.proof}.")
    if not told:
        notes.append("This TensorRT does not say which buffers are shared; past and present caches are paired by their names.")
    return tuple(notes)
