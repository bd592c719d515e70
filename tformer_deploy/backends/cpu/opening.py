"""Chooses between a bundle's portable graphs and those derived for this CPU, and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tformer_deploy.backends.cpu.backend import CpuBackend
from tformer_deploy.backends.cpu.derived import derive, find_derived
from tformer_deploy.backends.cpu.plan import plan_for
from tformer_deploy.backends.onnxruntime import OnnxRuntimeBackend
from tformer_deploy.errors import ResourceError, StorageError, TformerError, UsageError

if TYPE_CHECKING:
    from tformer_deploy.bundle import Bundle

ProfileName = Literal["auto", "portable", "cpu"]


def open_cpu(bundle: Bundle, threads: int | None = None, profile: ProfileName = "auto") -> OnnxRuntimeBackend | CpuBackend:
    """ONNX Runtime on the CPU.

    Args:
        bundle: The bundle.
        threads: Of the runtime; its default where None.
        profile: ``portable``: the bundle's graphs as they are. ``cpu``: graphs derived for this CPU, made now where they are
            not there. ``auto``: derived ones where the model has any and they can be made.

    Raises:
        UsageError: ``cpu`` is asked for and this model has no derived graphs.
        CapabilityError: onnxruntime is missing.
        TformerError: ``cpu`` is asked for and they could not be made.
    """
    plan = plan_for(bundle.manifest.config, bundle.manifest.dtype)
    if profile == "cpu" and not plan.applies:
        raise UsageError(f"This bundle has no graphs for the profile cpu: {plan.reasons[0]}", "Give --profile portable.")
    if profile == "portable" or not plan.applies:
        return OnnxRuntimeBackend(bundle, threads)
    try:
        derived = find_derived(bundle, plan) or derive(bundle, plan, threads)
        return CpuBackend(bundle, plan, derived, threads)
    except ImportError as e:
        failure: TformerError = ResourceError(f"Deriving graphs needs the package {e.name}.", "pip install onnx")
    except (ResourceError, StorageError) as e:
        failure = e
    except OSError as e:
        failure = StorageError(f"Derived graphs cannot be written: {e}.")
    if profile == "cpu":
        raise failure
    backend = OnnxRuntimeBackend(bundle, threads)
    backend.notes = (*backend.notes, f"The portable graphs run as they are: {failure}")
    return backend
