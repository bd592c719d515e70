"""ONNX Runtime on the CPU: both graphs on caches that are updated in place."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tformer_deploy.backends.base import capacity_bucket
from tformer_deploy.bundle.signature import INPUT_IDS, LOGIT_POSITIONS, LOGITS, PAST_LENGTHS, Phase, cache_names
from tformer_deploy.errors import CapabilityError, InputError, ResourceError, TformerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tformer_deploy.backends.base import KVCache
    from tformer_deploy.bundle import Bundle
    from tformer_deploy.config import DType

# Recent wheels write telemetry files under the home folder when they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

PROVIDER = "CPUExecutionProvider"
_FLOOR = (1, 25)  # the first release whose CPU provider has TensorScatter
_ERRORS_ONLY = 3


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


class OnnxRuntimeCache:
    """Caches as numpy arrays [B, K, C, D], which ONNX Runtime reads and writes where they lie."""

    def __init__(self, arrays: list[NDArray[Any]]) -> None:
        self.arrays = arrays
        self.batch, self.capacity = arrays[0].shape[0], arrays[0].shape[2]
        runtime = import_runtime()
        self.values = [runtime.OrtValue.ortvalue_from_numpy(a) for a in arrays]

    def read(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Copies of one layer's key and value."""
        key, value = (a.astype(np.float32) for a in self.arrays[2 * layer : 2 * layer + 2])
        return key, value

    def write(self, layer: int, key: NDArray[np.float32], value: NDArray[np.float32]) -> None:
        """Replaces one layer's key and value."""
        self.arrays[2 * layer][:], self.arrays[2 * layer + 1][:] = key, value

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


class OnnxRuntimeBackend:
    """The two graphs of a bundle; each is loaded when it is first needed.

    Args:
        bundle: Where they are.
        threads: Of the runtime; its default where None.
        optimised: False runs the graphs as they are written, node by node, to compare with.
    """

    name = "onnxruntime"

    def __init__(self, bundle: Bundle, threads: int | None = None, optimised: bool = True) -> None:
        self._runtime = import_runtime()
        manifest = bundle.manifest
        self.config, self.max_length = manifest.config, manifest.max_length
        self.max_batch: int | None = None
        self.dtype: DType = manifest.dtype
        self.notes: tuple[str, ...] = ()
        self._threads, self._optimised, self._sessions = threads, optimised, dict[Phase, Any]()
        self._folder = bundle.path
        if manifest.dtype == "bf16":
            from tformer_deploy.backends.bf16 import write_fp32_graphs

            self._folder, self.dtype = Path(tempfile.mkdtemp(prefix="tformer-deploy-")), "fp32"
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            write_fp32_graphs(bundle, self._folder)
            self.notes = (
                "ONNX Runtime's CPU provider has no bf16 MatMul: what ran is the bf16 graph cast to fp32, over the bf16 weights. "
                "The bf16 graph itself was not executed.",
            )

    def capacity_for(self, length: int) -> int:
        """A bucket."""
        return capacity_bucket(length, self.max_length)

    def allocate(self, batch: int, capacity: int) -> OnnxRuntimeCache:
        """Zeroed arrays."""
        shape = (batch, self.config.n_kv_heads, capacity, self.config.head_dim)
        dtype = np.float16 if self.dtype == "fp16" else np.float32
        return OnnxRuntimeCache([np.zeros(shape, dtype) for _ in range(2 * self.config.n_layers)])

    def prefill(self, input_ids: NDArray[np.int64], logit_positions: NDArray[np.int64], cache: KVCache) -> NDArray[np.float32]:
        """See :class:`Backend`."""
        return self._run("prefill", {INPUT_IDS: input_ids, LOGIT_POSITIONS: logit_positions}, cache)

    def decode(
        self, input_ids: NDArray[np.int64], past_lengths: NDArray[np.int64], logit_positions: NDArray[np.int64], cache: KVCache
    ) -> NDArray[np.float32]:
        """See :class:`Backend`."""
        return self._run("decode", {INPUT_IDS: input_ids, PAST_LENGTHS: past_lengths, LOGIT_POSITIONS: logit_positions}, cache)

    def _run(self, phase: Phase, inputs: dict[str, NDArray[np.int64]], cache: KVCache) -> NDArray[np.float32]:
        assert isinstance(cache, OnnxRuntimeCache)
        session = self._session(phase)
        binding = session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array, dtype=np.int64))
        binding.bind_output(LOGITS)  # first: get_outputs() keeps the order of binding
        n = self.config.n_layers
        # The same buffer as past and present: TensorScatter then writes in place.
        for past, present, value in zip(cache_names(n, "past_key_values"), cache_names(n, "present"), cache.values, strict=True):
            binding.bind_ortvalue_input(past, value)
            binding.bind_ortvalue_output(present, value)
        try:
            session.run_with_iobinding(binding)
        except Exception as e:
            raise self._failure(e, phase, next(iter(inputs.values())).shape, cache) from e
        logits: NDArray[np.float32] = binding.get_outputs()[0].numpy()
        return logits

    def _failure(self, error: Exception, phase: Phase, shape: tuple[int, ...], cache: OnnxRuntimeCache) -> TformerError:
        reason = str(error).strip().splitlines()[0]
        place = f"{phase} of {shape[0]} rows, {shape[1]} tokens each, capacity {cache.capacity}"
        if "alloc" in reason or isinstance(error, MemoryError):
            return ResourceError(f"ONNX Runtime ran out of memory in {place}: {reason}", "Lower --max-batch or --max-length.")
        return InputError(f"ONNX Runtime {self._runtime.__version__} failed in {place}: {reason}")

    def _session(self, phase: Phase) -> Any:
        if phase not in self._sessions:
            options = self._runtime.SessionOptions()
            options.log_severity_level = _ERRORS_ONLY
            if self._threads is not None:
                options.intra_op_num_threads = self._threads
            if not self._optimised:
                options.graph_optimization_level = self._runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
            path = self._folder / f"{phase}.onnx"
            try:
                self._sessions[phase] = self._runtime.InferenceSession(str(path), options, providers=[PROVIDER])
            except Exception as e:
                reason = str(e).strip().splitlines()[0]
                if "alloc" in reason:
                    raise ResourceError(f"ONNX Runtime ran out of memory loading {path}: {reason}") from e
                raise InputError(f"ONNX Runtime {self._runtime.__version__} cannot load {path}: {reason}") from e
        return self._sessions[phase]
