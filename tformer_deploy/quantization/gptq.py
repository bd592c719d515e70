"""Rounding that lets the inputs not yet rounded make up for the error of those that are.

Source: Frantar et al. 2022, "GPTQ", with scales fixed beforehand so that inputs may be taken in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tformer_deploy.quantization.rounding import LEVELS, Quantized, find_scales, pad_inputs

if TYPE_CHECKING:
    from tformer_deploy.bundle.quantization import Whole

# Share of the mean square that is added to every input's own: what little the calibration says is not taken too far.
_DAMPING = 0.01
# Inputs whose errors are spread among themselves before all later inputs hear of them.
_PANEL = 128
# Outputs that are rounded together: what is held in float64 beside the matrix.
_OUTPUTS = 8192


def quantize_with(weight: Tensor, kind: Whole, block: int, moments: Tensor) -> Quantized:
    """Rounds a matrix so that its product with inputs like those of the calibration stays close.

    Args:
        weight: [K, N] float32.
        kind: ``int8`` or ``int4``.
        block: Inputs that share a scale: a power of two, for int8 any number.
        moments: Mean of x xᵀ over the calibration's inputs, [K, K] float64.
    """
    n_inputs = len(weight)
    weight = pad_inputs(weight.float(), block)
    scales = find_scales(weight, kind, block, moments.diagonal())
    order = torch.argsort(moments.diagonal(), descending=True, stable=True)
    spread = _spread(moments[order][:, order])
    steps = scales.repeat_interleave(block, 0)[:n_inputs][order]
    values = torch.zeros(weight.shape, dtype=torch.int8)
    back = torch.empty_like(order)
    back[order] = torch.arange(n_inputs)
    for first in range(0, weight.shape[1], _OUTPUTS):
        part = slice(first, first + _OUTPUTS)
        rounded = _round(weight[:n_inputs, part][order].double(), steps[:, part].double(), spread, LEVELS[kind])
        values[:n_inputs, part] = rounded[back]
    return Quantized(values, scales)


def _spread(moments: Tensor) -> Tensor:
    """Upper Cholesky factor of the inverse of the damped moments: row i says how input i's error goes to later ones."""
    mean = moments.diagonal().mean()
    damped = moments + torch.eye(len(moments), dtype=torch.float64) * (_DAMPING * mean + 1e-30)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper


def _round(weight: Tensor, steps: Tensor, spread: Tensor, levels: tuple[int, int]) -> Tensor:
    """Whole numbers [K, N] int8 of ``weight`` [K, N], which is used up; ``steps`` [K, N] are the scales."""
    values = torch.empty(weight.shape, dtype=torch.int8)
    for start in range(0, len(weight), _PANEL):
        stop = min(start + _PANEL, len(weight))
        errors = torch.empty_like(weight[start:stop])
        for i in range(start, stop):
            rounded = (weight[i] / steps[i]).round_().clamp_(*levels)
            values[i] = rounded.to(torch.int8)
            errors[i - start] = (weight[i] - rounded * steps[i]) / spread[i, i]
            if i + 1 < stop:
                weight[i + 1 : stop] -= spread[i, i + 1 : stop, None] * errors[i - start]
        if stop < len(weight):
            weight[stop:] -= spread[start:stop, stop:].T @ errors
    return values
