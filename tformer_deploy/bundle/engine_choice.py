"""Which engine of a bundle runs here. Records alone are read: no plan, and nothing native."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tformer_deploy.bundle.engines import ENGINES, FLAVOURS, list_engines, rebuild
from tformer_deploy.bundle.fusable import build_command
from tformer_deploy.errors import CapabilityError, InputError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from tformer_deploy.bundle.bundle import Bundle
    from tformer_deploy.bundle.engines import EngineEntry, EngineRecord


@dataclass(frozen=True)
class Choice:
    """The engine that is to be loaded.

    Attributes:
        folder: Where it lies.
        record: What it is.
        others: Names of the other engines that would have run here too.
    """

    folder: Path
    record: EngineRecord
    others: tuple[str, ...]


def good_engines(bundle: Bundle, name: str | None = None) -> list[EngineRecord]:
    """The records that are whole and of this core.

    Args:
        bundle: Whose engines.
        name: Only this one; None: all.

    Raises:
        UsageError: There is no engine of that name.
        CapabilityError: The bundle has no engine.
        InputError: It has, and none is good.
    """
    entries = list_engines(bundle)
    if name is not None:
        known = [entry.folder for entry in entries]
        entries = [entry for entry in entries if entry.folder == name]
        if not entries:
            raise UsageError(f"--engine is {name!r}; this bundle has {', '.join(known) or 'no engine'}.", "Name one of them.")
    if not entries:
        raise CapabilityError(f"{bundle.path} has no engine.", f"Run `{build_command(bundle)}`.")
    good = [entry.record for entry in entries if entry.record is not None and entry.fault is None]
    if not good:
        raise InputError(f"{bundle.path} has no engine that can be used: {_faults(entries)}", rebuild(bundle))
    return good


def choose_engine(bundle: Bundle, versions: dict[str, str], capability: str | None = None, name: str | None = None) -> Choice:
    """The best engine that fits what is here: the fewest other GPUs it was made for, then the longest rows, then the most.

    Args:
        bundle: Whose engine.
        versions: Installed flavour → version.
        capability: The GPU's compute capability; None: not asked yet.
        name: ``--engine``.

    Raises:
        UsageError: There is no engine of that name.
        InputError: Every engine is damaged, or of another core.
        CapabilityError: None is for these flavours, versions and this GPU.
    """
    reasons, fitting = [], []
    for record in good_engines(bundle, name):
        reason = _unfit(record, versions, capability)
        if reason is None:
            fitting.append(record)
        else:
            reasons.append(f"{record.name} {reason}.")
    if not fitting:
        raise CapabilityError(f"{bundle.path} has no engine that runs here. {' '.join(reasons)}", rebuild(bundle))
    fitting.sort(key=_rank)
    return Choice(bundle.path / ENGINES / fitting[0].name, fitting[0], tuple(r.name for r in fitting[1:]))


def _rank(record: EngineRecord) -> tuple[object, ...]:
    # RTX before full TensorRT: it is made for the GPUs that it takes at all.
    made_for = len(record.compute_capabilities), FLAVOURS.index(record.flavour)
    # One that only decodes runs a prompt token by token; among the others two plans are a little faster than one.
    layout = record.layout == "decode", -len(record.plans)
    return (*made_for, layout[0], -record.capacity, -record.max_batch, layout[1], record.name)


def _unfit(record: EngineRecord, versions: dict[str, str], capability: str | None) -> str | None:
    if record.flavour not in versions:
        installed = " and ".join(f"{flavour} {version}" for flavour, version in versions.items()) or "neither flavour"
        return f"is for the flavour {record.flavour}; {installed} is installed"
    if record.version != versions[record.flavour]:
        return f"is for {record.flavour} {record.version}; {versions[record.flavour]} is installed"
    if capability is not None and capability not in record.compute_capabilities:
        return f"runs on compute capability {', '.join(record.compute_capabilities)}; this GPU has {capability}"
    return None


def _faults(entries: list[EngineEntry]) -> str:
    return " ".join(f"{entry.folder}: {entry.fault}" for entry in entries)
