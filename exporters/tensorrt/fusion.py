"""Proof that every attention became one fused kernel in every profile, by two ways that do not know of each other.

The plan's bytes hold the generated kernels with the layers they stand for; the builder's detailed log lists the layers
of each profile with their kernels. Neither is a documented format: when one changes, the counts differ and no engine is
written.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Plain "mha" is in every plan: only these names are kernels of fused attention.
_IN_PLAN = re.compile(rb'function=\{ name=(_gem[mv]_mha\w*) .*?layers="(.*?)"')
# A row of the log: "Name: <kernel>_myl<part>_<number>, LayerType: …, …, Metadata: <layers>".
_ROW = re.compile(r"^Name: (.*?)_myl(\d+)_\d+, LayerType: .*?Metadata: (.*)$", re.MULTILINE)
_KERNEL = re.compile(r"_gem[mv]_mha\w*")
_PROFILE = re.compile(r" \[profile (\d+)\]")
_LAYER = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
# The kernel for one query a row; it reads the cache where it lies. Others copy the cache twice a layer.
_IN_PLACE = "_gemv_mha"


@dataclass(frozen=True)
class Kernel:
    """A fused attention kernel, and the ONNX nodes it stands for."""

    name: str
    layers: tuple[str, ...]


@dataclass(frozen=True)
class ProfileProof:
    """Fused kernels of one profile by name, as the two ways found them; each sums to the number of attentions."""

    plan: dict[str, int]
    log: dict[str, int]


def kernels_in_plan(plan: bytes | memoryview) -> list[Kernel]:
    """Every fused attention kernel of a plan, in its order: profile by profile."""
    return [Kernel(kernel.decode(), _layers(layers.decode())) for kernel, layers in _IN_PLAN.findall(plan)]


def kernels_in_log(text: str, n_profiles: int) -> list[list[Kernel]]:
    """Every fused attention kernel of each profile, from the builder's ``Layers:`` message.

    A profile's rows share a part number; tensors of every profile but the first carry its number in their names.
    """
    profile_of: dict[str, int] = {}
    rows: list[tuple[str, str, str]] = []
    for match in _ROW.finditer(text):
        name, part, metadata = match.groups()
        profile_of.setdefault(part, 0)
        if mark := _PROFILE.search(match.group(0)):
            profile_of[part] = int(mark.group(1))
        rows.append((name, part, metadata))
    found: list[list[Kernel]] = [[] for _ in range(n_profiles)]
    for name, part, metadata in rows:
        if _KERNEL.fullmatch(name) and profile_of[part] < n_profiles:
            found[profile_of[part]].append(Kernel(name, _layers(metadata)))
    return found


def prove_fusion(
    plan: bytes | memoryview, log: str, attentions: Sequence[str], profiles: Sequence[tuple[str, bool]]
) -> list[ProfileProof]:
    """Matches the kernels of both ways with the attention layers of the parsed network.

    Args:
        plan: The engine's bytes.
        log: The builder's ``Layers:`` message.
        attentions: Names of the ONNX Attention nodes.
        profiles: Name of each profile, in order, and whether it has exactly one new token a row.

    Raises:
        InputError: An attention has no fused kernel in a profile, or the two ways differ.
    """
    n = len(attentions)
    in_plan, in_log = kernels_in_plan(plan), kernels_in_log(log, len(profiles))
    by_profile = [in_plan[i * n : (i + 1) * n] for i in range(len(profiles))]
    faults = [] if n else ["the network has no attention layer."]
    if len(in_plan) != n * len(profiles):
        expected = f"{n} layers × {len(profiles)} profiles = {n * len(profiles)}"
        faults.append(f"the plan holds {len(in_plan)} fused attention kernels; expected {expected}.")
    for (name, single), planned, logged in zip(profiles, by_profile, in_log, strict=True):
        faults += [f"profile {name}: {fault}" for fault in _profile_faults(planned, logged, set(attentions), single)]
    if faults:
        raise InputError(
            "The attention is not fused, so no engine is kept:\n  " + "\n  ".join(faults),
            "Build in fp16 or bf16, or with a smaller --capacity.",
        )
    return [ProfileProof(_count(planned), _count(logged)) for planned, logged in zip(by_profile, in_log, strict=True)]


def _profile_faults(planned: list[Kernel], logged: list[Kernel], attentions: set[str], single: bool) -> Iterator[str]:
    for way, kernels in (("plan", planned), ("log", logged)):
        covered = {layer for kernel in kernels for layer in kernel.layers}
        if missing := sorted(attentions - covered):
            some = ", ".join(missing[:3])
            yield f"the {way} has no fused kernel for {len(missing)} of {len(attentions)} attentions: {some} …"
        elif len(kernels) != len(attentions):
            yield f"the {way} has {len(kernels)} fused kernels for {len(attentions)} attentions."
        if single and (copying := sorted({k.name for k in kernels if not k.name.startswith(_IN_PLACE)})):
            yield f"the {way} decodes with {', '.join(copying)}, which copies the whole cache; expected {_IN_PLACE}_*."
    if _count(planned) != _count(logged):
        yield f"plan and log name different kernels: {_count(planned)} and {_count(logged)}."


def _layers(text: str) -> tuple[str, ...]:
    return tuple(_LAYER.findall(text))


def _count(kernels: list[Kernel]) -> dict[str, int]:
    return dict(sorted(Counter(k.name for k in kernels).items()))
