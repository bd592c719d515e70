"""Parity with PyTorch: red means red. Checking needs torch; reading a report back does not."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tformer_deploy.parity.check import check_bundle
    from tformer_deploy.parity.lines import judge_again, own_lines
    from tformer_deploy.parity.report import Report

__all__ = ["Report", "check_bundle", "judge_again", "own_lines"]

_WHERE = {"Report": "report", "check_bundle": "check", "judge_again": "lines", "own_lines": "lines"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
