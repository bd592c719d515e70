"""The commands as functions: export, check, build_engine."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.quantization import BLOCKS, DYNAMIC, Calibration, Quantization, default_block
from tformer_deploy.errors import CapabilityError, InputError, ResourceError, StorageError, TformerError, UsageError
from tformer_deploy.generation import load_tokenizer
from tformer_deploy.parity.gates import ACCURACY
from tformer_deploy.parity.report import figure
from tformer_deploy.parity.text import read_beginning

if TYPE_CHECKING:
    from collections.abc import Callable

    from tformer_deploy.backends.cpu.opening import ProfileName
    from tformer_deploy.backends.providers import ProviderName
    from tformer_deploy.bundle.quantization import Kind, Whole
    from tformer_deploy.config import DType, ModelConfig
    from tformer_deploy.generation import Tokenizer
    from tformer_deploy.parity import Report
    from tformer_deploy.quantization.calibration import Rows
    from tformer_deploy.reference import Decoder


class ParityError(TformerError):
    """The exported graphs do not compute what PyTorch computes (exit 1)."""

    exit_code = 1


def export(
    decoder_or_path: Decoder | str | Path,
    bundle_path: str | Path,
    *,
    dtype: DType = "fp32",
    quantize: Kind | None = None,
    block: int | None = None,
    head: Whole | None = None,
    calibration: str | Path | None = None,
    max_length: int | None = None,
    check: bool = True,
    force: bool = False,
    on_progress: Callable[[str], None] | None = None,
    on_warning: Callable[[str], None] | None = None,
) -> Path:
    """Exports a model to a bundle and checks it against PyTorch before the bundle appears.

    Args:
        decoder_or_path: A ``tformer_deploy.reference.Decoder``, or the path of a checkpoint of any supported family.
        bundle_path: Folder to write.
        dtype: dtype of weights and caches.
        quantize: Matrices as ``int8`` or ``int4``, with one scale for each block of inputs, or as ``int8-dynamic``,
            with one scale for each output and rows rounded to int8 in the graph; None: in ``dtype``.
        block: Inputs that share a scale: 32, 64 or 128; None: as docs/quantization.md says.
        head: ``int8`` or ``int4`` for the head; ``quantize`` where None.
        calibration: A text or JSONL file of prompts that the matrices are rounded for; None: each value to the nearest.
        max_length: Bound on prompt + completion of a row; the checkpoint's own where None.
        check: Run the quick parity suite in a child process of its own.
        force: Replace an existing bundle.
        on_progress: Called with a few words at the start of each part.
        on_warning: Called, when all went well, with each thing that is odd about the checkpoint but not refused.

    Raises:
        InputError: The checkpoint is damaged or not supported, or the calibration cannot be used.
        UsageError: ``block``, ``head`` or ``calibration`` without ``quantize``; ``block`` or ``head`` with ``int8-dynamic``.
        ParityError: The check is red; nothing is left at ``bundle_path``.
    """
    if not isinstance(decoder_or_path, (str, Path)):
        with tempfile.TemporaryDirectory(prefix="tformer-deploy-") as folder:
            path = Path(folder) / "decoder"
            decoder_or_path.save_pretrained(path)
            return export(
                path, bundle_path, dtype=dtype, quantize=quantize, block=block, head=head, calibration=calibration,
                max_length=max_length, check=check, force=force, on_progress=on_progress, on_warning=on_warning,
            )  # fmt: skip
    checkpoint = load("tformer_deploy.checkpoints", "export").open_checkpoint(decoder_or_path, max_length)
    tokenizer = load_tokenizer(checkpoint)  # refuses one that no run could load
    exporter = load("tformer_deploy.exporters.onnx", "export")  # after it: a bad checkpoint is refused before torch is loaded
    text = None if calibration is None else Path(calibration)
    quantization, rows = _quantization(checkpoint.config, tokenizer, quantize, block, head, text)
    stored = sorted({spec.dtype for spec in checkpoint.tensors.values()} - {dtype})
    if stored and on_progress is not None:
        rest = "every weight" if quantization is None else "what is not quantised"
        on_progress(f"the checkpoint stores {' and '.join(stored)}; the bundle holds {rest} in {dtype}")
    hint = None if quantization is None else _cure(quantization)
    verify = (lambda folder: check_in_child(folder, Path(decoder_or_path), hint)) if check else None
    written: Path = exporter.export_bundle(
        checkpoint, bundle_path, dtype=dtype, quantization=quantization, calibration=rows, max_length=max_length, force=force,
        verify=verify, on_progress=on_progress,
    )  # fmt: skip
    if on_warning is not None:
        for warning in checkpoint.warnings:
            on_warning(warning)
        if tokenizer is None and not any("tokenizer" in warning for warning in checkpoint.warnings):
            on_warning("The checkpoint has no tokenizer.json: the bundle takes token ids only.")
    return written


def _quantization(
    config: ModelConfig, tokenizer: Tokenizer | None, kind: Kind | None, block: int | None, head: Whole | None,
    calibration: Path | None,
) -> tuple[Quantization | None, Rows | None]:  # fmt: skip
    """What is quantised and how, and the rows that it is rounded for."""
    if kind is None:
        given = {"--block": block, "--head": head, "--calibration": calibration}
        if names := [name for name, value in given.items() if value is not None]:
            raise UsageError(f"{names[0]} says how to quantise, and nothing is quantised.", "Give --quantize int8 or int4 too.")
        return None, None
    if kind == DYNAMIC and (names := [n for n, value in (("--block", block), ("--head", head)) if value is not None]):
        raise UsageError(
            f"{names[0]} does not go with --quantize {DYNAMIC}: every matrix, the head too, has one scale an output.",
            f"Leave {names[0]} out, or give --quantize int8 or int4.",
        )
    rows, record = None, None
    if calibration is not None:
        module = load("tformer_deploy.quantization.calibration", "export")
        rows = module.calibration_rows(calibration, None if tokenizer is None else tokenizer.encode, config, config.max_length)
        record = Calibration(calibration.name, len(rows), sum(map(len, rows)))
    if kind == DYNAMIC:
        return Quantization(kind, kind, None, record), rows
    return Quantization(kind, head or kind, block or default_block(calibration is not None), record), rows


def check(
    bundle_path: str | Path,
    checkpoint_path: str | Path | None,
    suite: str = "quick",
    *,
    text: str | Path | None = None,
    bisect: bool = False,
    profile: ProfileName = "portable",
    backend: str = "onnxruntime",
    provider: ProviderName = "cpu",
    engine: str | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compares a bundle with the checkpoint that it came from; ``report.passed`` says whether it holds.

    Args:
        bundle_path: The bundle.
        checkpoint_path: Where it came from; without it nothing is proven.
        suite: ``quick`` or ``full``.
        text: A UTF-8 file, on the beginning of which perplexity is compared too.
        bisect: Look for the first layer in which a graph and the reference part.
        profile: ``portable``, ``cpu`` or ``auto``; see ``backends.open_backend``.
        backend: ``onnxruntime`` or ``tensorrt``; only what was executed is compared.
        provider: Where ONNX Runtime runs.
        engine: Name of the engine (tensorrt).
        on_progress: Called with a few words at the start of each part.

    Raises:
        CapabilityError: What was asked for is not here.
        InputError: The bundle, the checkpoint or the text cannot be read, or the bundle has no tokenizer for the text.
    """
    check_bundle = load("tformer_deploy.parity.check", "export").check_bundle
    ids = None if text is None else (str(text), _ids_of_text(bundle_path, Path(text)))
    report: Report = check_bundle(
        bundle_path, checkpoint_path, suite=suite, on_progress=on_progress, text=ids, find_layer=bisect, profile=profile,
        backend=backend, provider=provider, engine=engine,
    )  # fmt: skip
    return report


