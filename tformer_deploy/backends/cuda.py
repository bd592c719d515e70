"""CUDA through the driver's own library, libcuda: what running an engine needs, every call checked and named.

No CUDA package is needed, and nothing is loaded before somebody asks. The driver's contexts, streams and memory are those
that TensorRT itself uses: both work in the device's primary context.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

from tformer_deploy.errors import CapabilityError, ResourceError, TformerError

LIBRARY = "libcuda.so.1"
_OUT_OF_MEMORY = 2
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the default stream does not wait for it
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may allocate meanwhile
_ADDRESS, _OUT_ADDRESS, _HANDLE, _OUT_HANDLE = c_ulonglong, POINTER(c_ulonglong), c_void_p, POINTER(c_void_p)

# Every call that is made, with the C types of its arguments; each returns a CUresult.
CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDevicePrimaryCtxRetain": (_OUT_HANDLE, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (_OUT_ADDRESS, c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    "cuMemHostAlloc": (_OUT_HANDLE, c_size_t, c_uint),
    "cuMemFreeHost": (_HANDLE,),
    "cuMemsetD8Async": (_ADDRESS, c_ubyte, c_size_t, _HANDLE),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, c_void_p, c_size_t, _HANDLE),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _ADDRESS, c_size_t, _HANDLE),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, c_size_t, _HANDLE),
    "cuStreamCreate": (_OUT_HANDLE, c_uint),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamSynchronize": (_HANDLE,),
    "cuStreamBeginCapture_v2": (_HANDLE, c_int),
    "cuStreamEndCapture": (_HANDLE, _OUT_HANDLE),
    "cuGraphInstantiateWithFlags": (_OUT_HANDLE, _HANDLE, c_ulonglong),
    "cuGraphLaunch": (_HANDLE, _HANDLE),
    "cuGraphExecDestroy": (_HANDLE,),
    "cuGraphDestroy": (_HANDLE,),
}


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it; ``compute_capability`` is for instance ``8.9``."""

    index: int
    name: str
    compute_capability: str
    total_mib: int


@dataclass(frozen=True)
class Probe:
    """What asking the driver gave.

    Attributes:
        gpus: Those that this process may use.
        driver_cuda: The newest CUDA that the driver serves, for instance ``13.0``; None without a driver.
        reason: Why there is no GPU, in the probe's own words; None where there is one.
    """

    gpus: tuple[Gpu, ...]
    driver_cuda: str | None
    reason: str | None


