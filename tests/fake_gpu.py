# ruff: noqa: N802 - the driver's own names
"""A GPU, its driver library and TensorRT, made of host memory and ONNX Runtime: every native call is checked, logged and *computes*.

Device memory is host memory at real addresses; what is queued on a stream runs at ``cuStreamSynchronize`` and not before, so
that a result read too early is wrong. A captured graph keeps the shapes and addresses that it was captured with. An engine runs
the bundle's decode graph on whatever lies at the addresses it was given. Public names of the classes here are those of the real
module alone; test_tensorrt_api.py compares them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import hashlib
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest

from tformer_deploy.backends import cuda
from tformer_deploy.backends.tensorrt import package
from tformer_deploy.bundle import Bundle
from tformer_deploy.bundle.engine_record import WAYS
from tformer_deploy.bundle.engines import ENGINES, SIDECAR, EnginePlan, EngineProfile, EngineRecord, dump_record
from tformer_deploy.bundle.signature import graph_inputs, graph_outputs

ERRORS = {
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    46: ("CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"),
    100: ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    803: ("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"),
    900: ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"),
}
NUMPY: dict[str, Any] = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "int64": np.int64}
MAGIC = b"FAKEPLAN"


def plain(argument: Any) -> Any:
    return getattr(argument, "value", argument)


class FakeLibrary:
    """libcuda. ``fail`` makes a call return a code, from its n-th use on where that is given."""

    def __init__(self, capability: tuple[int, int] = (8, 9), gpus: int = 1, total: int = 2**33) -> None:
        self.capability, self.gpus, self.total, self.used = capability, gpus, total, 0
        self.log: list[tuple[Any, ...]] = []
        self.fail: dict[str, int] = {}
        self.memory: dict[int, np.ndarray] = {}
        self.pinned: dict[int, np.ndarray] = {}
        self.queue: list[Any] = []
        self.capturing: list[Any] | None = None
        self.graphs: dict[int, list[Any]] = {}
        self.handles = 1000
        self.initialised = self.current = False

    def __getattr__(self, name: str) -> Any:
        if name not in cuda.CALLS:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            assert len(arguments) == len(cuda.CALLS[name]), name
            self.log.append((name, *(plain(a) for a in arguments if not hasattr(a, "_obj"))))
            if name in self.fail:
                return self.fail[name]
            free = {"cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"}
            assert self.initialised or name in free, f"{name} before cuInit"
            return getattr(self, f"_{name}")(*arguments) or 0

        return call

    def names(self) -> list[str]:
        return [entry[0] for entry in self.log]

    def view(self, address: int, size: int) -> np.ndarray:
        """Device memory; an access outside of what was allocated fails."""
        for start, block in self.memory.items():
            if start <= address and address + size <= start + len(block):
                return block[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address:#x} are no device memory")

    def push(self, work: Any) -> None:
        (self.queue if self.capturing is None else self.capturing).append(work)

    def new_handle(self) -> int:
        self.handles += 1
        return self.handles

    def _cuInit(self, flags):
        self.initialised = True

    def _cuDriverGetVersion(self, out):
        out._obj.value = 13000

    def _text(self, code, out, which):
        if code not in ERRORS:
            return 1
        out._obj.value = ERRORS[code][which].encode()
        return 0

    def _cuGetErrorName(self, code, out):
        return self._text(code, out, 0)

    def _cuGetErrorString(self, code, out):
        return self._text(code, out, 1)

    def _cuDeviceGetCount(self, out):
        out._obj.value = self.gpus

    def _cuDeviceGet(self, out, index):
        out._obj.value = index

    def _cuDeviceGetName(self, buffer, size, device):
        buffer.value = b"Imaginary RTX 1"

    def _cuDeviceGetAttribute(self, out, attribute, device):
        out._obj.value = self.capability[attribute - 75]

    def _cuDeviceTotalMem_v2(self, out, device):
        out._obj.value = self.total

    def _cuDevicePrimaryCtxRetain(self, out, device):
        out._obj.value = 77

    def _cuDevicePrimaryCtxRelease_v2(self, device):
        self.current = False

    def _cuCtxSetCurrent(self, context):
        assert plain(context) == 77
        self.current = True

    def _cuMemGetInfo_v2(self, free, total):
        free._obj.value, total._obj.value = self.total - self.used, self.total

    def _block(self, size):
        block = np.full(size + 256, 0xA5, np.uint8)  # never zero by itself
        start = -block.ctypes.data % 256
        return block[start : start + size]

    def _cuMemAlloc_v2(self, out, size):
        assert self.current
        block = self._block(size)
        self.memory[block.ctypes.data] = block
        self.used += size
        out._obj.value = block.ctypes.data

    def _cuMemFree_v2(self, address):
        assert not self.queue, "freed while work is queued"
        self.used -= len(self.memory.pop(address))

    def _cuMemHostAlloc(self, out, size, flags):
        block = self._block(size)
        self.pinned[block.ctypes.data] = block
        out._obj.value = block.ctypes.data

    def _cuMemFreeHost(self, address):
        del self.pinned[address]

    def _cuMemsetD8Async(self, address, value, size, stream):
        self.push(lambda: self.view(address, size).fill(value))

    def _cuMemcpyHtoDAsync_v2(self, target, source, size, stream):
        self.push(lambda: ctypes.memmove(self.view(target, size).ctypes.data, source, size))

    def _cuMemcpyDtoHAsync_v2(self, target, source, size, stream):
        self.push(lambda: ctypes.memmove(target, self.view(source, size).ctypes.data, size))

    def _cuMemcpyDtoDAsync_v2(self, target, source, size, stream):
        def copy():
            self.view(target, size)[:] = self.view(source, size)

        self.push(copy)

    def _cuStreamCreate(self, out, flags):
        assert flags == 1
        out._obj.value = self.new_handle()

    def _cuStreamDestroy_v2(self, stream):
        assert not self.queue

    def _cuStreamSynchronize(self, stream):
        if self.capturing is not None:
            return 900
        work, self.queue = self.queue, []
        for step in work:
            step()
        return 0

    def _cuStreamBeginCapture_v2(self, stream, mode):
        assert self.capturing is None
        self.capturing = []

    def _cuStreamEndCapture(self, stream, out):
        assert self.capturing is not None
        out._obj.value = self.new_handle()
        self.graphs[out._obj.value], self.capturing = self.capturing, None

    def _cuGraphInstantiateWithFlags(self, out, graph, flags):
        out._obj.value = self.new_handle()
        self.graphs[out._obj.value] = self.graphs[plain(graph)]

    def _cuGraphDestroy(self, graph):
        del self.graphs[plain(graph)]

    def _cuGraphExecDestroy(self, graph):
        del self.graphs[graph]

    def _cuGraphLaunch(self, graph, stream):
        for work in self.graphs[graph]:
            self.push(work)


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class TensorLocation(enum.Enum):
    DEVICE, HOST = range(2)


class DataType(enum.Enum):
    FLOAT, HALF, INT64, BF16 = range(4)


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class CudaGraphStrategy(enum.Enum):
    DISABLED, WHOLE_GRAPH_CAPTURE = range(2)


class EngineValidity(enum.Enum):
    VALID, SUBOPTIMAL, INVALID = range(3)


class EngineInvalidityDiagnostics(enum.IntFlag):
    VERSION_MISMATCH, UNSUPPORTED_CC, OLD_CUDA_DRIVER, OLD_CUDA_RUNTIME = 1, 2, 4, 8
    INSUFFICIENT_GPU_MEMORY, MALFORMED_ENGINE, CUDA_ERROR = 16, 32, 64


class ILogger:
    ERROR, WARNING = 1, 2


@dataclasses.dataclass
class FakeSettings:
    """How the fake runtime misbehaves."""

    validity: tuple[EngineValidity, int] = (EngineValidity.VALID, 0)
    deserialises: bool = True
    alias_of: Any = None
    cannot_capture: bool = False
    fails_at: str = ""
    seen: list[bytes] = dataclasses.field(default_factory=list)
    events: list[Any] = dataclasses.field(default_factory=list)


class FakeRuntimeCache:
    def __init__(self, settings: FakeSettings) -> None:
        self._content, self._settings = b"", settings

    def deserialize(self, blob):
        taken = bytes(blob).startswith(b"compiled")
        self._content = bytes(blob) if taken else b""
        self._settings.events.append(("runtime cache read", taken))
        return taken

    def serialize(self):
        return memoryview(self._content or b"compiled for this GPU")


class FakeRuntimeConfig:
    def __init__(self, settings: FakeSettings) -> None:
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self._settings, self._cache = settings, None

    def create_runtime_cache(self):
        return FakeRuntimeCache(self._settings)

    def set_runtime_cache(self, cache):
        self._cache = cache
        return True

    def set_execution_context_allocation_strategy(self, strategy):
        assert strategy is ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine, self._profile, self._warm = engine, None, False
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_optimization_profile_async(self, profile_index, stream_handle):
        assert stream_handle
        assert profile_index not in self._engine._taken, "two contexts of one profile"
        self._engine._taken.add(profile_index)
        self._profile = profile_index
        return True

    def set_input_shape(self, name, shape):
        settings = self._engine._settings
        if settings.fails_at == "shape":
            return False
        low, _, high = self._engine.get_tensor_profile_shape(name, self._profile)
        inside = len(shape) == len(low) and all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True))
        self._shapes[name], self._warm = tuple(shape), False
        settings.events.append(("shape", name, tuple(shape)))
        return inside

    def set_tensor_address(self, name, memory):
        self._engine._settings.events.append(("address", name, memory))
        self._addresses[name], self._warm = memory, False
        return memory % 256 == 0

    def infer_shapes(self):
        return [n for n in self._engine._inputs if n not in self._shapes]

    def execute_async_v3(self, stream_handle):
        library, settings = self._engine._library, self._engine._settings
        settings.events.append(("execute", self._profile, library.capturing is not None))
        if library.capturing is not None and (settings.cannot_capture or not self._warm):
            self._engine._logger.log(ILogger.ERROR, "this cannot be captured In run at /x/y.cpp:7")
            return False
        if settings.fails_at == "execute" or set(self._addresses) != set(self._engine._names):
            self._engine._logger.log(ILogger.ERROR, "the enqueue failed")
            return False
        self._warm = True
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        library.push(lambda: self._engine._compute(shapes, addresses))
        return True


class FakeEngine:
    """Runs an ONNX graph of a bundle on the fake device's memory."""

    def __init__(self, description: dict[str, Any], library: FakeLibrary, settings: FakeSettings, logger: Any) -> None:
        self._d, self._library, self._settings, self._logger = description, library, settings, logger
        self._taken: set[int] = set()
        config = types.SimpleNamespace(**description["config"])
        phase = description["phase"]
        self._inputs = {t.name: t for t in graph_inputs(config, description["dtype"], phase)}  # type: ignore[arg-type]
        self._outputs = {t.name: t for t in graph_outputs(config, description["dtype"])}  # type: ignore[arg-type]
        self._names = [*self._inputs, *self._outputs]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # a cache that is no output's buffer is copied, which is what happens here
        self._session = onnxruntime.InferenceSession(description["graph"], options, providers=["CPUExecutionProvider"])
        self.num_io_tensors, self.num_optimization_profiles = len(self._names), len(description["profiles"])

    def get_tensor_name(self, index):
        return self._names[index]

    def _tensor(self, name):
        return self._inputs.get(name) or self._outputs[name]

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_location(self, name):
        return TensorLocation.DEVICE

    def get_tensor_dtype(self, name):
        return {"fp32": DataType.FLOAT, "fp16": DataType.HALF, "bf16": DataType.BF16, "int64": DataType.INT64}[
            self._tensor(name).dtype
        ]

    def get_tensor_shape(self, name):
        return tuple(self._d["capacity"] if d == "capacity" else -1 if isinstance(d, str) else d for d in self._tensor(name).dims)

    def get_tensor_profile_shape(self, name, profile_index):
        profile = self._d["profiles"][profile_index]
        found = []
        for i in range(3):
            dims = {"batch": profile["batch"][i], "sequence": profile["sequence"][i], "capacity": self._d["capacity"]}
            dims["num_logits"] = profile["logits"][i]
            found.append(tuple(dims.get(d, d) for d in self._inputs[name].dims))
        return found

    def get_aliased_input_tensor(self, name):
        if self._settings.alias_of is not None:
            return self._settings.alias_of(name)
        return name.replace("present", "past_key_values") if name.startswith("present") else None

    def create_runtime_config(self):
        return FakeRuntimeConfig(self._settings)

    def create_execution_context(self, strategy):
        if self._settings.fails_at == "context":
            self._logger.log(ILogger.ERROR, "not enough memory for a context")
            return None
        if isinstance(strategy, FakeRuntimeConfig):
            self._settings.events.append(("config", strategy.cuda_graph_strategy.name, strategy._cache is not None))
        else:
            assert strategy is ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE
        return FakeContext(self)

    def _array(self, name, shape, address):
        dtype = np.dtype(NUMPY[self._tensor(name).dtype])
        size = int(np.prod(shape)) * dtype.itemsize
        return self._library.view(address, size).view(dtype).reshape(shape)

    def _compute(self, shapes, addresses):
        feeds = {name: self._array(name, shape, addresses[name]).copy() for name, shape in shapes.items()}
        found = dict(zip(self._outputs, self._session.run(list(self._outputs), feeds), strict=True))
        for name, value in found.items():
            self._array(name, value.shape, addresses[name])[...] = value


