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
from tformer_deploy.backends.torch import TorchBackend, bundle_backend
from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.checkpoints import Checkpoint, open_checkpoint
from tformer_deploy.errors import InputError
from tformer_deploy.parity.gates import GATES, Check, Gates, judge
from tformer_deploy.parity.metrics import compare_logits, max_abs
from tformer_deploy.parity.oracle import ask, exact
from tformer_deploy.parity.plan import Plan, Suite, make_plan
from tformer_deploy.parity.report import Report
from tformer_deploy.parity.suite import Comparison
from tformer_deploy.parity.weights import compare_weights
from tformer_deploy.reference import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from tformer_deploy.config import DType, ModelConfig
    from tformer_deploy.parity.oracle import Oracle

# What float32 itself may be away from float64, times this, is the line of a deep or hot model.
_HOT = 4.0
# What PyTorch's own half precision is away from its float32, times this, is the line of such a model in that dtype.
_HALF = 2.0


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
    # A checkpoint that bounds no length was exported with one, which stands in here too.
    length = bundle.manifest.config.max_length
    checkpoint = None if checkpoint_path is None else open_checkpoint(checkpoint_path, length)
    checks: list[Check] = []
    notes: list[str] = []
    if checkpoint is not None:
        on_progress("weights")
        checks += compare_weights(bundle, checkpoint)
        notes += _source_notes(bundle, checkpoint)
    if checkpoint is None or _same_shape(bundle.manifest.config, checkpoint.config):
        found, said = _compare_values(bundle, checkpoint, suite, on_progress)
        checks, notes = checks + found, notes + said
    else:
        notes.append("The checkpoint is of another shape, so that no values could be compared.")
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


def _compare_values(
    bundle: Bundle, checkpoint: Checkpoint | None, suite: Suite, on_progress: Callable[[str], None]
) -> tuple[list[Check], list[str]]:
    """Values on ONNX Runtime against the PyTorch reference, and what a reader must know about them."""
    plan, dtype = make_plan(bundle.manifest.config, bundle.manifest.max_length, suite), bundle.manifest.dtype
    on_progress("PyTorch reference")
    # A config that differs is red already; the checkpoint's own decides what is right.
    oracle = ask(_reference(bundle, checkpoint), plan)
    gc.collect()
    on_progress("ONNX Runtime")
    backend = open_session(bundle, backend="onnxruntime").backend
    notes = list(backend.notes)
    found = _compare(Comparison(backend, dtype, plan, oracle), on_progress)
    del backend  # its memory goes before the reference comes back
    gc.collect()
    if any(c.verdict == "red" for c in found):
        on_progress("PyTorch's own rounding")
        lines, note = own_lines(_reference(bundle, checkpoint), dtype, plan, oracle)
        if note:
            notes.append(note)
            found = judge_again(found, lines)
    return found, notes


def _same_shape(a: ModelConfig, b: ModelConfig) -> bool:
    """Whether the rows and caches of one fit the other."""
    shapes = [(c.vocab_size, c.n_layers, c.n_kv_heads, c.head_dim, c.max_length) for c in (a, b)]
    return shapes[0] == shapes[1]


def _compare(comparison: Comparison, on_progress: Callable[[str], None]) -> list[Check]:
    """Every comparison; a graph that the runtime refuses or cannot run is as red as a wrong value."""
    try:
        return comparison.all(on_progress)
    except InputError as e:  # the runtime's own error in the product's words; running out of memory is another one
        return [judge("graphs", "ran to the end", 0, 1, "==", str(e)[:500])]


def own_lines(decoder: Decoder, dtype: DType, plan: Plan, oracle: Oracle) -> tuple[Gates, str]:
    """The lines of a model that amplifies rounding, from what PyTorch's own rounding in that dtype does to it.

    Args:
        decoder: The reference in float32; it is converted.
        dtype: The bundle's dtype.
        plan: The rows.
        oracle: The float32 reference's answers to them.

    Returns:
        The lines, and a sentence that prints them; the sentence is empty where the plain gates stand.
    """
    return hot_lines(decoder, plan, oracle) if dtype == "fp32" else half_lines(decoder, dtype, plan, oracle)


def judge_again(checks: list[Check], lines: Gates) -> list[Check]:
    """The red checks under the lines of a model that amplifies rounding; a green one keeps its plain gate."""
    found = []
    for check in checks:
        line = _line_of(check)
        if check.verdict == "red" and line is not None:
            check = judge(check.group, check.metric, check.value, getattr(lines, line), check.relation, check.detail)
        found.append(check)
    return found


