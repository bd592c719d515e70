"""What this machine can do at most, measured in the same process and with as many threads as the runtime has."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tformer_deploy.backends.graph import PROVIDER, import_runtime
from tformer_deploy.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 1 << 28  # many times the largest caches
GEMM_SIDE = 1024  # the fastest of the sizes tried: its operands stay in the caches
_BEST_OF = 5


@dataclass(frozen=True)
class Limits:
    """One sample.

    Attributes:
        read_gb_per_s: Bytes of memory read a second, 10^9.
        gemm_gflops: fp32 operations a second of ONNX Runtime's matrix product, 10^9; None where it cannot be measured.
    """

    read_gb_per_s: float
    gemm_gflops: float | None


class LimitProbe:
    """Samples the limits; a sample takes about 0.1 s, so that one can stand beside each measured run.

    Args:
        threads: Of the runtime; its default where None.

    Attributes:
        missing: Why there is no GEMM limit; None where there is one.
    """

    def __init__(self, threads: int | None) -> None:
        count = threads or processors()
        self._parts = np.array_split(np.ones(READ_BYTES, np.bool_), count)
        self._pool = ThreadPoolExecutor(count)
        self.missing: str | None = None
        self._gemm: Callable[[], object] | None = None
        try:
            self._gemm = _gemm(threads)
        except CapabilityError as e:
            self.missing = f"No GEMM limit: {e}"

    def sample(self) -> Limits:
        """The best of a few tries of each: a limit is what the machine does when nothing disturbs it."""
        read = READ_BYTES / _shortest(self._read) / 1e9
        return Limits(read, None if self._gemm is None else 2 * GEMM_SIDE**3 / _shortest(self._gemm) / 1e9)

    def _read(self) -> None:
        # Of what numpy reads with, the fastest: sums and maxima are bound by their own work, this by the memory.
        list(self._pool.map(np.count_nonzero, self._parts))


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gemm(threads: int | None) -> Callable[[], object]:
    """A square product in ONNX Runtime, its second operand packed as weights are.

    Raises:
        CapabilityError: A package is missing.
    """
    runtime = import_runtime()
    try:
        from onnx import TensorProto, helper
    except ImportError as e:
        raise CapabilityError(f"the package {e.name} is not installed.", "Run pip install onnx.") from None
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [GEMM_SIDE, GEMM_SIDE])
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["b"], value=one),  # folded when the graph is loaded
        helper.make_node("MatMul", ["a", "b"], ["c"]),
    ]
    a, c = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [GEMM_SIDE, GEMM_SIDE]) for name in "ac")
    graph = helper.make_graph(nodes, "gemm", [a], [c], [shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options: Any = runtime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    # Threads that spin after the product would take the processor from the run that is measured next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session: Any = runtime.InferenceSession(model.SerializeToString(), options, providers=[PROVIDER])
    operand = {"a": np.ones((GEMM_SIDE, GEMM_SIDE), np.float32)}
    return lambda: session.run(None, operand)


def _shortest(action: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_BEST_OF):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return min(seconds)
