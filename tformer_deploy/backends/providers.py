"""ONNX Runtime's execution providers: one that is asked for runs, or it is an error. ONNX Runtime itself only warns."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from tformer_deploy.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

ProviderName = Literal["cpu", "cuda", "tensorrt"]
PROVIDERS: dict[ProviderName, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
# Makes a session remember which provider got which node.
RECORD_PLACES = "session.record_ep_graph_assignment_info"


def require_available(runtime: Any, provider: ProviderName) -> list[str]:
    """What a session is asked for, the best first; TensorRT leaves what it cannot do to CUDA.

    Raises:
        CapabilityError: This build of ONNX Runtime does not have the provider.
    """
    available = runtime.get_available_providers()
    wanted = PROVIDERS[provider]
    if wanted not in available:
        raise CapabilityError(
            f"ONNX Runtime {runtime.__version__} here has no {wanted}; it has {', '.join(available)}.",
            "Run pip install 'tformer-deploy[gpu]' in an environment without the package onnxruntime, or use --provider cpu.",
        )
    return [wanted] if provider != "tensorrt" else [wanted, *(p for p in (PROVIDERS["cuda"],) if p in available)]


def require_active(session: Any, provider: ProviderName) -> None:
    """A provider whose libraries do not load is dropped with a warning, and the CPU runs everything.

    Raises:
        CapabilityError: That happened.
    """
    active = session.get_providers()
    if PROVIDERS[provider] not in active:
        raise CapabilityError(
            f"ONNX Runtime could not start {PROVIDERS[provider]} and would have run on {', '.join(active)}.",
            "Install the CUDA libraries that this onnxruntime-gpu wants, look at the driver with `tformer-deploy doctor`, or use --provider cpu.",
        )


def placement_note(session: Any, graph: str, provider: ProviderName) -> str | None:
    """Which operations of a graph the CPU got although another provider was asked for; None where there are none."""
    places = getattr(session, "get_provider_graph_assignment_info", None)
    if provider == "cpu" or places is None:
        return None
    found: Counter[str] = Counter()
    for part in places():
        if part.ep_name == PROVIDERS["cpu"]:
            found.update(node.op_type for node in part.get_nodes())
    if not found:
        return None
    operations = ", ".join(f"{count} × {name}" for name, count in sorted(found.items()))
    return f"{PROVIDERS[provider]} left operations of {graph} to the CPU: {operations}."


class ProviderCache:
    """Caches [B, K, C, D] in the memory of a CUDA device, bound by address; ONNX Runtime allocates them.

    Its Python interface copies between device and host only, so that reading, writing and resizing go through the host.
    """

    def __init__(self, runtime: Any, values: list[Any], start: int, batch: int, dtype: type[np.generic]) -> None:
        self._runtime, self._values, self._start, self._dtype = runtime, values, start, dtype
        _, self._heads, self.capacity, self._head_dim = values[0].shape()
        self.batch = batch

    @classmethod
    def allocate(cls, runtime: Any, tensors: int, shape: tuple[int, int, int, int], dtype: type[np.generic]) -> Self:
        """Zeroed caches."""
        zeros = np.zeros(shape, dtype)
        return cls(runtime, [runtime.OrtValue.ortvalue_from_numpy(zeros, "cuda", 0) for _ in range(tensors)], 0, shape[0], dtype)

    def bind(self, binding: Any, past: Sequence[str], present: Sequence[str]) -> None:
        """The same address is past and present."""
        row = self._heads * self.capacity * self._head_dim * np.dtype(self._dtype).itemsize
        shape = (self.batch, self._heads, self.capacity, self._head_dim)
        for name, out, value in zip(past, present, self._values, strict=True):
            address = value.data_ptr() + self._start * row
            binding.bind_input(name, "cuda", 0, self._dtype, shape, address)
            binding.bind_output(out, "cuda", 0, self._dtype, shape, address)

    def read(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Copies of one layer's key and value."""
        key, value = (self._host(v).astype(np.float32) for v in self._values[2 * layer : 2 * layer + 2])
        return key, value

    def write(self, layer: int, key: NDArray[np.float32], value: NDArray[np.float32]) -> None:
        """Replaces one layer's key and value."""
        for held, given in zip(self._values[2 * layer : 2 * layer + 2], (key, value), strict=True):
            whole = np.array(held.numpy())
            whole[self._start : self._start + self.batch] = given
            held.update_inplace(whole)

    def rows(self, start: int, stop: int) -> Self:
        """A view of some rows."""
        return type(self)(self._runtime, self._values, self._start + start, stop - start, self._dtype)

    def resize(self, rows: Sequence[int], capacity: int) -> Self:
        """Copies of rows, with another capacity."""
        kept, values = min(capacity, self.capacity), []
        for held in self._values:
            new = np.zeros((len(rows), self._heads, capacity, self._head_dim), self._dtype)
            new[:, :, :kept] = self._host(held)[list(rows), :, :kept]
            values.append(self._runtime.OrtValue.ortvalue_from_numpy(new, "cuda", 0))
        return type(self)(self._runtime, values, 0, len(rows), self._dtype)

    def _host(self, value: Any) -> NDArray[np.generic]:
        array: NDArray[np.generic] = value.numpy()[self._start : self._start + self.batch]
        return array
