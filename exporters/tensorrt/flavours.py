"""The two TensorRT packages, and everything that differs between them, in this one place."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

from tformer_deploy.errors import CapabilityError, InputError, UsageError

FlavourName = Literal["rtx", "tensorrt"]
_MODULES: dict[FlavourName, str] = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
_EXTRAS: dict[FlavourName, str] = {"rtx": "tensorrt-rtx", "tensorrt": "tensorrt"}
# The first versions whose ONNX parser knows Attention, TensorScatter, RMSNormalization and RotaryEmbedding.
_OLDEST: dict[FlavourName, tuple[int, int]] = {"rtx": (1, 7), "tensorrt": (10, 15)}
# bf16 is refused for 7.5, so the portable set of RTX begins at 8.0.
_PORTABLE_FROM = 80
# The first GPUs that multiply in FP8.
_FP8_FROM = 89
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


@dataclass(frozen=True)
class Flavour:
    """One of the two packages, imported.

    Attributes:
        name: ``rtx`` (compiles without a GPU, for GeForce and RTX GPUs) or ``tensorrt`` (for the GPU it runs on).
        module: The imported package.
        version: Its exact version; an engine loads in that version only.
    """

    name: FlavourName
    module: Any
    version: str

    def network_flags(self) -> int:
        """Strong typing is the only mode of RTX and of TensorRT 11; 10.x must be asked for it."""
        if self.name == "tensorrt" and _numbers(self.version) < (11, 0):
            return 1 << int(self.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        return 0

    def masks(self, attention: Any, square: bool = False) -> bool:
        """Whether an attention of a parsed network hides what lies ahead of a token.

        Args:
            attention: Of the network; 10.x has no ``causal_kind``, and a causal flag instead.
            square: As many keys as queries: a causal flag anchored at the upper left is right there, and only there.
        """
        kind = getattr(attention, "causal_kind", None)
        lengths = getattr(attention, "key_value_lengths", None)
        if attention.mask is not None:
            return True
        if square and ("UPPER_LEFT" in str(kind) if kind is not None else bool(getattr(attention, "causal", False))):
            return True
        # Anchored at the upper left, a decode step would see the first slot only.
        return kind is not None and lengths is not None and "LOWER_RIGHT" in str(kind)

    def compute_capabilities(self, targets: tuple[str, ...]) -> tuple[str, ...]:
        """The GPUs that an engine is compiled for.

        Args:
            targets: As asked, for instance ``("8.6", "8.9")``; empty: RTX's portable set, or the GPU here.

        Raises:
            CapabilityError: The flavour does not compile for one of them, or full TensorRT finds no GPU.
            UsageError: Targets were given for full TensorRT.
        """
        if self.name == "tensorrt":
            if targets:
                raise UsageError(
                    "Full TensorRT compiles for the GPU it runs on; --target is for the rtx flavour.", "Leave --target out."
                )
            return (gpu_capability(),)
        known = self._rtx_capabilities()
        if not targets:
            return tuple(c for c in known if int(c.replace(".", "")) >= _PORTABLE_FROM)
        if unknown := [t for t in targets if t not in known]:
            raise CapabilityError(
                f"TensorRT-RTX {self.version} does not compile for compute capability {', '.join(unknown)}.",
                f"Choose from {', '.join(known)}; for data-centre GPUs (9.0, 10.0) use --flavour tensorrt.",
            )
        return tuple(c for c in known if c in targets)

    def inspect(self, plan: Any, logger: Any) -> str | None:
        """The engine inspector's JSON about every layer of a plan; None for RTX, which cannot without a GPU.

        Raises:
            InputError: The plan cannot be loaded on the machine that just built it.
        """
        if self.name == "rtx":
            return None
        trt = self.module
        engine = trt.Runtime(logger).deserialize_cuda_engine(plan)
        if engine is None:
            raise InputError(
                "TensorRT cannot load the plan that it just built.", "Look at the GPU and its driver: run nvidia-smi."
            )
        return str(engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))

    def set_targets(self, config: Any, capabilities: tuple[str, ...]) -> None:
        """Tells the builder; only RTX asks."""
        if self.name != "rtx":
            return
        config.num_compute_capabilities = len(capabilities)
        for i, capability in enumerate(capabilities):
            config.set_compute_capability(getattr(self.module.ComputeCapability, f"SM{capability.replace('.', '')}"), i)

    def advice(self, capabilities: tuple[str, ...]) -> str | None:
        """What to do about the GPU of this machine, where the engine would not run on it; None where there is none.

        Args:
            capabilities: What the engine is compiled for; empty: everything that the flavour can.
        """
        here = _probe()
        if self.name != "rtx" or not isinstance(here, str) or here in (capabilities or self._rtx_capabilities()):
            return None
        if here in self._rtx_capabilities():
            return f"The GPU here has compute capability {here}; this engine is not for it. Give --target {here} to run it here."
        return (
            f"The GPU here has compute capability {here}, which TensorRT-RTX {self.version} does not support (H100 and H200 are "
            "9.0): this engine will not run here. Give --flavour tensorrt for it."
        )

    def _rtx_capabilities(self) -> tuple[str, ...]:
        names = [n.removeprefix("SM") for n in dir(self.module.ComputeCapability) if n.startswith("SM") and n[2:].isdigit()]
        return tuple(f"{n // 10}.{n % 10}" for n in sorted(map(int, names)))


def load_flavour(name: FlavourName | Literal["auto"]) -> Flavour:
    """Imports a flavour; ``auto`` takes RTX where it is installed and knows the GPU here, if there is one, else full TensorRT.

    Raises:
        CapabilityError: It is not installed, does not load, or is too old.
    """
    if name != "auto":
        return _load(name)
    installed = [n for n in _MODULES if importlib.util.find_spec(_MODULES[n]) is not None]
    if not installed:
        raise CapabilityError(f"The Python package {' or '.join(_MODULES.values())} is not installed.", _install("rtx"))
    first = _load(installed[0])
    if len(installed) > 1 and first.advice(()) is not None:
        return _load(installed[1])
    return first


def _load(name: FlavourName) -> Flavour:
    package = _MODULES[name]
    if importlib.util.find_spec(package) is None:
        raise CapabilityError(f"The Python package {package} is not installed.", _install(name))
    try:
        module = importlib.import_module(package)
    except (ImportError, OSError) as e:
        raise CapabilityError(f"The Python package {package} does not load: {e}.", _install(name)) from e
    flavour = Flavour(name, module, str(module.__version__))
    if _numbers(flavour.version) < _OLDEST[name]:
        oldest = ".".join(map(str, _OLDEST[name]))
        raise CapabilityError(f"{package} {flavour.version} is too old; {oldest} is the first that fits.", _install(name))
    return flavour


def require_precision(capabilities: tuple[str, ...], bf16: bool, fp8: bool) -> None:
    """Refuses GPUs that do not multiply as the engine will.

    Raises:
        CapabilityError: One of them is too old for bf16, or for FP8.
    """
    wanted = (("bf16", bf16, _PORTABLE_FROM, "give --dtype fp16"), ("FP8", fp8, _FP8_FROM, "leave --fp8 out"))
    for what, asked, first, otherwise in wanted:
        if asked and (old := [c for c in capabilities if int(c.replace(".", "")) < first]):
            named = f"{first // 10}.{first % 10}"
            raise CapabilityError(
                f"GPUs of compute capability {', '.join(old)} do not multiply in {what}; {named} is the first that does.",
                f"Give only --target {named} or later (repeatable), or {otherwise}.",
            )


def gpu_capability() -> str:
    """Compute capability of the first GPU, for instance ``9.0``, from the driver itself.

    Raises:
        CapabilityError: There is none; the driver's answer is in the message.
    """
    advice = "Run this on the machine that will serve, or use --flavour rtx, which compiles without a GPU."
    found = _probe()
    if isinstance(found, str):
        return found
    reason = "there is no NVIDIA driver here" if found is None else f"the NVIDIA driver gives none (error {found})"
    raise CapabilityError(f"Full TensorRT compiles for the GPU it runs on, and {reason}.", advice)


def _probe() -> str | int | None:
    """Compute capability of the first GPU; the driver's error code; None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if code := driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return int(code)
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return f"{major.value}.{minor.value}"


def _install(name: FlavourName) -> str:
    return f"Install it with `pip install 'tformer-deploy[{_EXTRAS[name]}]'`."


def _numbers(version: str) -> tuple[int, int]:
    parts = [int(p) if p.isdigit() else 0 for p in version.split(".")[:2]]
    return parts[0], parts[1] if len(parts) > 1 else 0
