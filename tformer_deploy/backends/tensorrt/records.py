"""The plans of an engine's record. What this backend needs of ``engine.json`` is read here and nowhere else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from tformer_deploy.bundle.engines import PLAN, SIDECAR
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from tformer_deploy.bundle.engines import EngineProfile, EngineRecord
    from tformer_deploy.config import DType


@dataclass(frozen=True)
class StoredPlan:
    """One plan file of an engine, as its record names it; profiles in the plan's order."""

    file: str
    sha256: str
    size: int
    profiles: tuple[EngineProfile, ...]


def plans_of(record: EngineRecord) -> tuple[StoredPlan, ...]:
    """Every plan of an engine."""
    return (StoredPlan(PLAN, record.plan.sha256, record.plan.size, record.profiles),)


def dtype_of(record: EngineRecord) -> DType:
    """The dtype of weights and caches; reading the record has refused any other."""
    return cast("DType", record.dtype)


def read_plan(folder: Path, plan: StoredPlan, rebuild: str) -> bytes:
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
