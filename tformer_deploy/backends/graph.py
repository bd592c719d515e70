"""One graph loaded by ONNX Runtime, and its caches: what is bound once stays bound."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tformer_deploy.backends.providers import (
    PROVIDERS,
    RECORD_PLACES,
    ProviderCache,
    placement_note,
    require_active,
    require_available,
)
from tformer_deploy.bundle.signature import LOGITS, cache_names
from tformer_deploy.errors import CapabilityError, InputError, ResourceError, TformerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tformer_deploy.backends.providers import ProviderName
    from tformer_deploy.config import ModelConfig

# Recent wheels write telemetry files under the home folder when they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

PROVIDER = PROVIDERS["cpu"]
_FLOOR = (1, 25)  # the first release whose CPU provider has TensorScatter
_ERRORS_ONLY = 3
# Quantised weights are multiplied with rows rounded to int8: the level of MatMulNBits that is fast. Its exact ones are not.
INT8_ROWS = "4"
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_HINT = "Export the bundle again, or look at it with `tformer-deploy check`."


def import_runtime() -> Any:
    """The package onnxruntime.

    Raises:
        CapabilityError: It is not here, or too old.
    """
    try:
        import onnxruntime
    except ImportError as e:
        hint = "Run pip install 'tformer-deploy[cpu]'."
        raise CapabilityError(f"The onnxruntime backend needs the package onnxruntime: {e}.", hint) from e
    version = tuple(int(x) for x in onnxruntime.__version__.split(".")[:2])
    if version < _FLOOR:
        raise CapabilityError(
            f"onnxruntime {onnxruntime.__version__} is installed; its CPU provider has no TensorScatter.",
            "Run pip install 'onnxruntime>=1.25'.",
        )
    return onnxruntime


def product_entries() -> dict[str, str]:
    """Session entries that say how whole numbers are multiplied: fast, and without overflow."""
    entries = {"session.qdq_matmulnbits_accuracy_level": INT8_ROWS}
    return entries if _adds_in_32_bits() else entries | {"session.x64quantprecision": "1"}


def _adds_in_32_bits() -> bool:
    """Whether uint8 times int8 is exact on this CPU: x86 without VNNI adds pairs of products in 16 bits, which overflow."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i386", "i686"):
        return True
    try:
        return "_vnni" in Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return False


