"""A graph on ONNX Runtime with values inside it made outputs, in a copy that lies in memory alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_deploy.backends.dynamic import exact_rows
from tformer_deploy.backends.graph import PROVIDER, WEIGHTS_FOLDER, import_runtime, product_entries
from tformer_deploy.errors import CapabilityError, InputError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tformer_deploy.bundle import Bundle
    from tformer_deploy.bundle.signature import Phase

_ERRORS_ONLY = 3


class WatchedGraph:
    """One graph of a bundle.

    Args:
        bundle: Where it is.
        phase: Which one.
        wanted: Names of values to look at; those that the graph does not have are left out.
        scratch: An empty folder, or one that another graph of the same bundle has used: a bf16 bundle is cast into it.
        exact: Quantised weights become float32 and rows stay as they come; False: as deployed.

    Attributes:
        wanted: As given.
        dtype: The bundle's.
        cache_dtype: What the caches are given in.

    Raises:
        InputError: ONNX Runtime cannot load it.
        CapabilityError: The package onnx is not installed.
    """

    def __init__(self, bundle: Bundle, phase: Phase, wanted: Sequence[str], scratch: Path, exact: bool = True) -> None:
        try:
            import onnx
        except ImportError as e:
            raise CapabilityError(f"Looking into a graph needs the package onnx: {e}.", "Run pip install onnx.") from e
        manifest = bundle.manifest
        self.phase, self.wanted, self.config, self.dtype = phase, tuple(wanted), manifest.config, manifest.dtype
        self.cache_dtype: Any = np.float16 if manifest.dtype == "fp16" else np.float32
        folder = bundle.path
        if manifest.dtype == "bf16":
            from tformer_deploy.backends.bf16 import write_fp32_graphs

            folder = scratch
            if not (folder / f"{phase}.onnx").exists():
                write_fp32_graphs(bundle, folder)
        model = onnx.load(folder / f"{phase}.onnx", load_external_data=False)
        if exact and manifest.quantization is not None and manifest.quantization.dynamic:
            exact_rows(model.graph, bundle)
        outputs = {output.name for output in model.graph.output}
        inside = {name for node in model.graph.node for name in node.output}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.wanted if name in inside - outputs)
        self._names = [output.name for output in model.graph.output]
        runtime = import_runtime()
        options = runtime.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        options.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
        if exact:
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        for key, value in product_entries().items():
            options.add_session_config_entry(key, value)
        try:
            self._session = runtime.InferenceSession(model.SerializeToString(), options, providers=[PROVIDER])
        except Exception as e:
            raise InputError(f"ONNX Runtime cannot load {phase}.onnx with more outputs: {str(e).strip().splitlines()[0]}") from e

    def run(self, inputs: dict[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Every output, and every value looked at, by name.

        Raises:
            InputError: ONNX Runtime fails.
        """
        try:
            return dict(zip(self._names, self._session.run(self._names, inputs), strict=True))
        except Exception as e:
            raise InputError(f"ONNX Runtime failed in {self.phase}: {str(e).strip().splitlines()[0]}") from e