class FakeRuntime:
    def __init__(self, logger, library: FakeLibrary, settings: FakeSettings) -> None:
        self._logger, self._library, self._settings = logger, library, settings

    def get_engine_validity(self, buffer):
        self._settings.seen.append(bytes(buffer))
        return self._settings.validity

    def deserialize_cuda_engine(self, serialized_engine):
        self._settings.seen.append(bytes(serialized_engine))
        if not self._settings.deserialises:
            self._logger.log(ILogger.ERROR, "CUDA driver version is insufficient In load at /src/a.cpp:1")
            return None
        description = json.loads(bytes(serialized_engine).removeprefix(MAGIC))
        return FakeEngine(description, self._library, self._settings, self._logger)


class FakeMachine:
    """One GPU and one TensorRT, in place of the real ones until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, flavour: str = "rtx", version: str = "1.7.1.116", **library: Any) -> None:
        self.flavour, self.version = flavour, version
        self.library, self.settings = FakeLibrary(**library), FakeSettings()
        module = types.ModuleType(package.MODULES[flavour])
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__version__ = version  # type: ignore[attr-defined]
        for kind in (
            ILogger, TensorIOMode, TensorLocation, DataType, ExecutionContextAllocationStrategy, CudaGraphStrategy, EngineValidity,
            EngineInvalidityDiagnostics,
        ):  # fmt: skip
            setattr(module, kind.__name__, kind)
        module.Runtime = lambda logger: FakeRuntime(logger, self.library, self.settings)  # type: ignore[attr-defined]
        for name in package.MODULES.values():
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(package, "installed_flavours", lambda: [flavour])
        monkeypatch.setattr(package, "_loggers", {})
        monkeypatch.setattr(cuda, "load_driver", lambda: cuda.Driver(self.library))

    def executions(self) -> list[tuple[int, bool]]:
        """(profile, captured) of every execution so far."""
        return [event[1:] for event in self.settings.events if event[0] == "execute"]


def write_engine(
    bundle: Bundle, *, flavour: str = "rtx", version: str = "1.7.1.116", target: str = "portable",
    capabilities: tuple[str, ...] = ("8.0", "8.9"), capacity: int = 256, max_batch: int = 8, buckets: tuple[int, ...] = (64, 256),
    layout: str = "shared", positions: int = 1,
) -> Path:  # fmt: skip
    """An engine whose plans the fake runtime runs. ``split`` has the buckets in a plan of the prefill graph, ``decode`` none."""
    config, layers = bundle.manifest.config, bundle.manifest.config.n_layers
    rows, low, prefill = (1, max_batch, max_batch), 2, []
    kernels = {"_gemv_mha_v1": layers}
    decode = [EngineProfile("decode", "decode", rows, (1, 1, 1), (1, 1, 1), kernels, kernels)]
    for edge in buckets:
        kernels = {"_gemm_mha_v2": layers}
        logits = (1, 1, min(positions, edge))
        prefill.append(EngineProfile(f"prefill-{edge}", "prefill", rows, (low, edge, edge), logits, kernels, kernels))
        low = edge + 1
    parts = {
        "shared": [("shared", "decode", [*decode, *prefill])],
        "split": [("decode", "decode", decode), ("prefill", "prefill", prefill)],
        "decode": [("decode", "decode", decode)],
    }[layout]
    plans, contents = [], {}
    for name, graph, profiles in parts:
        description = {
            "graph": str((bundle.path / f"{graph}.onnx").resolve()),
            "phase": graph,
            "dtype": bundle.manifest.dtype,
            "capacity": capacity,
            "config": {k: getattr(config, k) for k in ("n_layers", "n_kv_heads", "head_dim", "vocab_size")},
            "profiles": [{"batch": p.batch, "sequence": p.sequence, "logits": p.logits} for p in profiles],
        }
        data = MAGIC + json.dumps(description).encode()
        contents[f"{name}.engine"] = data
        plans.append(
            EnginePlan(name, f"{name}.engine", hashlib.sha256(data).hexdigest(), len(data), graph, "a" * 64, tuple(profiles))
        )
    record = EngineRecord(
        core_sha256=bundle.core_sha256, flavour=flavour, version=version, target=target, compute_capabilities=capabilities,
        layout=layout, dtype=bundle.manifest.dtype, matrices=bundle.manifest.dtype, capacity=capacity, max_batch=max_batch, attentions=layers,
        cache_updates=2 * layers, weights_bytes=1, cache_row_bytes=1, ways=WAYS[flavour][0], plans=tuple(plans), graph=None,
    )  # fmt: skip
    folder = bundle.path / ENGINES / record.name
    folder.mkdir(parents=True)
    for file, data in contents.items():
        (folder / file).write_bytes(data)
    (folder / SIDECAR).write_bytes(dump_record(record))
    return folder
