"""What an engine costs, from the model alone, before anything is built."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tformer_deploy.bundle.quantization import EMBEDDING, HEAD, is_matrix, stored_size, stored_tensors
from tformer_deploy.bundle.signature import cache_bytes_per_token
from tformer_deploy.errors import ResourceError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tformer_deploy.bundle import Manifest
    from tformer_deploy.exporters.tensorrt.preflight import Plan
    from tformer_deploy.parameters import Shape

# Kernels and tables of one profile take 2 to 15 MB of a plan; those of quantised matrices up to 17.
PROFILE_BYTES, QUANTISED_PROFILE_BYTES = 15_000_000, 20_000_000
# The builder's process: the libraries and kernels by themselves, and a multiple of a plan's weights (benchmarks/engine_build.py).
_BUILDER_BYTES, _BUILDER_WEIGHTS, _BUILDER_QUANTISED = 270 * 2**20, 4.1, 6.5
# TensorRT-RTX 1.7 stores the table of a tied head twice where its rows are no multiple of this: such a table is padded.
VOCABULARY_STEP = 8
# A padded table lies in the graph itself, which must stay below 2 GiB; a larger one is left as it is.
_LARGEST_PADDED = 1 << 30
_CGROUPS = (
    ("memory.max", "memory.current"),  # version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)


@dataclass(frozen=True)
class Costs:
    """Bytes, all of them estimates but for the caches and the weights.

    Attributes:
        weights: Weights of one plan.
        plans: All plan files together, at most.
        cache_row: Caches of one row.
        cache_batch: Caches of all rows.
        host: Memory that the builder needs.
        disk: What is written: plans, and derived graphs where the bundle has another dtype.
        n_plans: Number of plans.
        capacity: Slots of a cache row.
        max_batch: Most rows.
    """

    weights: int
    plans: int
    cache_row: int
    cache_batch: int
    host: int
    disk: int
    n_plans: int
    capacity: int
    max_batch: int

    @property
    def sentences(self) -> tuple[str, ...]:
        """For a reader, without what is available."""
        weights = f"weights {_mib(self.weights)}" + (f" in each of {self.n_plans} plans" if self.n_plans > 1 else " once")
        return (
            f"plan: {weights}, at most {_mib(self.plans)} in all",
            f"on the GPU: caches {_mib(self.cache_row)} a row of {self.capacity} slots, {_mib(self.cache_batch)} for "
            f"{self.max_batch} rows, beside the plan and what a step needs",
        )


@dataclass(frozen=True)
class Room:
    """Bytes available for memory and on the disk; None where this system does not say."""

    memory: int | None
    disk: int | None


def estimate(plan: Plan, manifest: Manifest) -> Costs:
    """What a plan costs.

    Args:
        plan: From :func:`preflight.make_plan`.
        manifest: The bundle's; where its dtype is not the plan's, graphs and weights are derived and written too.
    """
    config = manifest.config
    tensors = stored_tensors(config, plan.dtype, manifest.quantization)
    stored = sum(stored_size(shape, kind) for shape, kind in tensors.values())
    weights = stored - (_saved_by_fp8(tensors) if plan.fp8 else 0)
    twice = config.vocab_size % VOCABULARY_STEP and not may_be_padded(config.vocab_size, config.d_model)
    if manifest.quantization is None and config.tied and twice:
        weights += stored_size(*tensors[EMBEDDING])
    n_plans, n_profiles = len(plan.parts), sum(len(part.profiles) for part in plan.parts)
    quantised = manifest.quantization is not None
    plans = n_plans * weights + n_profiles * (QUANTISED_PROFILE_BYTES if quantised else PROFILE_BYTES)
    row = cache_bytes_per_token(config, plan.dtype) * plan.capacity
    derived = 0 if plan.dtype == manifest.dtype else stored
    host = int(_BUILDER_BYTES + (_BUILDER_QUANTISED if quantised else _BUILDER_WEIGHTS) * max(weights, stored))
    return Costs(weights, plans, row, row * plan.max_batch, host, plans + derived, n_plans, plan.capacity, plan.max_batch)


def may_be_padded(rows: int, columns: int) -> bool:
    """Whether a table of any dtype is small enough to lie in the graph."""
    return 4 * rows * columns <= _LARGEST_PADDED


def _saved_by_fp8(tensors: dict[str, tuple[Shape, str]]) -> int:
    """A byte an element of the blocks' matrices, less a scale an output."""
    matrices = [shape for name, (shape, _) in tensors.items() if is_matrix(name) and name != HEAD]
    return sum(shape[0] * shape[1] - 2 * shape[1] for shape in matrices)


def require_room(costs: Costs, room: Room) -> None:
    """Refuses what cannot fit.

    Raises:
        ResourceError: The builder needs more memory than there is.
        StorageError: The engine is larger than what the disk has left.
    """
    if room.memory is not None and costs.host > room.memory:
        raise ResourceError(
            f"The builder needs about {_mib(costs.host)} of memory for {_mib(costs.weights)} of weights; "
            f"{_mib(room.memory)} are available.",
            "Close other programs, raise the container's limit, build on a larger machine, or quantise the bundle.",
        )
    if room.disk is not None and costs.disk > room.disk:
        raise StorageError(
            f"The engine takes up to {_mib(costs.disk)} of disk; {_mib(room.disk)} are free.",
            "Make room, or give --layout shared, which holds the weights once.",
        )


def room_for(folder: Path) -> Room:
    """What this machine, or the container around this process, has left."""
    existing = next((p for p in (folder, *folder.parents) if p.is_dir()), None)
    return Room(available_memory(), shutil.disk_usage(existing).free if existing else None)


def room_sentence(costs: Costs, room: Room) -> str:
    """Needed against available."""
    memory = "an unknown amount" if room.memory is None else _mib(room.memory)
    disk = "an unknown amount" if room.disk is None else _mib(room.disk)
    return f"here: the builder needs about {_mib(costs.host)} of memory, {memory} available; at most {_mib(costs.disk)} of disk, {disk} free"


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that a new process may use: the machine's, and the least that a control group above this one leaves."""
    known = [*_machine(proc / "meminfo"), *_groups(proc / "self/cgroup", cgroup)]
    return min(known) if known else None


def _machine(meminfo: Path) -> Iterator[int]:
    for line in _text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _groups(own: Path, root: Path) -> Iterator[int]:
    for line in _text(own).splitlines():
        path = line.rsplit(":", 1)[-1].strip("/")
        for limit_name, used_name in _CGROUPS:
            folder, limit_file = os.path.split(limit_name)
            place = root / folder / path
            # Inside a container the path is often the host's; the root is then the container's own.
            for group in (place, *place.parents):
                if not group.is_relative_to(root / folder):
                    break
                limit, used = _text(group / limit_file).strip(), _text(group / os.path.basename(used_name)).strip()
                if limit.isdigit() and used.isdigit() and int(limit) < 2**60:
                    # What the group holds of files can be dropped, and counts as used.
                    yield max(int(limit) - int(used) + _dropable(group), 0)


def _dropable(group: Path) -> int:
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
