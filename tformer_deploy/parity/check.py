"""Bundle + checkpoint → report."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import resource
import sys
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tformer_deploy.backends import open_backend
from tformer_deploy.backends.cpu.opening import open_cpu
from tformer_deploy.backends.onnxruntime import OnnxRuntimeBackend
from tformer_deploy.backends.torch import bundle_backend
from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.checkpoints import Checkpoint, open_checkpoint
from tformer_deploy.errors import InputError, ResourceError, TformerError, UsageError
from tformer_deploy.interrupts import collect_garbage
from tformer_deploy.parity.bisect import bisect
from tformer_deploy.parity.candidate import Candidate
from tformer_deploy.parity.comparisons import compare
from tformer_deploy.parity.comparisons.levels import levels, trace
from tformer_deploy.parity.gates import Check, judge
from tformer_deploy.parity.lines import judge_again, own_lines
from tformer_deploy.parity.oracle import ask
from tformer_deploy.parity.plan import Plan, Suite, make_plan
from tformer_deploy.parity.profile import Profile
from tformer_deploy.parity.quantised import deployed
from tformer_deploy.parity.quantised_weights import compare_quantised_weights
from tformer_deploy.parity.report import Report
from tformer_deploy.parity.text import cut
from tformer_deploy.parity.weights import compare_weights
from tformer_deploy.reference import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tformer_deploy.backends.base import Backend
    from tformer_deploy.backends.cpu.opening import ProfileName
    from tformer_deploy.backends.providers import ProviderName
    from tformer_deploy.config import DType, ModelConfig
    from tformer_deploy.parity.bisection import Bisection
    from tformer_deploy.parity.oracle import Oracle

_VERSIONED = ("tformer-deploy", "torch", "onnx", "numpy")
_RUNTIMES = {"onnxruntime": ("onnxruntime", "onnxruntime-gpu"), "tensorrt": ("tensorrt", "tensorrt-rtx")}


@dataclass
class _Values:
    """What comparing values gives."""

    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    profile: Profile = field(default_factory=Profile)
    bisection: Bisection | None = None


def check_bundle(
    bundle_path: str | Path,
    checkpoint_path: str | Path | None,
    suite: Suite = "quick",
    on_progress: Callable[[str], None] = lambda _: None,
    text: tuple[str, Sequence[int]] | None = None,
    find_layer: bool = False,
    profile: ProfileName = "portable",
    backend: str = "onnxruntime",
    provider: ProviderName = "cpu",
    engine: str | None = None,
) -> Report:
    """Compares every tensor exactly, then values on a backend against the PyTorch reference.

    Args:
        bundle_path: The bundle.
        checkpoint_path: Where it came from. Without it the reference is built from the bundle's own weights, and the
            verdict is "self-consistent only".
        suite: ``quick`` or ``full``.
        on_progress: Called with a few words at the start of each part.
        text: Name and ids of a text of which perplexity is compared too.
        find_layer: Look for the first layer in which a graph and the reference part.
        profile: Which graphs run: the bundle's own, or those derived for this CPU.
        backend: ``onnxruntime`` or ``tensorrt``.
        provider: Where ONNX Runtime runs.
        engine: Name of the engine (tensorrt); the best that fits where None.

    Raises:
        UsageError: A layer is looked for elsewhere than on ONNX Runtime's CPU provider, or flags contradict each other.
        CapabilityError: What was asked for is not here. Nothing else runs in its place, and nothing is reported.
        InputError: The bundle or the checkpoint cannot be read, or an id of ``text`` is not in the vocabulary.
        ResourceError: Memory ran out.
    """
    started = time.monotonic()
    bundle = open_bundle(bundle_path)
    config = bundle.manifest.config
    # A checkpoint that bounds no length was exported with one, which stands in here too.
    checkpoint = None if checkpoint_path is None else open_checkpoint(checkpoint_path, config.max_length)
    other = None
    if backend != "onnxruntime" or provider != "cpu":
        if find_layer:
            raise UsageError(
                "--bisect looks into graphs on ONNX Runtime's CPU provider alone.", "Leave it out, or --backend and --provider."
            )
        other = open_backend(bundle, backend, profile=profile, provider=provider, engine=engine)
    length = bundle.manifest.max_length if other is None else other.max_length
    plan = make_plan(config, length, suite, None if text is None else cut(*text, config, length))
    checks: list[Check] = []
    notes: list[str] = []
    if checkpoint is not None:
        on_progress("weights")
        if bundle.manifest.quantization is None:
            checks += compare_weights(bundle, checkpoint)
        else:
            checks += compare_quantised_weights(bundle, checkpoint, on_progress)
        notes += _source_notes(bundle, checkpoint)
    values = _Values()
    if checkpoint is None or _same_shape(config, checkpoint.config):
        values = _compare_values(bundle, checkpoint, plan, suite, profile, find_layer, other, on_progress)
    else:
        notes.append("The checkpoint is of another shape, so that no values could be compared.")
    return Report(
        bundle=str(bundle_path),
        core_sha256=bundle.core_sha256,
        dtype=bundle.manifest.dtype if other is None else gates_of(bundle, other),
        suite=suite,
        against="its own weights" if checkpoint is None else checkpoint.name,
        checks=(*checks, *values.checks),
        notes=(*notes, *values.notes),
        complete=checkpoint is not None,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10),
        seconds=time.monotonic() - started,
        versions=_versions(backend) | {"python": platform.python_version()},
        profile=values.profile,
        bisection=values.bisection,
    )


def _compare_values(
    bundle: Bundle,
    checkpoint: Checkpoint | None,
    plan: Plan,
    suite: Suite,
    profile: ProfileName,
    find_layer: bool,
    other: Backend | None,
    on_progress: Callable[[str], None],
) -> _Values:
    """Values on a backend (``other``; ONNX Runtime's CPU provider where None) against the PyTorch reference, and what a reader must know about them."""
    values = _Values()
    window = bundle.manifest.config.window
    if window is not None and plan.longest <= window:
        more = " Run the full suite." if suite == "quick" else ""
        values.notes.append(
            f"Windows of {window} tokens are longer than every row here ({plan.longest} at most): what they cut off was not "
            f"compared.{more}"
        )
    on_progress("PyTorch reference")
    # A config that differs is red already; the checkpoint's own decides what is right.
    oracle = _ask(_reference(bundle, checkpoint), plan)
    if isinstance(oracle, str):
        values.checks.append(judge("PyTorch reference", "ran to the end", 0, 1, "==", oracle))
        return values
    values.checks.append(judge("PyTorch reference", "values not finite", oracle.not_finite, 0, "=="))
    _give_memory_back()
    on_progress("ONNX Runtime" if other is None else other.name)
    if other is None:
        _run(bundle, plan, oracle, suite, profile, values, on_progress)
    else:
        _run_elsewhere(bundle, other, plan, oracle, suite, values, on_progress)
    _give_memory_back()  # the runtime's memory goes before the reference comes back
    if any(c.verdict == "red" for c in values.checks):
        on_progress("PyTorch's own rounding")
        dtype = bundle.manifest.dtype if other is None else gates_of(bundle, other)
        lines, note = own_lines(_reference(bundle, checkpoint), dtype, plan, oracle)
        if note:
            values.notes.append(note)
            values.checks = judge_again(values.checks, lines)
    if bundle.manifest.quantization is not None and other is None:
        _add_deployed(bundle, checkpoint, plan, oracle, suite, profile, values, on_progress)
    if find_layer:
        on_progress("bisect")
        values.bisection = bisect(bundle, lambda: _reference(bundle, checkpoint), plan)
        values.notes += values.bisection.sentences(red=any(c.verdict == "red" for c in values.checks))
    return values


def _add_deployed(
    bundle: Bundle, checkpoint: Checkpoint | None, plan: Plan, oracle: Oracle, suite: Suite, profile: ProfileName, values: _Values,
    on_progress: Callable[[str], None],
) -> None:  # fmt: skip
    """The graphs as they run; what was compared until here were the same ones with their weights dequantised."""
    try:
        checks, notes = deployed(
            bundle, checkpoint, plan, oracle, suite, profile, lambda: _reference(bundle, checkpoint), on_progress
        )
        values.checks += checks
        values.notes += notes
    except InputError as e:
        values.checks.append(judge("deployed graphs", "ran to the end", 0, 1, "==", str(e)[:500]))


def _ask(reference: Decoder, plan: Plan) -> Oracle | str:
    """The reference's answers, or why it has none: an oracle that fails proves nothing."""
    try:
        return ask(reference, plan)
    except (TformerError, MemoryError):
        raise
    except Exception as e:
        reason = f"{type(e).__name__}: {e}"[:500]
        if "alloc" in reason:
            raise ResourceError(f"PyTorch ran out of memory: {reason}", "Use a machine with more memory.") from e
        return reason


def _run(
    bundle: Bundle, plan: Plan, oracle: Oracle, suite: Suite, profile: ProfileName, values: _Values, on_progress: Callable[[str], None]
) -> None:  # fmt: skip
    """Every comparison; a graph that the runtime refuses or cannot run is as red as a wrong value."""
    dtype = bundle.manifest.dtype
    try:
        quantised = bundle.manifest.quantization is not None
        # Rounding hides faults: what a quantised graph computes is judged with its weights dequantised at loading, in fp32.
        backend = OnnxRuntimeBackend(bundle, dequantised=True) if quantised else open_cpu(bundle, profile=profile)
        candidate = Candidate(backend, dtype, plan, oracle)
        values.notes += candidate.backend.notes
        values.profile = candidate.profile
        values.checks += compare(candidate, suite, on_progress)
        if suite == "full":
            on_progress("optimisation levels")
            deployed = trace(candidate)
            del candidate  # one runtime in memory at a time
            _give_memory_back()
            plain = Candidate(OnnxRuntimeBackend(bundle, optimised=False, dequantised=quantised), dtype, plan, oracle)
            values.checks += levels(plain, deployed)
    except (InputError, AssertionError, ValueError, IndexError) as e:
        # The runtime's own error in the product's words, or outputs of another shape; running out of memory is another one.
        reason = str(e) if isinstance(e, InputError) else f"{type(e).__name__}: {e}"
        values.checks.append(judge("graphs", "ran to the end", 0, 1, "==", reason[:500]))


def gates_of(bundle: Bundle, backend: Backend) -> DType:
    """The gates for a backend: an engine may have been derived in another dtype than its bundle's, and is judged in its own."""
    return backend.dtype if backend.name == "tensorrt" else bundle.manifest.dtype


def _run_elsewhere(
    bundle: Bundle,
    backend: Backend,
    plan: Plan,
    oracle: Oracle,
    suite: Suite,
    values: _Values,
    on_progress: Callable[[str], None],
) -> None:
    """Every comparison on a GPU; what fails there is an error and not a verdict."""
    candidate = Candidate(backend, gates_of(bundle, backend), plan, oracle)
    values.checks += compare(candidate, suite, on_progress)
    values.profile = candidate.profile
    values.notes += backend.notes
    what = "an engine; the bundle's portable graphs were not executed" if backend.name == "tensorrt" else "the portable graphs"
    values.notes.append(f"What was executed and compared is {what}.")
    if bundle.manifest.quantization is not None:
        values.notes.append(
            "Compared with the dequantised weights; what quantising costs against the unquantised model is not judged here."
        )


def _versions(backend: str) -> dict[str, str]:
    """Of the packages that took part; several distributions may bring a runtime."""
    found = {name: version(name) for name in _VERSIONED}
    for name in _RUNTIMES[backend]:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _give_memory_back() -> None:
    """What was freed goes back to the system: the reference and the runtime are never wanted in memory together."""
    collect_garbage()
    with contextlib.suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def _same_shape(a: ModelConfig, b: ModelConfig) -> bool:
    """Whether the rows and caches of one fit the other."""
    shapes = [(c.vocab_size, c.n_layers, c.n_kv_heads, c.head_dim, c.max_length) for c in (a, b)]
    return shapes[0] == shapes[1]


def _reference(bundle: Bundle, checkpoint: Checkpoint | None) -> Decoder:
    if checkpoint is None or bundle.manifest.quantization is not None:  # compared with the checkpoint's before, bit by bit
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
