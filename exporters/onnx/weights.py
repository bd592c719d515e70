"""Streams a checkpoint's tensors into ``weights.bin``, one at a time, hashing on the way."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tformer_deploy.bundle.manifest import FileRecord, TensorRecord
from tformer_deploy.bundle.tensor_table import ALIGNMENT, expected_tensors
from tformer_deploy.errors import InputError
from tformer_deploy.reference.positions import constant_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tformer_deploy.config import DType, ModelConfig
    from tformer_deploy.exporters.onnx.source import ExportSource

_TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def weights_size(config: ModelConfig, dtype: DType) -> int:
    """Bytes that ``weights.bin`` will have, at most one page more."""
    width = 4 if dtype == "fp32" else 2
    return sum(-(-math.prod(shape) * width // ALIGNMENT) * ALIGNMENT for shape in expected_tensors(config).values())


def bundle_tensors(source: ExportSource, dtype: DType) -> Iterator[tuple[str, str, Tensor]]:
    """Every tensor as the bundle holds it: (name, dtype name, tensor), in the order of the file.

    Raises:
        InputError: A value is not finite in ``dtype``.
    """
    for name in source.tensors:
        tensor = source.read(name, _TORCH[dtype])
        _refuse_infinite(name, tensor, dtype)
        yield name, dtype, tensor
        del tensor  # before the next one is read
    for name, tensor in constant_tensors(source.config).items():
        yield name, "fp32", tensor


def _refuse_infinite(name: str, tensor: Tensor, dtype: DType) -> None:
    low, high = (float(x) for x in torch.aminmax(tensor))  # makes nothing as large as the tensor; NaN comes through
    if not (math.isfinite(low) and math.isfinite(high)):
        raise InputError(
            f"Tensor {name} is not finite in {dtype}: its values go from {low} to {high}"
            + ("; fp16 ends at ±65504." if dtype == "fp16" else "."),
            "Export with --dtype bf16 or --dtype fp32." if dtype == "fp16" else "Use an undamaged checkpoint.",
        )


def write_weights(
    path: Path, tensors: Iterator[tuple[str, str, Tensor]], on_tensor: Callable[[str], None] | None = None
) -> tuple[dict[str, TensorRecord], FileRecord]:
    """Writes ``weights.bin``.

    Returns:
        Where each tensor lies, and the file's hash and size.
    """
    records: dict[str, TensorRecord] = {}
    digest, position = hashlib.sha256(), 0
    with path.open("wb") as file:

        def put(data: bytes | memoryview) -> None:
            nonlocal position
            file.write(data)
            digest.update(data)
            position += len(data)

        for name, dtype, tensor in tensors:
            put(b"\0" * (-position % ALIGNMENT))
            data = tensor.view(-1).view(torch.uint8).numpy().data
            records[name] = TensorRecord(position, len(data), tuple(tensor.shape), dtype)
            put(data)
            if on_tensor is not None:
                on_tensor(name)
            del data, tensor
    return records, FileRecord(digest.hexdigest(), position)
