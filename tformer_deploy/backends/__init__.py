"""Where graphs run: one file a backend, and :class:`Session` over any of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.backends.providers import PROVIDERS
from tformer_deploy.backends.session import Session
from tformer_deploy.errors import CapabilityError, UsageError

if TYPE_CHECKING:
    from tformer_deploy.backends.base import Backend
    from tformer_deploy.backends.cpu.opening import ProfileName
    from tformer_deploy.backends.providers import ProviderName
    from tformer_deploy.bundle import Bundle

BACKENDS = ("onnxruntime", "torch", "tensorrt")
PROFILES = ("auto", "portable", "cpu")

__all__ = ["BACKENDS", "PROFILES", "PROVIDERS", "Session", "open_backend", "open_session", "require_consistent"]


def open_backend(
    bundle: Bundle, backend: str = "onnxruntime", threads: int | None = None, profile: ProfileName = "auto",
    provider: ProviderName = "cpu", engine: str | None = None,
) -> Backend:  # fmt: skip
    """The backend of that name over a bundle; its libraries are imported only now.

    Args:
        bundle: The bundle.
        backend: One of :data:`BACKENDS`.
        threads: Of the runtime; its default where None.
        profile: The portable graphs or those derived for this CPU (onnxruntime on the CPU alone; see ``cpu.opening``).
        provider: Where ONNX Runtime runs.
        engine: Name of the engine (tensorrt alone); the best that fits where None.

    Raises:
        UsageError: No backend has that name, or it does not read one of the others.
        CapabilityError: The backend's package, provider or device is not here.
    """
    require_consistent(backend, profile, provider, engine)
    if provider != "cpu":
        from tformer_deploy.backends.onnxruntime import OnnxRuntimeBackend

        return OnnxRuntimeBackend(bundle, threads, provider=provider)
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

        return open_tensorrt(bundle, engine)
    raise UsageError(f"There is no backend {backend!r}; expected one of {', '.join(BACKENDS)}.")


def open_session(
    bundle: Bundle, backend: str = "onnxruntime", threads: int | None = None, profile: ProfileName = "auto",
    provider: ProviderName = "cpu", engine: str | None = None,
) -> Session:  # fmt: skip
    """A session over a bundle; see :func:`open_backend`."""
    return Session(open_backend(bundle, backend, threads, profile, provider, engine))


def require_consistent(backend: str, profile: str, provider: str, engine: str | None) -> None:
    """Refuses a flag that what was chosen would not read.

    Raises:
        UsageError: There is one.
    """
    if provider not in PROVIDERS:
        raise UsageError(f"There is no provider {provider!r}; expected one of {', '.join(PROVIDERS)}.")
    if provider != "cpu" and backend != "onnxruntime":
        raise UsageError(
            f"--provider {provider} is for --backend onnxruntime; the backend is {backend}.", "Leave one of them out."
        )
    if provider != "cpu" and profile == "cpu":
        raise UsageError(f"--profile cpu derives graphs for the CPU; the provider is {provider}.", "Leave one of them out.")
    if engine is not None and backend != "tensorrt":
        raise UsageError(f"--engine is for --backend tensorrt; the backend is {backend}.", "Give --backend tensorrt too.")
