"""Bytes that a decode step must read and operations that a prefill must do: what a limit divides."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tformer_deploy.parameters import parameter_shapes

if TYPE_CHECKING:
    from tformer_deploy.bundle.manifest import Manifest
    from tformer_deploy.config import DType, ModelConfig

_BYTES: dict[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2}


def weight_bytes(manifest: Manifest, dtype: DType) -> int:
    """Bytes of the weights that each decode step reads once.

    Tables of which a step reads only a row a token are left out: positions, and the embedding unless it is the head too.

    Args:
        manifest: Of the bundle.
        dtype: What the backend computes in; a bf16 bundle that runs in fp32 is read as fp32.
    """
    tables = ["positions."]
    if any(name.startswith("head.weight") for name in manifest.tensors):
        tables.append("embedding.")
    total = 0
    for name, record in manifest.tensors.items():
        if not name.startswith(tuple(tables)):
            widened = _BYTES[dtype] // _BYTES[record.dtype] if record.dtype == manifest.dtype else 1
            total += record.size * max(1, widened)
    return total


def cache_bytes(config: ModelConfig, dtype: DType, batch: int, length: float) -> float:
    """Bytes of keys and values that a decode step reads over ``length`` tokens in each of ``batch`` rows."""
    seen = 0.0
    for layer in range(config.n_layers):
        window = config.window if layer in config.window_layers else None
        seen += length if window is None else min(length, window)
    return 2 * batch * seen * config.n_kv_heads * config.head_dim * _BYTES[dtype]


def prefill_flops(config: ModelConfig, batch: int, length: int) -> int:
    """Floating-point operations of a prefill that returns the logits of each row's last token.

    Two for each weight of a matrix and token, the head once a row, and attention over the tokens that causality and windows
    leave: two products of H * D for each pair.
    """
    shapes = parameter_shapes(config)
    tables = ("embedding.", "positions.", "head.")
    weights = sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and not name.startswith(tables))
    attention = sum(_pairs(length, config.window if i in config.window_layers else None) for i in range(config.n_layers))
    row = 2 * weights * length + 2 * config.vocab_size * config.d_model
    return batch * (row + 4 * config.n_heads * config.head_dim * attention)


def _pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window
