"""A row of activations on 255 levels, as runtimes round it and as the graphs of int8-dynamic say it in operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

# Whole numbers go from -127 to 127.
LARGEST = 127
# Stands for the largest value of a row of zeros, and of anything smaller.
SMALLEST = 2.0**-100


def round_rows(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Each block of a row to the nearest of 255 levels, halves to the even one, under the scale that just holds its largest value.

    Args:
        x: [..., K] float32.
        block: Inputs that share a scale.

    Returns:
        Whole numbers [..., n, block] and scales [..., n, 1], both float32; the last block is padded with zeros.
    """
    padded = F.pad(x, (0, -x.shape[-1] % block))
    blocks = padded.reshape(*padded.shape[:-1], -1, block)
    largest = blocks.abs().amax(-1, keepdim=True).clamp_min(SMALLEST)
    # A number over a tensor would be its reciprocal times the number: two roundings where Div has one, and other levels at halves.
    inverse = torch.full_like(largest, LARGEST) / largest
    return (blocks * inverse).round(), largest / LARGEST
