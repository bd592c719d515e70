"""ONNX Runtime: a bundle's two portable graphs on caches that are updated in place, on the CPU or a GPU provider."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.backends.base import capacity_bucket
from tformer_deploy.backends.dynamic import exact_graph
from tformer_deploy.backends.graph import LoadedGraph, OnnxRuntimeCache, import_runtime
from tformer_deploy.backends.providers import PROVIDERS, ProviderCache, require_available
from tformer_deploy.bundle.signature import INPUT_IDS, LOGIT_POSITIONS, PAST_LENGTHS, PHASES, Phase

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tformer_deploy.backends.base import KVCache
    from tformer_deploy.backends.providers import ProviderName
    from tformer_deploy.bundle import Bundle
    from tformer_deploy.config import DType


class OnnxRuntimeBackend:
    """The two graphs of a bundle; each is loaded when it is first needed.

    Args:
        bundle: Where they are.
        threads: Of the runtime; its default where None.
        optimised: False runs the graphs as they are written, node by node, to compare with.
        dequantised: True turns quantised weights into float32 at loading, and leaves rows as they come, to compare with.
        provider: Which execution provider.

    Raises:
        CapabilityError: The package or the provider is not here.
    """

    name = "onnxruntime"

    def __init__(
        self, bundle: Bundle, threads: int | None = None, optimised: bool = True, dequantised: bool = False,
        provider: ProviderName = "cpu",
    ) -> None:  # fmt: skip
        self._runtime = import_runtime()
        require_available(self._runtime, provider)
        manifest = bundle.manifest
        self.config, self.max_length = manifest.config, manifest.max_length
        self.max_batch: int | None = None
        self.dtype: DType = manifest.dtype
        self.notes: tuple[str, ...] = () if provider == "cpu" else (f"ONNX Runtime runs on {PROVIDERS[provider]}.",)
        self._provider: ProviderName = provider
        self._threads, self._graphs = threads, dict[Phase, LoadedGraph]()
        self._optimised, self._dequantised = optimised, dequantised
        self._bundle, self._folder = bundle, bundle.path
        self._dynamic = manifest.quantization is not None and manifest.quantization.dynamic
        if manifest.dtype == "bf16":
            from tformer_deploy.backends.bf16 import write_fp32_graphs

            self._folder, self.dtype = Path(tempfile.mkdtemp(prefix="tformer-deploy-")), "fp32"
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            write_fp32_graphs(bundle, self._folder)
            reason = "ONNX Runtime's CPU provider has no bf16 MatMul: what ran" if provider == "cpu" else "What ran"
            self.notes = (
                *self.notes,
                f"{reason} is the bf16 graph cast to fp32, over the bf16 weights. The bf16 graph itself was not executed.",
            )

        if provider != "cpu":  # what does not start, or leaves work to the CPU, is known before anything runs
            for phase in PHASES:
                self._graph(phase)

    def capacity_for(self, length: int) -> int:
        """A bucket."""
        return capacity_bucket(length, self.max_length)

    def allocate(self, batch: int, capacity: int) -> OnnxRuntimeCache | ProviderCache:
        """Zeroed arrays."""
        shape = (batch, self.config.n_kv_heads, capacity, self.config.head_dim)
        dtype = np.float16 if self.dtype == "fp16" else np.float32
        if self._provider != "cpu":
            return ProviderCache.allocate(self._runtime, 2 * self.config.n_layers, shape, dtype)
        return OnnxRuntimeCache([np.zeros(shape, dtype) for _ in range(2 * self.config.n_layers)])

    def prefill(self, input_ids: NDArray[np.int64], logit_positions: NDArray[np.int64], cache: KVCache) -> NDArray[np.float32]:
        """See :class:`Backend`."""
        assert isinstance(cache, (OnnxRuntimeCache, ProviderCache))
        return self._graph("prefill").run({INPUT_IDS: input_ids, LOGIT_POSITIONS: logit_positions}, cache)

    def decode(
        self, input_ids: NDArray[np.int64], past_lengths: NDArray[np.int64], logit_positions: NDArray[np.int64], cache: KVCache
    ) -> NDArray[np.float32]:
        """See :class:`Backend`."""
        assert isinstance(cache, (OnnxRuntimeCache, ProviderCache))
        inputs = {INPUT_IDS: input_ids, PAST_LENGTHS: past_lengths, LOGIT_POSITIONS: logit_positions}
        return self._graph("decode").run(inputs, cache)

    def _graph(self, phase: Phase) -> LoadedGraph:
        if phase not in self._graphs:
            path = self._folder / f"{phase}.onnx"
            instead = exact_graph(path, self._bundle) if self._dequantised and self._dynamic else None
            graph = LoadedGraph(path, self.config, self._threads, self._optimised, self._dequantised, instead, self._provider)
            self.notes = self.notes if graph.note is None else (*self.notes, graph.note)
            self._graphs[phase] = graph
        return self._graphs[phase]