def _ids_of_text(bundle_path: str | Path, text: Path) -> list[int]:
    content = read_beginning(text)
    tokenizer = load_tokenizer(open_bundle(bundle_path))
    if tokenizer is None:
        raise InputError(
            f"{bundle_path} has no tokenizer.json, so that {text} cannot become ids.",
            "Leave --text out, or export a checkpoint that has a tokenizer.",
        )
    return tokenizer.encode(content)


def build_engine(
    bundle_path: str | Path, *, range_scan: str | Path | None = None, fp8: str | Path | None = None, **options: Any
) -> Any:
    """Compiles a bundle to a TensorRT engine; the other options are those of ``exporters.tensorrt.build``.

    Args:
        bundle_path: The bundle.
        range_scan: A text or JSONL file of real prompts, as for ``export``'s calibration: values inside the model that would
            overflow in fp16 on them are named.
        fp8: A file of the same kind: the blocks' matrices are multiplied in FP8, with scales measured on its prompts.
        options: Of ``exporters.tensorrt.build``.

    Raises:
        InputError: The prompts cannot be read, or what ``build`` raises.
    """
    build = load("tformer_deploy.exporters.tensorrt", "tensorrt-rtx").build
    files = {"range_rows": ("--range-scan", range_scan), "fp8_rows": ("--fp8", fp8)}
    rows = {name: _rows_of(bundle_path, Path(file), option) for name, (option, file) in files.items() if file is not None}
    return build(bundle_path, **rows, **options)


