"""The two Python packages of TensorRT as runtimes, imported only when an engine is to run."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

from tformer_deploy.errors import CapabilityError

MODULES = {"rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}
_EXTRAS = {"rtx": "tensorrt-rtx", "tensorrt": "tensorrt"}
# What the library appends to a message about where in its own sources it was.
_PLACE = re.compile(r"\s*In \w+ at \S+:\d+\)?\s*$")
_loggers: dict[str, Any] = {}


@dataclass(frozen=True)
class RuntimePackage:
    """One of the two, imported.

    Attributes:
        flavour: ``rtx`` or ``tensorrt``.
        module: The package.
        version: Its exact version; an engine loads in that one only.
        logger: Takes its messages; one a process, as the library demands.
    """

    flavour: str
    module: Any
    version: str
    logger: Any

    def failure(self) -> str:
        """The first error since :meth:`clear`, for the end of a sentence."""
        errors: list[str] = self.logger.errors
        return _PLACE.sub("", errors[0]).strip() if errors else "it gave no reason"

    def clear(self) -> None:
        """Forgets what was logged until now."""
        self.logger.errors.clear()


def installed_flavours() -> list[str]:
    """Flavours whose package is here; nothing is imported."""
    return [flavour for flavour, module in MODULES.items() if importlib.util.find_spec(module) is not None]


def load_packages(wanted: set[str]) -> dict[str, RuntimePackage]:
    """Imports the wanted flavours that are here.

    Raises:
        CapabilityError: None is here, or one does not load.
    """
    found = {}
    for flavour in [f for f in installed_flavours() if f in wanted]:
        try:
            module = importlib.import_module(MODULES[flavour])
        except (ImportError, OSError) as e:
            raise CapabilityError(f"The Python package {MODULES[flavour]} does not load: {e}.", _install(flavour)) from e
        found[flavour] = RuntimePackage(flavour, module, str(module.__version__), _logger(MODULES[flavour], module))
    if not found:
        names = " or ".join(MODULES[f] for f in MODULES if f in wanted)
        raise CapabilityError(
            f"The tensorrt backend needs the Python package {names} for this bundle's engines; it is not installed.",
            _install(min(wanted, key=list(MODULES).index)),
        )
    return found


def _install(flavour: str) -> str:
    return f"Run pip install 'tformer-deploy[{_EXTRAS[flavour]}]'."


def _logger(name: str, trt: Any) -> Any:
    if name in _loggers and isinstance(_loggers[name], trt.ILogger):
        return _loggers[name]

    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps errors."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(text)

    _loggers[name] = Logger()
    return _loggers[name]
