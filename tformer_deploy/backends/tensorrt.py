"""TensorRT engines of a bundle: found and judged here; this version does not execute them."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import TYPE_CHECKING, NoReturn

from tformer_deploy.bundle.engines import list_engines
from tformer_deploy.errors import CapabilityError

if TYPE_CHECKING:
    from tformer_deploy.bundle import Bundle

_MODULES = ("tensorrt_rtx", "tensorrt")


def open_tensorrt(bundle: Bundle) -> NoReturn:
    """Says what executing an engine of this bundle lacks here; never another backend in its place.

    Raises:
        CapabilityError: Always.
    """
    if not [entry for entry in list_engines(bundle) if entry.fault is None]:
        raise CapabilityError(
            f"{bundle.path} has no engine that can be used.", f"Run `tformer-deploy build-engine {bundle.path}`."
        )
    if not any(importlib.util.find_spec(m) for m in _MODULES):
        raise CapabilityError(
            f"None of the Python packages {', '.join(_MODULES)} is installed.", "Run pip install 'tformer-deploy[tensorrt-rtx]'."
        )
    if not _gpus():
        raise CapabilityError(
            "The tensorrt backend needs an NVIDIA GPU with its driver; none is here.", "Use --backend onnxruntime."
        )
    raise CapabilityError(
        "This version builds engines and proves their fusion, and does not execute them.",
        "Load the engine with TensorRT's own runtime (docs/engines.md), or use --backend onnxruntime.",
    )


def _gpus() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    return count.value if not driver.cuInit(0) and not driver.cuDeviceGetCount(ctypes.byref(count)) else 0
