"""A plan that TensorRT has loaded: compared with the record and the signature before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tformer_deploy.backends.tensorrt.records import dtype_of
from tformer_deploy.backends.tensorrt.schedule import ProfileShape, aliased_pairs
from tformer_deploy.bundle.engine_record import REBUILD
from tformer_deploy.bundle.signature import INPUT_IDS, LOGIT_POSITIONS, PAST_LENGTHS, graph_inputs, graph_outputs
from tformer_deploy.errors import CapabilityError, InputError

if TYPE_CHECKING:
    from tformer_deploy.backends.cuda import Gpu
    from tformer_deploy.backends.tensorrt.package import RuntimePackage
    from tformer_deploy.backends.tensorrt.runtime_cache import RuntimeCacheFile
    from tformer_deploy.bundle.engines import EnginePlan, EngineProfile, EngineRecord
    from tformer_deploy.config import ModelConfig

# TensorRT's name of each dtype of the signature.
_DTYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "int64": "INT64"}


@dataclass(frozen=True)
class Expected:
    """What a plan must be: the engine's record and the model."""

    record: EngineRecord
    config: ModelConfig


class LoadedPlan:
    """One deserialised plan.

    Args:
        package: The runtime.
        number: Of the plan in its engine.
        stored: What the record says of it.
        data: Its bytes, whose hash was compared.
        expected: What it must be.
        gpu: Where it will run.
        cache_file: Where RTX keeps what it compiles for the GPU; None for full TensorRT.

    Attributes:
        profiles: What each profile takes.
        aliases: (past, present) names that share a buffer.
        told: Whether the engine itself named them.
        inputs: Names of its inputs beside the caches.

    Raises:
        CapabilityError: The runtime refuses it on this machine.
        InputError: It is not what its record says.
    """

    def __init__(
        self, package: RuntimePackage, number: int, stored: EnginePlan, data: bytes, expected: Expected, gpu: Gpu,
        cache_file: RuntimeCacheFile | None,
    ) -> None:  # fmt: skip
        self._package, self._cache_file = package, cache_file
        self._runtime: Any = package.module.Runtime(package.logger)
        self._engine: Any = _deserialise(package, self._runtime, data, stored.file, gpu)
        self._config: Any = None
        self._runtime_cache: Any = None
        names = _io_names(self._engine)
        _require_signature(package, self._engine, names, expected, stored)
        self.inputs = tuple(n for n in (INPUT_IDS, PAST_LENGTHS, LOGIT_POSITIONS) if n in names)
        self.profiles = _profiles(self._engine, number, stored, PAST_LENGTHS in names)
        answer = getattr(self._engine, "get_aliased_input_tensor", None)
        self.told = answer is not None
        self.aliases = aliased_pairs(expected.config.n_layers, answer)
        if package.flavour == "rtx":
            self._configure()

    def context(self, profile: ProfileShape, stream: int) -> Any:
        """A context of its own for one profile; what choosing it queues runs on the stream.

        Raises:
            CapabilityError: The runtime makes none, for instance for lack of memory.
        """
        self._package.clear()
        # Each context then has memory for its own profile alone.
        strategy = self._package.module.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        context = self._engine.create_execution_context(strategy if self._config is None else self._config)
        if context is None:
            raise CapabilityError(
                f"TensorRT makes no execution context for the profile {profile.name}: {self._package.failure()}.",
                "Free memory on the GPU, or build with a smaller --max-batch or --prompt-bucket.",
            )
        self.require(context.set_optimization_profile_async(profile.index, stream), f"choosing the profile {profile.name}")
        return context

    def require(self, done: bool, what: str) -> None:
        """Raises what TensorRT logged where a call of it failed.

        Raises:
            CapabilityError: ``done`` is false.
        """
        if not done:
            raise CapabilityError(
                f"TensorRT failed in {what}: {self._package.failure()}.",
                "Run `tformer-deploy doctor`, and build the engine again here.",
            )

    def save_runtime_cache(self) -> None:
        """Keeps what RTX compiled for this GPU."""
        if self._cache_file is not None and self._runtime_cache is not None:
            self._cache_file.save(self._runtime_cache)

    def _configure(self) -> None:
        """RTX compiles kernels when an engine first runs, and captures CUDA graphs itself."""
        trt = self._package.module
        self._config = self._engine.create_runtime_config()
        self._config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE)
        self._config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        self._runtime_cache = self._config.create_runtime_cache()
        if self._cache_file is not None:
            self._cache_file.load(self._runtime_cache)
        self.require(self._config.set_runtime_cache(self._runtime_cache), "setting the runtime cache")