def _rows_of(bundle_path: str | Path, prompts: Path, option: str) -> Rows:
    bundle = open_bundle(bundle_path)
    tokenizer, calibration = load_tokenizer(bundle), load("tformer_deploy.quantization.calibration", "export")
    encode = None if tokenizer is None else tokenizer.encode
    rows: Rows = calibration.calibration_rows(
        prompts, encode, bundle.manifest.config, bundle.manifest.max_length, f"{option} file"
    )
    return rows


def _cure(quantization: Quantization) -> str:
    """What makes a quantised bundle more exact."""
    small = BLOCKS[0]
    # With a calibration larger blocks are the default: to the small ones that are there already it must not lead away.
    keep = f" and --block {small}" if quantization.block == small else ""
    ways = [] if quantization.calibration else [f"--calibration with a text that the model is meant for{keep}"]
    ways += [f"--block {small}"] if quantization.block is not None and quantization.block > small else []
    ways += ["--head int8"] if quantization.head == "int4" else []
    ways += ["--quantize int8"] if quantization.kind != "int8" else []
    first = f"Try {', '.join(ways)}; or leave" if ways else "Leave"
    return f"{first} --quantize out; or keep it as it is: export with --no-check and run `tformer-deploy check` to look at it."


def check_in_child(bundle: Path, checkpoint: Path, hint: str | None = None) -> None:
    """Runs the quick check in a process of its own, so that its memory is given back and its libraries start fresh.

    Args:
        bundle: The new bundle.
        checkpoint: What it came from.
        hint: What to do where the graphs are right and quantisation costs too much.

    Raises:
        ParityError: It is red.
        TformerError: It could not run.
    """
    command = [sys.executable, "-m", "tformer_deploy.cli", "check", str(bundle), "--checkpoint", str(checkpoint), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode == 1 and done.stdout:
        raise _red(json.loads(done.stdout), hint)
    if done.returncode:
        kinds: dict[int, type[TformerError]] = {e.exit_code: e for e in (CapabilityError, StorageError, ResourceError)}
        end = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {-done.returncode}"
        error = ResourceError if done.returncode == -signal.SIGKILL else kinds.get(done.returncode, InputError)
        raise error(f"The check of the new bundle ended with {end}; no bundle is kept.\n{done.stderr.rstrip()}")


def _red(report: dict[str, Any], hint: str | None) -> ParityError:
    """What a red report of a new bundle says: the red checks alone."""
    red = [c for c in report["checks"] if c["verdict"] == "red"]
    lines = [
        f"  {c['group']}: {c['metric']} is {_figure(c['value'])}; the line is {c['relation']} {_figure(c['gate'])}" for c in red
    ]
    lines = [f"{line} ({c['detail']})" if c["detail"] else line for line, c in zip(lines, red, strict=True)]
    count = f"{len(red)} of {len(report['checks'])} checks are red; no bundle is kept."
    if red and all(c["group"].startswith(ACCURACY) for c in red):
        first = "The graphs are right, but what quantisation costs is beyond the line"
    else:
        first, hint = "The exported graphs differ from PyTorch", None
    look = "Export again with --no-check and run `tformer-deploy check` to look at it."
    return ParityError("\n".join([f"{first}: {count}", *lines]), hint or look)


def _figure(value: float | None) -> str:
    return "not finite" if value is None else figure(value)


def load(module: str, extra: str) -> Any:
    """A module of the package that needs more than running a bundle does.

    Raises:
        CapabilityError: One of its packages is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("tformer_deploy"):
            raise
        raise CapabilityError(
            f"The Python package {e.name} is not installed.", f"pip install 'tformer-deploy[{extra}]'"
        ) from None
