"""tformer-deploy: decoder-only transformers from PyTorch to prefill and decode graphs, engines and services.

The public functions are loaded when first used, so that importing the package needs neither torch nor onnx nor tensorrt.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tformer_deploy.api import build_engine, check, export
    from tformer_deploy.backends import Session, open_session
    from tformer_deploy.bundle import Bundle, open_bundle
    from tformer_deploy.errors import TformerError

__all__ = ["Bundle", "Session", "TformerError", "build_engine", "check", "export", "open_bundle", "open_session"]

_WHERE = {
    "build_engine": "tformer_deploy.api",
    "check": "tformer_deploy.api",
    "export": "tformer_deploy.api",
    "Session": "tformer_deploy.backends",
    "open_session": "tformer_deploy.backends",
    "Bundle": "tformer_deploy.bundle",
    "open_bundle": "tformer_deploy.bundle",
    "TformerError": "tformer_deploy.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