def _deserialise(package: RuntimePackage, runtime: Any, data: bytes, file: str, gpu: Gpu) -> Any:
    package.clear()
    if package.flavour == "rtx":  # it can judge a plan by its head
        validity, flags = runtime.get_engine_validity(data)
        if validity == package.module.EngineValidity.INVALID:
            reasons = [
                name for name, flag in package.module.EngineInvalidityDiagnostics.__members__.items() if int(flag) & int(flags)
            ]
            raise CapabilityError(
                f"TensorRT-RTX {package.version} cannot run {file} on {gpu.name}: {', '.join(reasons) or package.failure()}.",
                "Update the NVIDIA driver where it is too old, or build the engine again.",
            )
    engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise CapabilityError(
            f"TensorRT {package.version} cannot load {file} on {gpu.name}: {package.failure()}.",
            "Update the NVIDIA driver where it is too old, or build the engine again.",
        )
    return engine


def _io_names(engine: Any) -> list[str]:
    return [str(engine.get_tensor_name(i)) for i in range(engine.num_io_tensors)]


def _require_signature(package: RuntimePackage, engine: Any, names: list[str], expected: Expected, stored: EnginePlan) -> None:
    """Names, directions, dtypes and fixed dims; an address that is too short for a tensor would be written past its end."""
    trt, record, config = package.module, expected.record, expected.config
    file, graph = stored.file, stored.graph
    inputs, outputs = graph_inputs(config, dtype_of(record), "decode"), graph_outputs(config, dtype_of(record))
    known = {t.name for t in (*inputs, *outputs)}
    if graph == "prefill":
        known -= {PAST_LENGTHS}
    missing = known - set(names)
    if missing or set(names) - known:
        raise InputError(
            f"{file} lacks {sorted(missing)} and has {sorted(set(names) - known)}; expected those of the {graph} graph.", REBUILD
        )
    for tensors, mode in ((inputs, trt.TensorIOMode.INPUT), (outputs, trt.TensorIOMode.OUTPUT)):
        for tensor in [t for t in tensors if t.name in names]:
            dims = tuple(record.capacity if d == "capacity" else d for d in tensor.dims)
            found = tuple(engine.get_tensor_shape(tensor.name))
            agrees = len(found) == len(dims) and all(isinstance(d, str) or d == f for d, f in zip(dims, found, strict=True))
            dtype = engine.get_tensor_dtype(tensor.name)
            if not agrees or dtype != getattr(trt.DataType, _DTYPES[tensor.dtype]) or engine.get_tensor_mode(tensor.name) != mode:
                raise InputError(
                    f"{file}: {tensor.name} is {dtype} {list(found)}; expected {tensor.dtype} {list(dims)} as an {mode.name.lower()}.",
                    REBUILD,
                )
            if engine.get_tensor_location(tensor.name) != trt.TensorLocation.DEVICE:
                raise InputError(f"{file}: {tensor.name} lies in host memory; expected device memory.", REBUILD)


def _profiles(engine: Any, number: int, stored: EnginePlan, takes_past: bool) -> tuple[ProfileShape, ...]:
    if engine.num_optimization_profiles != len(stored.profiles):
        raise InputError(
            f"{stored.file} has {engine.num_optimization_profiles} profiles; its record names {len(stored.profiles)}.", REBUILD
        )
    return tuple(_profile(engine, number, i, p, stored.file, takes_past) for i, p in enumerate(stored.profiles))


def _profile(engine: Any, number: int, index: int, named: EngineProfile, file: str, takes_past: bool) -> ProfileShape:
    low, _, high = (tuple(dims) for dims in engine.get_tensor_profile_shape(INPUT_IDS, index))
    fewest, _, most = (tuple(dims) for dims in engine.get_tensor_profile_shape(LOGIT_POSITIONS, index))
    record = ((named.batch[0], named.sequence[0]), (named.batch[2], named.sequence[2]))
    logits = (int(fewest[1]), int(most[1]))
    if (low, high) != record or low[0] != 1 or logits != (1, named.logits[2]):
        raise InputError(
            f"{file}: profile {named.name} takes {list(low)} to {list(high)} rows and tokens; its record says {list(record[0])} to "
            f"{list(record[1])} and {named.logits[2]} logits, and one row and one of its logits must do; there are {list(logits)}.",
            REBUILD,
        )
    return ProfileShape(number, index, named.name, int(high[0]), (int(low[1]), int(high[1])), int(most[1]), takes_past)
