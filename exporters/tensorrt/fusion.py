"""Proof that every attention became one fused kernel in every profile, by two ways that do not know of each other.

The plan's bytes hold the generated kernels with the layers they stand for; the builder's detailed log lists the layers
of each profile with their kernels. Neither is a documented format: when one changes, the counts differ and no engine is
written.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Plain "mha" is in every plan: only these names are kernels of fused attention.
_IN_PLAN = re.compile(rb'function=\{ name=(_gem[mv]_mha\w*) .*?layers="(.*?)"')
# A row of the log: "Name: <kernel>_myl<part>_<number>, LayerType: …, …, Metadata: <layers>".
_ROW = re.compile(r"^Name: (.*?)_myl(\d+)_\d+, LayerType: .*?Metadata: (.*)$", re.MULTILINE)
# The inspector's "Name" of such a row.
_INSPECTED = re.compile(r"(.*?)_myl(\d+)_\d+(?: \[profile \d+\])?")
_KERNEL = re.compile(r"_gem[mv]_mha\w*")
_PROFILE = re.compile(r" \[profile (\d+)\]")
_LAYER = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
# A kernel that reads a matrix as it is stored; one that unpacks it reads it too, but stands for no product.
_STORED = re.compile(r"\b(?:Int4|Int8|FP8)\b", re.IGNORECASE)
# The kernel for one query a row; it reads the cache where it lies. Others copy the cache twice a layer.
_IN_PLACE = "_gemv_mha"
# Layers that a message names before it counts.
_NAMED = 8
_REPORT = "Run the command again; report it if it stays so."


@dataclass(frozen=True)
class Kernel:
    """A fused attention kernel, and the ONNX nodes it stands for."""

    name: str
    layers: tuple[str, ...]


@dataclass(frozen=True)
class ProofTarget:
    """What a profile must show.

    Attributes:
        name: For messages.
        single: It has exactly one new token a row.
        may_decompose: An attention without a fused kernel is recorded and no fault.
    """

    name: str
    single: bool
    may_decompose: bool = False


@dataclass(frozen=True)
class ProfileProof:
    """What is proven of one profile.

    Attributes:
        plan: Fused kernels by name, as the first way found them: the plan's bytes, or the inspector.
        log: The same, as the builder's log has them.
        decomposed: Attention layers without a fused kernel; with the fused ones they are all.
        unpacked: Quantised matrices that no product reads as they are stored: each step unpacks them to memory first.
    """

    plan: dict[str, int]
    log: dict[str, int]
    decomposed: tuple[str, ...] = ()
    unpacked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Product:
    """The product with a quantised matrix, as nodes of the graph that was parsed.

    Attributes:
        matrix: ``blocks.3.attention.query``.
        dequantize: Name of the matrix's DequantizeLinear.
        product: Name of the MatMul.
    """

    matrix: str
    dequantize: str
    product: str


def kernels_in_plan(plan: bytes | memoryview) -> list[Kernel]:
    """Every fused attention kernel of a plan, in its order: profile by profile."""
    return [Kernel(kernel.decode(), _layers(layers.decode())) for kernel, layers in _IN_PLAN.findall(plan)]


def kernels_in_log(text: str, n_profiles: int) -> list[list[Kernel]]:
    """Every fused attention kernel of each profile, from the builder's ``Layers:`` message."""
    return _attentions(_by_profile(_logged(text), n_profiles))


def _logged(text: str) -> list[_Row]:
    return [_Row(*match.groups(), match.group(0)) for match in _ROW.finditer(text)]


def kernels_by_inspector(text: str, n_profiles: int) -> list[list[Kernel]]:
    """Every fused attention kernel of each profile, from the engine inspector's JSON.

    Raises:
        InputError: It is no JSON with a list of detailed layers.
    """
    return _attentions(_by_profile(_inspected(text), n_profiles))


def _inspected(text: str) -> list[_Row]:
    try:
        layers = json.loads(text)["Layers"]
        rows = []
        for layer in layers:
            if match := _INSPECTED.fullmatch(layer["Name"]):
                rows.append(_Row(match.group(1), match.group(2), layer.get("Metadata", ""), json.dumps(layer)))
    except (ValueError, KeyError, TypeError) as e:
        raise InputError(f"The engine inspector gives no detailed layers ({e!r}), so that nothing is proven.", _REPORT) from e
    return rows


class _Row(NamedTuple):
    """One kernel of a list of layers: its name, the number of its part of the engine, and the layers it stands for."""

    name: str
    part: str
    metadata: str
    whole: str


def _by_profile(rows: Sequence[_Row], n_profiles: int) -> list[list[_Row]]:
    """A profile's rows share a part number; tensors of every profile but the first carry its number in their names."""
    profile_of: dict[str, int] = {}
    for row in rows:
        profile_of.setdefault(row.part, 0)
        if mark := _PROFILE.search(row.whole):
            profile_of[row.part] = int(mark.group(1))
    found: list[list[_Row]] = [[] for _ in range(n_profiles)]
    for row in rows:
        if profile_of[row.part] < n_profiles:
            found[profile_of[row.part]].append(row)
    return found


def _attentions(profiles: list[list[_Row]]) -> list[list[Kernel]]:
    return [[Kernel(r.name, _layers(r.metadata)) for r in rows if _KERNEL.fullmatch(r.name)] for rows in profiles]


