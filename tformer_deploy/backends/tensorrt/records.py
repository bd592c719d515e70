"""The plans of an engine's record. What this backend needs of ``engine.json`` is read here and nowhere else."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

from tformer_deploy.bundle.engines import SIDECAR
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tformer_deploy.bundle.engines import EnginePlan, EngineRecord
    from tformer_deploy.config import DType


def dtype_of(record: EngineRecord) -> DType:
    """The dtype of weights and caches; reading the record has refused any other."""
    return cast("DType", record.dtype)


def read_plan(folder: Path, plan: EnginePlan, rebuild: str) -> bytes:
    """The bytes of a plan, whose hash is the record's: what was hashed is what a runtime is given.

    Raises:
        InputError: They are others.
    """
    data = (folder / plan.file).read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if len(data) != plan.size or found != plan.sha256:
        raise InputError(
            f"{folder / plan.file} has {len(data)} bytes and sha256 {found}; {SIDECAR} says {plan.size} and {plan.sha256}.",
            rebuild,
        )
    return data
