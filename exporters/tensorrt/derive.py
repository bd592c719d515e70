"""A bundle in another dtype, made from a bundle and checked against it: what ``build-engine --dtype`` compiles."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tformer_deploy.backends.onnxruntime import OnnxRuntimeBackend
from tformer_deploy.backends.session import Session
from tformer_deploy.backends.torch import bundle_backend
from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.bundle.engines import DerivedGraph
from tformer_deploy.bundle.quantization import WHOLE, stored_tensors
from tformer_deploy.errors import InputError
from tformer_deploy.exporters.onnx import export_bundle
from tformer_deploy.exporters.tensorrt.preflight import require_castable
from tformer_deploy.exporters.tensorrt.ranges import compared_prompts, scan_ranges
from tformer_deploy.interrupts import collect_garbage
from tformer_deploy.parameters import constant_shapes
from tformer_deploy.parity import judge_again, own_lines
from tformer_deploy.parity.candidate import Candidate
from tformer_deploy.parity.comparisons import compare
from tformer_deploy.parity.metrics import margin_of
from tformer_deploy.parity.oracle import Oracle
from tformer_deploy.parity.plan import Plan, make_plan
from tformer_deploy.quantization import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tformer_deploy.config import DType
    from tformer_deploy.parity.gates import Check


_TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class BundleSource:
    """A bundle's weights in the form that the exporter reads from a checkpoint; one tensor in memory at a time."""

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        self._bundle = bundle
        self.path, self.config = bundle.path, manifest.config
        self.name, self.format, self.family = manifest.source.name, manifest.source.format, manifest.source.family
        self.eos_token_ids, self.bos_token_id = manifest.eos_token_ids, manifest.bos_token_id
        # In the order of the file, which is the model's own; the manifest is sorted by name.
        records = sorted(manifest.tensors.items(), key=lambda item: item[1].offset)
        self.tensors = {name: record for name, record in records if name not in constant_shapes(manifest.config)}

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor."""
        array = self._bundle.tensor(name)
        if array.dtype.name == "bfloat16":
            tensor = torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        else:
            tensor = torch.from_numpy(array)
        return tensor if dtype is None else tensor.to(dtype)

    def stored(self, dtype: DType) -> Iterator[StoredTensor]:
        """The tensors of a quantised bundle: whole numbers and scales as they are, everything else in ``dtype``.

        Raises:
            InputError: ``dtype`` does not hold a scale.
        """
        manifest = self._bundle.manifest
        for name, (_, kind) in stored_tensors(manifest.config, dtype, manifest.quantization).items():
            array = self._bundle.tensor(name)
            if kind in WHOLE:
                yield StoredTensor(name, kind, torch.from_numpy(array))
                continue
            exact = torch.from_numpy(array)
            tensor = exact.to(_TORCH[kind])
            if name.endswith(".scale"):
                _require_exact(name, exact, tensor, dtype)
            yield StoredTensor(name, kind, tensor)

    def sha256(self) -> str:
        """The checkpoint that the bundle itself came from."""
        return self._bundle.manifest.source.sha256

    def assets(self) -> dict[str, bytes]:
        """Nothing: the tokenizer stays with the core."""
        return {}


def _require_exact(name: str, scales: torch.Tensor, cast: torch.Tensor, dtype: DType) -> None:
    """Refuses scales that ``dtype`` would round: the whole numbers were chosen under these."""
    long = scales[scales.bfloat16().float() != scales]
    if len(long):
        raise InputError(
            f"{name} holds the scale {float(long[0])!r}, which has more bits than bf16; an engine needs scales that do not.",
            "Export the checkpoint again: scales have been bf16 numbers since.",
        )
    lost = scales[cast.float() != scales]
    if len(lost):
        raise InputError(
            f"{name} holds the scale {float(lost[0]):.3g}, which {dtype} does not hold: below 7.6e-06 it rounds.",
            "Give --dtype bf16, or keep the bundle on ONNX Runtime.",
        )


def derive_bundle(bundle: Bundle, dtype: DType, folder: Path, on_progress: Callable[[str], None]) -> tuple[Bundle, DerivedGraph]:
    """Writes the bundle in ``dtype`` to ``folder`` and compares it, on ONNX Runtime, with the bundle itself.

    Args:
        bundle: An fp32 bundle.
        dtype: fp16 or bf16.
        folder: Where the derived bundle goes.
        on_progress: Called with a few words at the start of each part.

    Returns:
        The derived bundle, and what the comparison found.

    Raises:
        InputError: The bundle is not fp32, a value does not fit ``dtype``, or a check is red.
    """
    require_castable(bundle.manifest, dtype)
    quantization, source = bundle.manifest.quantization, BundleSource(bundle)
    # The rows that the weights were rounded for stay with the core.
    rounded = None if quantization is None else replace(quantization, calibration=None)
    if rounded is not None and rounded.dynamic:  # the same matrices; what they multiply is not rounded
        rounded = replace(rounded, kind="int8", head="int8")
    export_bundle(
        source,
        folder,
        dtype=dtype,
        quantization=rounded,
        stored=None if quantization is None else source.stored(dtype),
        max_length=bundle.manifest.max_length,
        inside_source=True,
        on_progress=lambda p: on_progress(f"{dtype} {p}"),
    )
    derived = open_bundle(folder, verify="full")
    on_progress(f"{dtype} graph against the fp32 one")
    checks, notes = _compare(bundle, derived, dtype)
    if red := [c for c in checks if c.verdict == "red"]:
        lines = "\n  ".join(f"{c.group}, {c.metric}: {c.value:.3g}, gate {c.relation} {c.gate:g}" for c in red)
        other = "fp16" if dtype == "bf16" else "bf16"
        raise InputError(
            f"In {dtype} this model differs too much from the bundle:\n  {lines}{_overflow(bundle) if dtype == 'fp16' else ''}",
            f"Keep it in fp32 on ONNX Runtime, or try --dtype {other}.",
        )
    return derived, DerivedGraph(derived.core_sha256, len(checks), _figures(checks), notes)


def _overflow(bundle: Bundle) -> str:
    """Which values of the compared rows fp16 does not hold; empty where it holds all of them."""
    found = scan_ranges(bundle, compared_prompts(bundle))
    return f"\nWhere fp16 overflows on the rows compared, first to last: {found.first}." if found.beyond else ""


def _compare(bundle: Bundle, derived: Bundle, dtype: DType) -> tuple[list[Check], tuple[str, ...]]:
    plan = make_plan(bundle.manifest.config, bundle.manifest.max_length, "quick")
    # Rounded rows would hide what the dtype does: quantised weights are dequantised on both sides.
    quantised = bundle.manifest.quantization is not None
    oracle = ask_session(Session(OnnxRuntimeBackend(bundle, dequantised=quantised)), plan)
    collect_garbage()
    backend = OnnxRuntimeBackend(derived, dequantised=quantised)
    checks, notes = list(compare(Candidate(backend, dtype, plan, oracle), "quick")), backend.notes
    if any(c.verdict == "red" for c in checks):
        lines, note = own_lines(bundle_backend(bundle).decoder, dtype, plan, oracle)
        if note:
            checks, notes = judge_again(checks, lines), (*notes, note)
    return checks, notes


def ask_session(session: Session, plan: Plan) -> Oracle:
    """A session's answers to a plan, each row alone."""
    backend = session.backend
    logits, caches = [], []
    for row in plan.rows:
        cache = backend.allocate(1, len(row))
        logits.append(backend.prefill(_row(row), _row(range(len(row))), cache)[0])
        layers = [cache.read(i) for i in range(backend.config.n_layers)]
        caches.append([(key[0], value[0]) for key, value in layers])
    greedy = [_greedy(session, row[:n], plan.greedy) for row, n in zip(plan.rows[:2], plan.lengths[:2], strict=True)]
    return Oracle(logits, caches, greedy)


def _greedy(session: Session, prompt: tuple[int, ...], steps: int) -> list[tuple[int, float]]:
    tokens: list[tuple[int, float]] = []
    if steps:
        backend = session.backend
        cache = backend.allocate(1, len(prompt) + steps)
        position = backend.prefill(_row(prompt), _row([len(prompt) - 1]), cache)[0, 0]
        while True:
            tokens.append((int(position.argmax()), margin_of(position)))
            if len(tokens) == steps:
                break
            length = np.array([len(prompt) + len(tokens) - 1], dtype=np.int64)
            position = backend.decode(_row([tokens[-1][0]]), length, _row([0]), cache)[0, 0]
    return tokens


def _row(ids: Sequence[int]) -> NDArray[np.int64]:
    return np.array([list(ids)], dtype=np.int64)


def _figures(checks: list[Check]) -> dict[str, tuple[float, float]]:
    """Value and gate of each metric that has a gate, by ``group: metric``."""
    return {f"{c.group}: {c.metric}": (float(c.value), float(c.gate)) for c in checks if c.gate is not None}