class OnnxRuntimeCache:
    """Caches as numpy arrays [B, K, C, D], which ONNX Runtime reads and writes where they lie."""

    def __init__(self, arrays: list[NDArray[Any]]) -> None:
        self.arrays = arrays
        self.batch, self.capacity = arrays[0].shape[0], arrays[0].shape[2]
        runtime = import_runtime()
        self.values = [runtime.OrtValue.ortvalue_from_numpy(a) for a in arrays]
        self.steps: dict[LoadedGraph, _Step] = {}

    def read(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Copies of one layer's key and value."""
        key, value = (a.astype(np.float32) for a in self.arrays[2 * layer : 2 * layer + 2])
        return key, value

    def write(self, layer: int, key: NDArray[np.float32], value: NDArray[np.float32]) -> None:
        """Replaces one layer's key and value."""
        self.arrays[2 * layer][:], self.arrays[2 * layer + 1][:] = key, value

    def bind(self, binding: Any, past: Sequence[str], present: Sequence[str]) -> None:
        """The same buffer is past and present."""
        for name, out, value in zip(past, present, self.values, strict=True):
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(out, value)

    def rows(self, start: int, stop: int) -> Self:
        """A view of some rows; leading rows of a contiguous array are contiguous themselves."""
        return type(self)([a[start:stop] for a in self.arrays])

    def resize(self, rows: Sequence[int], capacity: int) -> Self:
        """Copies of rows, with another capacity."""
        kept, resized = min(capacity, self.capacity), []
        for array in self.arrays:
            new = np.zeros((len(rows), array.shape[1], capacity, array.shape[3]), array.dtype)
            new[:, :, :kept] = array[list(rows), :, :kept]
            resized.append(new)
        return type(self)(resized)


class _Step:
    """Inputs, caches and logits bound for one new token a row: a step writes numbers into arrays, and runs."""

    def __init__(self, graph: LoadedGraph, inputs: dict[str, NDArray[np.int64]], cache: OnnxRuntimeCache) -> None:
        runtime = import_runtime()
        self.inputs = {name: np.array(array, dtype=np.int64) for name, array in inputs.items()}
        self.binding = graph.bound(cache)
        self._held = [runtime.OrtValue.ortvalue_from_numpy(array) for array in self.inputs.values()]
        for name, value in zip(self.inputs, self._held, strict=True):
            self.binding.bind_ortvalue_input(name, value)
        self.logits = np.empty((cache.batch, 1, graph.config.vocab_size), dtype=np.float32)
        self._held.append(runtime.OrtValue.ortvalue_from_numpy(self.logits))
        self.binding.bind_ortvalue_output(LOGITS, self._held[-1])

    def fits(self, inputs: dict[str, NDArray[np.int64]]) -> bool:
        """Whether these inputs have the shapes that are bound."""
        return all(self.inputs[name].shape == array.shape for name, array in inputs.items())


class LoadedGraph:
    """A graph in memory.

    Args:
        path: Its file.
        config: The model.
        threads: Of the runtime; its default where None.
        optimised: False runs the graph as it is written, node by node.
        dequantised: True turns quantised weights into float32 when the graph is loaded; what runs is then exact.
        instead: A serialised graph that is loaded in the file's place.
        provider: Which execution provider; another one never runs in its place.

    Attributes:
        note: What the provider left to the CPU; None where nothing.

    Raises:
        CapabilityError: The provider is not here, or does not start.
        InputError: The runtime cannot load it.
        ResourceError: Memory ran out.
    """

    def __init__(
        self, path: Path, config: ModelConfig, threads: int | None = None, optimised: bool = True, dequantised: bool = False,
        instead: bytes | None = None, provider: ProviderName = "cpu",
    ) -> None:  # fmt: skip
        self.path, self.config, self._provider = path, config, provider
        self._runtime = import_runtime()
        providers = require_available(self._runtime, provider)
        options = self._runtime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        if threads is not None:
            options.intra_op_num_threads = threads
        if not optimised:
            options.graph_optimization_level = self._runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        for key, value in product_entries().items():
            options.add_session_config_entry(key, value)
        if dequantised:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        if instead is not None:
            options.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
        if provider != "cpu":
            options.add_session_config_entry(RECORD_PLACES, "1")
        try:
            self._session = self._runtime.InferenceSession(instead or str(path), options, providers=providers)
        except Exception as e:
            reason = str(e).strip().splitlines()[0]
            if "alloc" in reason:
                hint = "Use a machine with more memory, or a smaller dtype."
                raise ResourceError(f"ONNX Runtime ran out of memory loading {path}: {reason}", hint) from e
            raise InputError(f"ONNX Runtime {self._runtime.__version__} cannot load {path}: {reason}", _HINT) from e
        require_active(self._session, provider)
        self.note = placement_note(self._session, path.stem, provider)
        self._past = cache_names(config.n_layers, "past_key_values")
        self._present = cache_names(config.n_layers, "present")

    def run(self, inputs: dict[str, NDArray[np.int64]], cache: OnnxRuntimeCache | ProviderCache) -> NDArray[np.float32]:
        """Runs the graph on a cache, which it updates in place → logits [B, N, V].

        Raises:
            InputError: The runtime failed.
            ResourceError: Memory ran out.
        """
        shape = next(iter(inputs.values())).shape
        try:
            if (
                isinstance(cache, OnnxRuntimeCache)
                and shape[1] == 1
                and all(array.shape[1:] in ((), (1,)) for array in inputs.values())
            ):
                return self._step(inputs, cache)
            binding = self.bound(cache)
            for name, array in inputs.items():
                binding.bind_cpu_input(name, np.ascontiguousarray(array, dtype=np.int64))
            binding.bind_output(LOGITS)
            self._session.run_with_iobinding(binding)
            # Caches were bound before, and outputs keep the order of binding.
            logits: NDArray[np.float32] = binding.get_outputs()[-1].numpy()
        except Exception as e:
            raise self._failure(e, shape, cache) from e
        return logits

    def bound(self, cache: OnnxRuntimeCache | ProviderCache) -> Any:
        """A binding of the caches alone. The same buffer is past and present: the graph then writes in place."""
        binding = self._session.io_binding()
        cache.bind(binding, self._past, self._present)
        return binding

    def _step(self, inputs: dict[str, NDArray[np.int64]], cache: OnnxRuntimeCache) -> NDArray[np.float32]:
        step = cache.steps.get(self)
        if step is None or not step.fits(inputs):
            step = cache.steps[self] = _Step(self, inputs, cache)
        for name, array in inputs.items():
            step.inputs[name][...] = array
        self._session.run_with_iobinding(step.binding)
        return step.logits.copy()

    def _failure(self, error: Exception, shape: tuple[int, ...], cache: OnnxRuntimeCache | ProviderCache) -> TformerError:
        reason = str(error).strip().splitlines()[0]
        place = f"{self.path.stem} of {shape[0]} rows, {shape[1]} tokens each, capacity {cache.capacity}"
        if "alloc" in reason or isinstance(error, MemoryError):
            return ResourceError(f"ONNX Runtime ran out of memory in {place}: {reason}", "Lower --max-batch or --max-length.")
        return InputError(f"ONNX Runtime {self._runtime.__version__} failed in {place}: {reason}", _HINT)
