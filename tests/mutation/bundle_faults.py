"""Faults in a bundle's weights and manifest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.manifest import MANIFEST
from tformer_deploy.bundle.manifest_io import dump_manifest


def edit_tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Path], None]:
    """One tensor of ``weights.bin`` becomes another of the same size."""

    def edit(path: Path) -> None:
        bundle = open_bundle(path)
        record, old = bundle.manifest.tensors[name], bundle.tensor(name)
        data = np.ascontiguousarray(change(old.copy()), dtype=old.dtype).tobytes()
        assert len(data) == record.size
        with bundle.weights_path.open("r+b") as file:
            file.seek(record.offset)
            file.write(data)

    return edit


def negate_one(tensor: np.ndarray) -> np.ndarray:
    tensor[3, 5] *= -1
    return tensor


def last_bit_of_one(tensor: np.ndarray) -> np.ndarray:
    tensor.view({2: np.uint16, 4: np.uint32}[tensor.itemsize])[7, 7] ^= 1
    return tensor


def not_a_number(tensor: np.ndarray) -> np.ndarray:
    tensor[0, 0] = np.nan
    return tensor


def two_layers_offsets_swapped(path: Path) -> None:
    """The manifest and both graphs agree on the wrong place."""
    names = ["blocks.0.attention.query.weight", "blocks.1.attention.query.weight"]
    manifest = open_bundle(path).manifest
    a, b = (manifest.tensors[n] for n in names)
    wrong = replace(manifest, tensors=manifest.tensors | {names[0]: b, names[1]: a})
    (path / MANIFEST).write_bytes(dump_manifest(wrong))
    for phase in ("prefill", "decode"):
        point_to(path / f"{phase}.onnx", {names[0]: b.offset, names[1]: a.offset})


def point_to(file: Path, offsets: dict[str, int]) -> None:
    """These weights of a graph lie elsewhere in ``weights.bin``."""
    model = onnx.load(file, load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.name in offsets:
            next(e for e in tensor.external_data if e.key == "offset").value = str(offsets[tensor.name])
    file.write_bytes(model.SerializeToString())


def manifest_with(**changes: object) -> Callable[[Path], None]:
    """The manifest's config says something else."""

    def edit(path: Path) -> None:
        manifest = open_bundle(path).manifest
        (path / MANIFEST).write_bytes(dump_manifest(replace(manifest, config=replace(manifest.config, **changes))))

    return edit
