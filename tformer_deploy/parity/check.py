"""Bundle + checkpoint → report."""

from __future__ import annotations

import gc
import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tformer_deploy.backends import open_session
from tformer_deploy.backends.torch import bundle_backend
from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.checkpoints import Checkpoint, open_checkpoint
from tformer_deploy.parity.gates import GATES, Check, Gates
from tformer_deploy.parity.metrics import compare_logits
from tformer_deploy.parity.oracle import ask, exact_logits
from tformer_deploy.parity.plan import Plan, Suite, make_plan
from tformer_deploy.parity.report import Report
from tformer_deploy.parity.suite import Comparison
from tformer_deploy.parity.weights import compare_weights
from tformer_deploy.reference import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from tformer_deploy.config import DType
    from tformer_deploy.parity.oracle import Oracle

# What float32 itself may be away from float64, times this, is the line of a deep or hot model.
_HOT = 4.0


def check_bundle(
    bundle_path: str | Path,
    checkpoint_path: str | Path | None,
    suite: Suite = "quick",
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compares every tensor exactly, then values on ONNX Runtime against the PyTorch reference.

    Args:
        bundle_path: The bundle.
        checkpoint_path: Where it came from. Without it the reference is built from the bundle's own weights, and the
            verdict is "self-consistent only".
        suite: ``quick`` or ``full``.
        on_progress: Called with a few words at the start of each part.

    Raises:
        InputError: The bundle or the checkpoint cannot be read.
    """
    bundle = open_bundle(bundle_path)
    checkpoint = None if checkpoint_path is None else open_checkpoint(checkpoint_path)
    checks: list[Check] = []
    notes: list[str] = []
    if checkpoint is not None:
        on_progress("weights")
        checks += compare_weights(bundle, checkpoint)
        notes += _source_notes(bundle, checkpoint)
    plan = make_plan(bundle.manifest.config, bundle.manifest.max_length, suite)
    on_progress("PyTorch reference")
    # A config that differs is red already; the checkpoint's own decides what is right.
    oracle = ask(_reference(bundle, checkpoint), plan)
    gc.collect()
    on_progress("ONNX Runtime")
    backend = open_session(bundle, backend="onnxruntime").backend
    notes += backend.notes
    if checkpoint is None or checkpoint.config.vocab_size == bundle.manifest.config.vocab_size:
        found = Comparison(backend, bundle.manifest.dtype, plan, oracle).all(on_progress)
        if bundle.manifest.dtype == "fp32" and any(c.verdict == "red" for c in found):
            lines, note = hot_lines(_reference(bundle, checkpoint), plan, oracle)
            if note:
                notes.append(note)
                found = Comparison(backend, "fp32", plan, oracle, lines).all(on_progress)
        checks += found
    return Report(
        bundle=str(bundle_path),
        core_sha256=bundle.core_sha256,
        dtype=bundle.manifest.dtype,
        suite=suite,
        against="its own weights" if checkpoint is None else checkpoint.name,
        checks=tuple(checks),
        notes=tuple(notes),
        complete=checkpoint is not None,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
    )


def compare_with_decoder(decoder: Decoder, bundle: Bundle, dtype: DType, suite: Suite = "quick") -> list[Check]:
    """The value checks of a bundle on ONNX Runtime against a given reference, with the gates of ``dtype``."""
    plan = make_plan(bundle.manifest.config, bundle.manifest.max_length, suite)
    oracle = ask(decoder, plan)
    return Comparison(open_session(bundle, backend="onnxruntime").backend, dtype, plan, oracle).all()


def hot_lines(decoder: Decoder, plan: Plan, oracle: Oracle) -> tuple[Gates, str]:
    """fp32 lines of a deep or hot model: 4 × the error that PyTorch's own float32 has against float64.

    Returns:
        The lines, and a sentence that prints them; the sentence is empty where nothing is wider than the plain gates.
    """
    plain = GATES["fp32"]
    own = compare_logits(exact_logits(decoder, plan), oracle.logits, plain.margin)
    lines = replace(
        plain,
        max_abs=max(plain.max_abs, _HOT * own.max_abs),
        rel_l2_p95=max(plain.rel_l2_p95, _HOT * own.rel_l2_p95),
        mean_kl=max(plain.mean_kl, _HOT * own.mean_kl),
        cache_rows=max(plain.cache_rows, _HOT * own.max_abs),
        step=max(plain.step, _HOT * own.max_abs),
    )
    if lines == plain:
        return plain, ""
    return lines, (
        f"This model amplifies rounding: PyTorch's own float32 is {own.max_abs:.2g} (max abs), {own.rel_l2_p95:.2g} (relative L2) "
        f"and {own.mean_kl:.2g} (KL) away from float64; a line is {_HOT:g} × that where it is above the plain one."
    )


def _reference(bundle: Bundle, checkpoint: Checkpoint | None) -> Decoder:
    if checkpoint is None:
        return bundle_backend(bundle).decoder.to(torch.float32)
    return Decoder.from_pretrained(checkpoint.path, torch.float32)


def _source_notes(bundle: Bundle, checkpoint: Checkpoint) -> list[str]:
    source = bundle.manifest.source
    found = checkpoint.sha256()
    if found == source.sha256:
        return []
    return [
        f"The bundle was made from {source.name} (sha256 {source.sha256[:12]}); this checkpoint is {checkpoint.name} (sha256 {found[:12]})."
    ]
