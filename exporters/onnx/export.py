"""Checkpoint → bundle."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tformer_deploy.bundle.manifest import MANIFEST, WEIGHTS, FileRecord, Manifest, Source, TensorRecord
from tformer_deploy.bundle.manifest_io import dump_manifest, parse_manifest
from tformer_deploy.bundle.quantization import CALIBRATION
from tformer_deploy.bundle.signature import PHASES
from tformer_deploy.bundle.verify import hash_file
from tformer_deploy.bundle.writer import new_folder, refuse_existing, write_file
from tformer_deploy.errors import InputError, StorageError, UsageError
from tformer_deploy.exporters.onnx.graph import build_graph, save_graph
from tformer_deploy.exporters.onnx.lint import require_clean
from tformer_deploy.exporters.onnx.weights import bundle_tensors, weights_size, write_weights
from tformer_deploy.quantization import dump_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tformer_deploy.bundle.quantization import Quantization
    from tformer_deploy.config import DType, ModelConfig
    from tformer_deploy.exporters.onnx.source import ExportSource
    from tformer_deploy.quantization import StoredTensor
    from tformer_deploy.quantization.calibration import Rows

_VERSIONED = ("tformer-deploy", "torch", "onnx", "onnx-ir", "onnxscript")


def export_bundle(
    checkpoint: ExportSource,
    path: str | Path,
    *,
    dtype: DType = "fp32",
    quantization: Quantization | None = None,
    calibration: Rows | None = None,
    stored: Iterator[StoredTensor] | None = None,
    max_length: int | None = None,
    force: bool = False,
    inside_source: bool = False,
    verify: Callable[[Path], None] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Path:
    """Writes a bundle; nothing appears at ``path`` before it is complete.

    Args:
        checkpoint: What ``checkpoints.open_checkpoint`` returns, or anything like it.
        path: The bundle's folder.
        dtype: dtype of weights and caches.
        quantization: How matrices are stored; None: in ``dtype``.
        calibration: Ids that the matrices are rounded for, where ``quantization`` says that there are any.
        stored: The tensors as they are to be stored, in the order of the file, where they have been rounded before.
        max_length: Bound on prompt + completion, at most the checkpoint's; its own where None.
        force: Replace an existing bundle.
        inside_source: Allow ``path`` inside the source's folder (a bundle derived from a bundle).
        verify: Called with the finished folder before it gets its name; raising leaves nothing.
        on_progress: Called with a few words at the start of each part.

    Raises:
        InputError: The checkpoint is bad, or a value does not fit ``dtype``.
        UsageError: ``path`` exists and ``force`` is False, ``max_length`` is above the checkpoint's, or what is quantised is
            not fp32.
    """
    path = Path(path)
    say = on_progress or (lambda _: None)
    refuse_existing(path, force)
    if quantization is not None and dtype != "fp32" and stored is None:
        raise UsageError(
            f"--quantize goes with --dtype fp32, not {dtype}: activations and caches of a quantised bundle are fp32.",
            "Leave --dtype out.",
        )
    if not inside_source:
        _refuse_overlap(path, Path(checkpoint.path))
    config = _bounded(checkpoint.config, max_length)
    with new_folder(path, force) as folder:
        _require_space(folder, weights_size(checkpoint.config, dtype, quantization))
        say("weights")
        made = bundle_tensors(checkpoint, dtype, quantization, calibration, say)
        tensors, weights = write_weights(folder / WEIGHTS, made if stored is None else stored)
        build_id = _build_id(config, dtype, weights)
        for phase in PHASES:
            say(f"{phase} graph")
            graph = build_graph(checkpoint.config, dtype, phase, tensors, build_id, quantization)
            require_clean(graph, checkpoint.config, dtype, phase)
            save_graph(graph, str(folder / f"{phase}.onnx"))
        files = {WEIGHTS: weights} | {f"{phase}.onnx": hash_file(folder / f"{phase}.onnx") for phase in PHASES}
        assets = checkpoint.assets() | ({} if calibration is None else {CALIBRATION: dump_rows(calibration)})
        for name, data in assets.items():
            write_file(folder / name, data)
            files[name] = FileRecord(hashlib.sha256(data).hexdigest(), len(data))
        manifest = dump_manifest(_manifest(checkpoint, config, dtype, files, tensors, quantization))
        parse_manifest(manifest)  # refuses, for instance, an end-of-text id outside the vocabulary
        write_file(folder / MANIFEST, manifest)
        if verify is not None:
            say("check")
            verify(folder)
    return path


def _manifest(
    checkpoint: ExportSource, config: ModelConfig, dtype: DType, files: dict[str, FileRecord], tensors: dict[str, TensorRecord],
    quantization: Quantization | None,
) -> Manifest:  # fmt: skip
    return Manifest(
        config=checkpoint.config,
        dtype=dtype,
        max_length=config.max_length,
        eos_token_ids=checkpoint.eos_token_ids,
        bos_token_id=checkpoint.bos_token_id,
        source=Source(checkpoint.name, checkpoint.format, checkpoint.family, checkpoint.sha256()),
        versions={name: version(name) for name in _VERSIONED},
        files=files,
        tensors=tensors,
        quantization=quantization,
    )


def _bounded(config: ModelConfig, max_length: int | None) -> ModelConfig:
    """The config with the row bound that the bundle promises; the weights keep the checkpoint's own shapes."""
    if max_length is None:
        return config
    if not 1 <= max_length <= config.max_length:
        raise UsageError(
            f"--max-length is {max_length}; this checkpoint holds 1 to {config.max_length} positions.",
            "Choose a number in that range.",
        )
    return replace(config, max_length=max_length)


def _build_id(config: ModelConfig, dtype: DType, weights: FileRecord) -> str:
    text = json.dumps([asdict(config), dtype, weights.sha256], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"{folder.parent} has {free / 2**20:.1f} MiB free; the weights need {needed / 2**20:.1f} MiB.",
            "Free some space, or name an output path on another disk.",
        )


def _refuse_overlap(path: Path, source: Path) -> None:
    output, given = Path(os.path.realpath(path)), Path(os.path.realpath(source))
    if output == given or given in output.parents or output in given.parents:
        raise UsageError(
            f"The output {path} and the checkpoint {source} lie inside one another.", "Name an output path elsewhere."
        )
    if not source.exists():
        raise InputError(f"The checkpoint {source} is not there.")
