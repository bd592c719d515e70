"""Proof that every attention became one fused kernel in every profile, by two ways that do not know of each other.

The plan's bytes hold the generated kernels with the layers they stand for; the builder's detailed log lists the layers
of each profile with their kernels. Neither is a documented format: when one changes, the counts differ and no engine is
written.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Plain "mha" is in every plan: only these names are kernels of fused attention.
_KERNEL = r"_gem[mv]_mha\w*?"
_IN_PLAN = re.compile(rb'function=\{ name=(_gem[mv]_mha\w*) .*?layers="(.*?)"')
_IN_LOG = re.compile(rf"^Name: ({_KERNEL})_myl(\d+)_\d+, .*Metadata: (.*)$", re.MULTILINE)
_LAYER = re.compile(r"\[ONNX Layer: ([^\]]*)\]")


def kernels_in_plan(plan: bytes) -> list[tuple[str, str]]:
    """(kernel, layers) of every fused attention, in the order of the plan: profile by profile."""
    return [(kernel.decode(), layers.decode()) for kernel, layers in _IN_PLAN.findall(plan)]


def kernels_in_log(layers: str, n_profiles: int) -> list[list[tuple[str, str]]]:
    """(kernel, layers) of every fused attention, for each profile, from the builder's ``Layers:`` message."""
    found: list[list[tuple[str, str]]] = [[] for _ in range(n_profiles)]
    for kernel, profile, metadata in _IN_LOG.findall(layers):
        if int(profile) < n_profiles:
            found[int(profile)].append((kernel, metadata))
    return found


def prove_fusion(
    plan: bytes, layers: str, attentions: Sequence[str], profiles: Sequence[str]
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Matches the kernels of both ways with the attention layers of the parsed network.

    Args:
        plan: The engine's bytes.
        layers: The builder's ``Layers:`` messages.
        attentions: Names of the ONNX Attention nodes.
        profiles: Names of the profiles, in order.

    Returns:
        For each profile, the kernels by name in the plan and in the log.

    Raises:
        InputError: An attention has no fused kernel in a profile, or the two ways differ.
    """
    n = len(attentions)
    in_plan, in_log = kernels_in_plan(plan), kernels_in_log(layers, len(profiles))
    faults = []
    if len(in_plan) != n * len(profiles):
        faults.append(f"the plan holds {len(in_plan)} fused attention kernels; expected {n} layers × {len(profiles)} profiles.")
    by_profile = [in_plan[i * n : (i + 1) * n] for i in range(len(profiles))]
    for name, planned, logged in zip(profiles, by_profile, in_log, strict=True):
        for way, kernels in (("plan", planned), ("log", logged)):
            if missing := sorted(set(attentions) - {layer for _, text in kernels for layer in _LAYER.findall(text)}):
                faults.append(f"profile {name}: the {way} has no fused kernel for {', '.join(missing[:4])}{' …' if len(missing) > 4 else ''}.")
        if Counter(k for k, _ in planned) != Counter(k for k, _ in logged) and not faults:
            faults.append(f"profile {name}: plan and log name different kernels.")
    if not attentions:
        faults.append("the network has no attention layer.")
    if faults:
        raise InputError(
            "The attention is not fused, so no engine is kept:\n  " + "\n  ".join(faults), "Build in fp16 or bf16, or with another capacity."
        )
    return [
        (dict(sorted(Counter(k for k, _ in planned).items())), dict(sorted(Counter(k for k, _ in logged).items())))
        for planned, logged in zip(by_profile, in_log, strict=True)
    ]
