"""The two TensorRT packages, and everything that differs between them."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

from tformer_deploy.errors import CapabilityError

FlavourName = Literal["rtx", "tensorrt"]


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
        if self.name == "tensorrt" and int(self.version.split(".")[0]) < 11:
            return 1 << int(self.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        return 0

    def set_targets(self, config: Any, targets: tuple[str, ...]) -> None:
        """Chooses compute capabilities; only RTX compiles for a GPU that is not there.

        Raises:
            CapabilityError: The flavour cannot do it.
        """
        if not targets:
            return
        if self.name != "rtx":
            raise CapabilityError("Full TensorRT compiles for the GPU it runs on; --target is for the rtx flavour.", "Leave --target out.")
        known = {n.removeprefix("SM"): getattr(self.module.ComputeCapability, n) for n in dir(self.module.ComputeCapability) if n.startswith("SM")}
        config.num_compute_capabilities = len(targets)
        for i, target in enumerate(targets):
            digits = target.replace(".", "")
            if digits not in known:
                raise CapabilityError(
                    f"TensorRT-RTX {self.version} does not compile for compute capability {target}.",
                    f"Choose from {', '.join(sorted(known))}, or use full TensorRT (H100, H200).",
                )
            config.set_compute_capability(known[digits], i)


_MODULES: dict[FlavourName, str] = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}


def load_flavour(name: FlavourName | Literal["auto"]) -> Flavour:
    """Imports a flavour; ``auto`` takes RTX where it is installed, else full TensorRT.

    Raises:
        CapabilityError: It is not installed.
    """
    names = list(_MODULES) if name == "auto" else [name]
    for candidate in names:
        if importlib.util.find_spec(_MODULES[candidate]) is not None:
            module = importlib.import_module(_MODULES[candidate])
            return Flavour(candidate, module, str(module.__version__))
    wanted = " or ".join(_MODULES[n] for n in names)
    extra = "tensorrt" if name == "tensorrt" else "tensorrt-rtx"
    raise CapabilityError(f"The Python package {wanted} is not installed.", f"Run pip install 'tformer-deploy[{extra}]'.")