def _line_of(check: Check) -> str | None:
    """The line that may be wider for a check; None for one whose gate never is."""
    return _LINES.get(check.group, {}).get(check.metric)


def half_lines(decoder: Decoder, dtype: DType, plan: Plan, oracle: Oracle) -> tuple[Gates, str]:
    """fp16 and bf16 lines: twice the error that PyTorch itself makes in that dtype against its float32.

    Logits of size 16 to 32 are 0.016 apart in fp16, so that two correct ways to one logit differ by more than the plain
    line of a step.
    """
    plain = GATES[dtype]
    candidate = TorchBackend(decoder.to(torch.float16 if dtype == "fp16" else torch.bfloat16))
    own: dict[str, float] = {}
    comparison = Comparison(candidate, dtype, plan, oracle)
    for check in (*comparison.batch(), *comparison.alone(), *comparison.one_more()):
        line = _line_of(check)
        if line is not None:
            own[line] = max(own.get(line, 0.0), check.value)
    lines = replace(plain, **{name: max(getattr(plain, name), _HALF * value) for name, value in own.items()})
    if lines == plain:
        return plain, ""
    wider = ", ".join(f"{name} {getattr(lines, name):.2g}" for name in sorted(own) if getattr(lines, name) > getattr(plain, name))
    return lines, (
        f"This model amplifies {dtype} rounding: a line is {_HALF:g} × what PyTorch's own {dtype} is away from its float32 "
        f"where a plain one does not hold ({wider})."
    )


# Metric → line, of logits against the oracle, of cache rows, and of two ways to the same logits. Nothing else has one.
_OF_LOGITS = {"max abs": "max_abs", "relative L2, p95": "rel_l2_p95", "mean KL": "mean_kl"}
_OF_CACHES = dict.fromkeys(("max abs", "max abs, relative above 1"), "cache_rows")
_OF_TWO_WAYS = dict.fromkeys(("max abs", "prefill: max abs", "decode: max abs"), "step")
_LINES = {
    "prefill, ragged batch": _OF_LOGITS,
    "decode, teacher-forced": _OF_LOGITS,
    "decode, several tokens at once": _OF_LOGITS,
    "prefill caches": _OF_CACHES,
    "decode caches": _OF_CACHES,
    "several-token caches": _OF_CACHES,
    "each row alone": _OF_TWO_WAYS,
    "prefill n+1 against prefill n, decode 1": _OF_TWO_WAYS,
}


def hot_lines(decoder: Decoder, plan: Plan, oracle: Oracle) -> tuple[Gates, str]:
    """fp32 lines of a deep or hot model: 4 × the error that PyTorch's own float32 has against float64.

    Returns:
        The lines, and a sentence that prints them; the sentence is empty where nothing is wider than the plain gates.
    """
    plain = GATES["fp32"]
    exact_logits, exact_caches = exact(decoder, plan)
    own = compare_logits(exact_logits, oracle.logits, plain.margin)
    pairs = [pair for e, o in zip(exact_caches, oracle.caches, strict=True) for pair in zip(e, o, strict=True)]
    own_cache = max(max_abs(e[kind], o[kind]) for e, o in pairs for kind in (0, 1))
    lines = replace(
        plain,
        max_abs=max(plain.max_abs, _HOT * own.max_abs),
        rel_l2_p95=max(plain.rel_l2_p95, _HOT * own.rel_l2_p95),
        mean_kl=max(plain.mean_kl, _HOT * own.mean_kl),
        cache_rows=max(plain.cache_rows, _HOT * own_cache),
        step=max(plain.step, _HOT * own.max_abs),
    )
    if lines == plain:
        return plain, ""
    return lines, (
        f"This model amplifies rounding: PyTorch's own float32 is {own.max_abs:.2g} (max abs), {own.rel_l2_p95:.2g} "
        f"(relative L2), {own.mean_kl:.2g} (KL) and {own_cache:.2g} (cache rows) away from float64; a line is {_HOT:g} × that "
        "where a plain one does not hold."
    )


def _reference(bundle: Bundle, checkpoint: Checkpoint | None) -> Decoder:
    if checkpoint is None:
        return bundle_backend(bundle).decoder.to(torch.float32)
    return Decoder.from_pretrained(checkpoint.path, torch.float32, bundle.manifest.config.max_length)


def _source_notes(bundle: Bundle, checkpoint: Checkpoint) -> list[str]:
    source = bundle.manifest.source
    found = checkpoint.sha256()
    if found == source.sha256:
        return []
    return [
        f"The bundle was made from {source.name} (sha256 {source.sha256[:12]}); this checkpoint is {checkpoint.name} "
        f"(sha256 {found[:12]})."
    ]
