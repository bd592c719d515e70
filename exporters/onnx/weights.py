"""Streams a checkpoint's tensors into ``weights.bin``, one at a time, hashing on the way."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tformer_deploy.bundle.manifest import FileRecord, TensorRecord
from tformer_deploy.bundle.quantization import Quantization, stored_size, stored_tensors
from tformer_deploy.bundle.tensor_table import ALIGNMENT
from tformer_deploy.errors import InputError
from tformer_deploy.quantization import quantized_tensors
from tformer_deploy.quantization.rounding import pack_int4
from tformer_deploy.reference.positions import constant_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tformer_deploy.config import DType, ModelConfig
    from tformer_deploy.exporters.onnx.source import ExportSource
    from tformer_deploy.quantization.calibration import Rows

_TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def weights_size(config: ModelConfig, dtype: DType, quantization: Quantization | None = None) -> int:
    """Bytes that ``weights.bin`` will have, at most one page more."""
    tensors = stored_tensors(config, dtype, quantization).values()
    return sum(-(-stored_size(shape, kind) // ALIGNMENT) * ALIGNMENT for shape, kind in tensors)


def bundle_tensors(
    source: ExportSource,
    dtype: DType,
    quantization: Quantization | None = None,
    rows: Rows | None = None,
    on_part: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[str, str, Tensor]]:
    """Every tensor as the bundle holds it: (name, dtype name, tensor), in the order of the file; int4 one a byte.

    Args:
        source: The checkpoint.
        dtype: Of what is not quantised.
        quantization: How matrices are stored; None: in ``dtype``.
        rows: Ids that the matrices are rounded for.
        on_part: Called with a few words at the start of each part.

    Raises:
        InputError: A value is not finite in ``dtype``.
    """
    if quantization is None:
        for name in source.tensors:
            tensor = source.read(name, _TORCH[dtype])
            _refuse_infinite(name, tensor, dtype)
            yield name, dtype, tensor
            del tensor  # before the next one is read
    else:
        for stored in quantized_tensors(source, quantization, rows, on_part):
            if stored.dtype in _TORCH:
                _refuse_infinite(stored.name, stored.tensor, stored.dtype)
            yield stored
    for name, tensor in constant_tensors(source.config).items():
        yield name, "fp32", tensor


def _refuse_infinite(name: str, tensor: Tensor, dtype: str) -> None:
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
            stored = pack_int4(tensor) if dtype == "int4" else tensor.view(-1).view(torch.uint8)
            data = stored.numpy().data
            records[name] = TensorRecord(position, len(data), tuple(tensor.shape), dtype)
            put(data)
            if on_tensor is not None:
                on_tensor(name)
            del data, stored, tensor
    return records, FileRecord(digest.hexdigest(), position)