def unpacked_matrices(listed: str, products: Sequence[Product], n_profiles: int) -> list[tuple[str, ...]]:
    """Matrices of each profile that no kernel multiplies as they are stored.

    Args:
        listed: The builder's ``Layers:`` message, or the inspector's JSON.
        products: Of every quantised matrix.
        n_profiles: How many profiles the plan has.
    """
    rows = _inspected(listed) if listed.lstrip().startswith("{") else _logged(listed)
    found = []
    for profile in _by_profile(rows, n_profiles):
        read = [set(_layers(row.metadata)) for row in profile if _STORED.search(row.whole)]
        found.append(tuple(p.matrix for p in products if not any({p.dequantize, p.product} <= layers for layers in read)))
    return found


def prove_fusion(
    plan: bytes | memoryview, log: str, attentions: Sequence[str], profiles: Sequence[ProofTarget]
) -> list[ProfileProof]:
    """Matches the kernels of plan and log with the attention layers of the parsed network.

    Args:
        plan: The engine's bytes.
        log: The builder's ``Layers:`` message.
        attentions: Names of the Attention nodes, one a layer.
        profiles: What each must show, in order.

    Raises:
        InputError: An attention has no fused kernel in a profile that does not allow it, or the two ways differ.
    """
    n, in_plan, in_log = len(attentions), kernels_in_plan(plan), kernels_in_log(log, len(profiles))
    # The plan lists its kernels profile by profile without a mark between them.
    sizes = [len(logged) if profile.may_decompose else n for profile, logged in zip(profiles, in_log, strict=True)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    by_profile = [in_plan[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    faults = []
    if len(in_plan) != sum(sizes):
        expected = f"{n} layers × {len(profiles)} profiles = {n * len(profiles)}"
        if sum(sizes) != n * len(profiles):
            expected = f"{sum(sizes)}, as the log has"
        faults.append(f"the plan holds {len(in_plan)} fused attention kernels; expected {expected}.")
    return _prove({"plan": by_profile, "log": in_log}, attentions, profiles, faults)


def prove_by_inspector(
    inspected: str, log: str, attentions: Sequence[str], profiles: Sequence[ProofTarget]
) -> tuple[list[ProfileProof], bool]:
    """As :func:`prove_fusion`, from the inspector of a deserialised engine, which is documented, and so decides alone.

    Returns:
        The proof of each profile, and whether the log, which is not documented, shows the same.

    Raises:
        InputError: The inspector shows no fused kernel for an attention.
    """
    by_inspector, in_log = kernels_by_inspector(inspected, len(profiles)), kernels_in_log(log, len(profiles))
    if in_log and [_count(k) for k in in_log] == [_count(k) for k in by_inspector]:
        return _prove({"inspector": by_inspector, "log": in_log}, attentions, profiles, []), True
    return _prove({"inspector": by_inspector}, attentions, profiles, []), False


def _prove(
    ways: dict[str, list[list[Kernel]]], attentions: Sequence[str], profiles: Sequence[ProofTarget], faults: list[str]
) -> list[ProfileProof]:
    if not attentions:
        faults.append("the network has no attention layer.")
    proofs = []
    for i, profile in enumerate(profiles):
        found = {way: kernels[i] for way, kernels in ways.items()}
        faults += [f"profile {profile.name}: {fault}" for fault in _profile_faults(found, attentions, profile)]
        first, second = next(iter(found.values())), found.get("log", [])
        covered = {layer for kernel in first for layer in kernel.layers}
        proofs.append(ProfileProof(_count(first), _count(second), tuple(name for name in attentions if name not in covered)))
    if faults:
        raise InputError(
            "The attention is not fused, so no engine is kept:\n  " + "\n  ".join(faults),
            "Build in fp16 or bf16, or with a smaller --capacity.",
        )
    return proofs


def _profile_faults(found: dict[str, list[Kernel]], attentions: Sequence[str], profile: ProofTarget) -> Iterator[str]:
    named: list[list[str]] = []
    for way, kernels in found.items():
        covered = [layer for kernel in kernels for layer in kernel.layers if layer in set(attentions)]
        if missing := [name for name in attentions if name not in covered]:
            if not profile.may_decompose:
                some = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
                yield f"the {way} has no fused kernel for {len(missing)} of {len(attentions)} attentions: {some}."
        elif len(kernels) != len(attentions):
            yield f"the {way} has {len(kernels)} fused kernels for {len(attentions)} attentions."
        named.append(covered)
        copying = sorted({k.name for k in kernels if not k.name.startswith(_IN_PLACE)})
        if profile.single and copying and not profile.may_decompose:
            yield f"the {way} decodes with {', '.join(copying)}, which copies the whole cache; expected {_IN_PLACE}_*."
    counts = [_count(kernels) for kernels in found.values()]
    if any(count != counts[0] for count in counts):
        yield f"{' and '.join(found)} name different kernels: {' and '.join(map(str, counts))}."
    elif any(set(names) != set(named[0]) for names in named):
        yield f"{' and '.join(found)} name different layers."


def _layers(text: str) -> tuple[str, ...]:
    return tuple(_LAYER.findall(text))


def _count(kernels: list[Kernel]) -> dict[str, int]:
    return dict(sorted(Counter(k.name for k in kernels).items()))
