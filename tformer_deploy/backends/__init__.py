"""Where graphs run: one file a backend, and :class:`Session` over any of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.backends.session import Session
from tformer_deploy.errors import CapabilityError, UsageError

if TYPE_CHECKING:
    from tformer_deploy.backends.base import Backend
    from tformer_deploy.backends.cpu.opening import ProfileName
    from tformer_deploy.bundle import Bundle

BACKENDS = ("onnxruntime", "torch", "tensorrt")
PROFILES = ("auto", "portable", "cpu")

__all__ = ["BACKENDS", "PROFILES", "Session", "open_backend", "open_session"]


def open_backend(
    bundle: Bundle, backend: str = "onnxruntime", threads: int | None = None, profile: ProfileName = "auto"
) -> Backend:
    """The backend of that name over a bundle; its libraries are imported only now.

    ``profile`` chooses between the portable graphs and those derived for this CPU (onnxruntime alone; see ``cpu.opening``).

    Raises:
        UsageError: No backend has that name.
        CapabilityError: The backend's package or device is not here.
    """
    if backend == "onnxruntime":
        from tformer_deploy.backends.cpu.opening import open_cpu

        return open_cpu(bundle, threads, profile)
    if backend == "torch":
        try:
            import torch

            from tformer_deploy.backends.torch import bundle_backend
        except ImportError as e:
            raise CapabilityError(
                f"The torch backend needs the package torch: {e}.",
                "Install it with `pip install 'tformer-deploy[export]'`, or use --backend onnxruntime.",
            ) from e
        if threads is not None:
            torch.set_num_threads(threads)
        return bundle_backend(bundle)
    if backend == "tensorrt":
        from tformer_deploy.backends.tensorrt import open_tensorrt

        return open_tensorrt(bundle)
    raise UsageError(f"There is no backend {backend!r}; expected one of {', '.join(BACKENDS)}.")


def open_session(
    bundle: Bundle, backend: str = "onnxruntime", threads: int | None = None, profile: ProfileName = "auto"
) -> Session:
    """A session over a bundle; see :func:`open_backend`."""
    return Session(open_backend(bundle, backend, threads, profile))