class Driver:
    """The library with its calls checked.

    Args:
        library: What has the functions of :data:`CALLS`: libcuda, or what a test puts in its place.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any, what: str = "") -> None:
        """Makes one call.

        Args:
            name: Of :data:`CALLS`.
            *arguments: As C wants them.
            what: What it was for, to be named in an error.

        Raises:
            ResourceError: The GPU's memory ran out.
            CapabilityError: Any other failure.
        """
        code = getattr(self._library, name)(*arguments)
        if code:
            purpose = f" ({what})" if what else ""
            words = f"CUDA's {name}{purpose} failed: {self.describe(code)}."
            if code == _OUT_OF_MEMORY:
                raise ResourceError(words, "Lower --max-batch, use an engine of a smaller capacity, or free the GPU.")
            raise CapabilityError(words, "Look at the GPU with nvidia-smi; `tformer-deploy doctor` says what is here.")

    def describe(self, code: int) -> str:
        """``CUDA_ERROR_NO_DEVICE, no CUDA-capable device is detected`` for 100, and so on."""
        parts = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = c_char_p()
            if not getattr(self._library, name)(code, byref(text)) and text.value:
                parts.append(text.value.decode(errors="replace"))
        return ", ".join(parts) or f"error {code}"

    def gpu(self, index: int) -> Gpu:
        """What the driver says of one GPU."""
        handle, value, total, name = c_int(), c_int(), c_size_t(), ctypes.create_string_buffer(128)
        self.call("cuDeviceGet", byref(handle), index)
        self.call("cuDeviceGetName", name, 128, handle)
        capability = []
        for attribute in (_MAJOR, _MINOR):
            self.call("cuDeviceGetAttribute", byref(value), attribute, handle)
            capability.append(str(value.value))
        self.call("cuDeviceTotalMem_v2", byref(total), handle)
        return Gpu(index, name.value.decode(errors="replace"), ".".join(capability), total.value // 2**20)


def load_driver() -> Driver:
    """libcuda; the types of its calls are set.

    Raises:
        OSError: It is not there.
    """
    library = ctypes.CDLL(LIBRARY)
    for name, arguments in CALLS.items():
        function = getattr(library, name, None)
        if function is not None:  # an old driver may lack one; the call itself then says so
            function.argtypes, function.restype = arguments, c_int
    return Driver(library)


def probe() -> tuple[Probe, Driver | None]:
    """Asks the driver which GPUs there are; never raises."""
    try:
        driver = load_driver()
    except OSError:
        return Probe((), None, f"no NVIDIA driver ({LIBRARY} is not there)"), None
    return probe_driver(driver), driver


def probe_driver(driver: Driver) -> Probe:
    """As :func:`probe`, of a driver that is loaded."""
    served = None
    try:
        number, count = c_int(), c_int()
        driver.call("cuDriverGetVersion", byref(number))
        served = f"{number.value // 1000}.{number.value % 1000 // 10}"
        driver.call("cuInit", 0)
        driver.call("cuDeviceGetCount", byref(count))
        if count.value:
            return Probe(tuple(driver.gpu(i) for i in range(count.value)), served, None)
        reason = "the NVIDIA driver lists no GPU"
    except TformerError as e:
        reason = f"the NVIDIA driver does not start: {e.message.rstrip('.')}"
    except AttributeError as e:
        reason = f"the NVIDIA driver is too old: {e}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    return Probe((), served, reason + hidden)


class Device:
    """Memory, one stream and captured graphs on one GPU; everything is given back by :meth:`close`.

    Addresses are numbers; sizes are bytes. Copies are queued on the stream: what they read must stay until
    :meth:`synchronize`.

    Args:
        driver: The library, after ``cuInit``.
        gpu: Which GPU.
    """

    def __init__(self, driver: Driver, gpu: Gpu) -> None:
        self.gpu, self._driver = gpu, driver
        self._context, self._stream, self._handle = c_void_p(), c_void_p(), c_int()
        self._memory, self._pinned = set[int](), set[int]()
        driver.call("cuDeviceGet", byref(self._handle), gpu.index)
        driver.call("cuDevicePrimaryCtxRetain", byref(self._context), self._handle, what="using the GPU")
        self.enter()
        driver.call("cuStreamCreate", byref(self._stream), _NON_BLOCKING)

    @property
    def stream(self) -> int:
        """The stream's handle, for TensorRT; never the default stream."""
        return self._stream.value or 0

    def enter(self) -> None:
        """Makes the context current in the calling thread; a thread begins without one."""
        self._driver.call("cuCtxSetCurrent", self._context)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = c_size_t(), c_size_t()
        self._driver.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def allocate(self, size: int, what: str) -> int:
        """Device memory, not zeroed → its address, a multiple of 256.

        Raises:
            ResourceError: There is not that much.
        """
        address, (free, total) = c_ulonglong(), self.memory()
        if size > free:
            raise ResourceError(
                f"The GPU {self.gpu.name} has {free / 2**20:,.1f} of {total / 2**20:,.0f} MiB free; {what} needs {size / 2**20:,.1f} MiB.",
                "Lower --max-batch, use an engine of a smaller capacity, or free the GPU.",
            )
        self._driver.call("cuMemAlloc_v2", byref(address), size, what=f"{size} bytes for {what}")
        self._memory.add(address.value)
        return address.value

    def free(self, address: int) -> None:
        """Gives memory back; nothing that is queued may still use it."""
        self._memory.remove(address)
        self._driver.call("cuMemFree_v2", address)

    def allocate_pinned(self, size: int, what: str) -> int:
        """Host memory that copies can run from while the GPU works → its address."""
        address = c_void_p()
        self._driver.call("cuMemHostAlloc", byref(address), size, 0, what=f"{size} bytes of host memory for {what}")
        assert address.value is not None
        self._pinned.add(address.value)
        return address.value

    def zero(self, address: int, size: int) -> None:
        """Queues zeroes."""
        self._driver.call("cuMemsetD8Async", address, 0, size, self._stream)

    def copy_in(self, target: int, source: int, size: int) -> None:
        """Queues a copy from the host."""
        self._driver.call("cuMemcpyHtoDAsync_v2", target, source, size, self._stream)

    def copy_out(self, target: int, source: int, size: int) -> None:
        """Queues a copy to the host."""
        self._driver.call("cuMemcpyDtoHAsync_v2", target, source, size, self._stream)

    def copy(self, target: int, source: int, size: int) -> None:
        """Queues a copy within the GPU."""
        self._driver.call("cuMemcpyDtoDAsync_v2", target, source, size, self._stream)

    def synchronize(self, what: str = "") -> None:
        """Waits for everything that is queued; a failure of any of it shows here."""
        self._driver.call("cuStreamSynchronize", self._stream, what=what)

    def begin_capture(self) -> None:
        """From now on what is queued is recorded and not run."""
        self._driver.call("cuStreamBeginCapture_v2", self._stream, _THREAD_LOCAL)

    def end_capture(self) -> int:
        """Ends the recording → a graph that :meth:`launch` runs."""
        graph, executable = c_void_p(), c_void_p()
        self._driver.call("cuStreamEndCapture", self._stream, byref(graph))
        try:
            self._driver.call("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
        finally:
            if graph.value:
                self._driver.call("cuGraphDestroy", graph)
        assert executable.value is not None
        return executable.value

    def launch(self, graph: int) -> None:
        """Queues a captured graph."""
        self._driver.call("cuGraphLaunch", graph, self._stream)

    def forget(self, graph: int) -> None:
        """Destroys a captured graph that is not running."""
        self._driver.call("cuGraphExecDestroy", graph)

    def close(self) -> None:
        """Gives back memory, stream and context; TensorRT's own objects on it must be gone before."""
        if not self._context.value:
            return
        self.enter()
        self._driver.call("cuStreamSynchronize", self._stream)
        for address in sorted(self._memory):
            self._driver.call("cuMemFree_v2", address)
        for address in sorted(self._pinned):
            self._driver.call("cuMemFreeHost", address)
        self._memory.clear()
        self._pinned.clear()
        self._driver.call("cuStreamDestroy_v2", self._stream)
        self._driver.call("cuDevicePrimaryCtxRelease_v2", self._handle)
        self._context = c_void_p()
