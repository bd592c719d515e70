"""A matrix on few levels: whole numbers and, for each block of inputs of each output, one scale.

Everything here is elementwise, and sums are trees of elementwise sums: the same matrix gives the same bits on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from tformer_deploy.bundle.quantization import Whole

# Whole numbers from -2^(bits-1) to 2^(bits-1) - 1; 0 is 0, and a scale is above 0: what every runtime takes.
LEVELS: dict[Whole, tuple[int, int]] = {"int8": (-128, 127), "int4": (-8, 7)}
# Scales that are tried for a block, as shares of the one that just holds its largest value. Clipping one value may cost less
# than a coarse grid for all others; 7/8 puts a negative extreme on -8. With 255 levels clipping never pays.
_SHARES: dict[Whole, tuple[float, ...]] = {
    "int8": (1.0,),
    "int4": (1.0, 0.975, 0.95, 0.925, 0.9, 0.875, 0.85, 0.825, 0.8, 0.775, 0.75, 0.725, 0.7, 0.675, 0.65, 0.625, 0.6, 0.55, 0.5),
}
# For values too small for a scale of their own; a bf16 number.
_SMALLEST = 2.0**-100
# Elements of one step: what it makes on its way stays near the cores over all scales that are tried.
_STEP = 1 << 19


@dataclass(frozen=True)
class Quantized:
    """A matrix [K, N], padded with zeros to whole blocks.

    Attributes:
        values: [Kp, N] int8, whatever the kind.
        scales: [Kp / block, N] float32, above 0.
    """

    values: Tensor
    scales: Tensor

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        return self.values.shape[0] // self.scales.shape[0]

    def dequantized(self) -> Tensor:
        """[Kp, N] float32, as DequantizeLinear makes it: one product, rounded once."""
        blocks = self.values.view(len(self.scales), self.block, -1).float() * self.scales[:, None]
        return blocks.view(self.values.shape)


def pad_inputs(weight: Tensor, block: int) -> Tensor:
    """[K, N] with rows of zeros up to whole blocks; itself where it has whole ones."""
    missing = -len(weight) % block
    return F.pad(weight, (0, 0, 0, missing)) if missing else weight


def quantize(weight: Tensor, kind: Whole, block: int, importance: Tensor | None = None, search: bool = True) -> Quantized:
    """Rounds to nearest under the scales of :func:`find_scales`.

    Args:
        weight: [K, N] float32.
        kind: ``int8`` or ``int4``.
        block: Inputs that share a scale: a power of two, for int8 any number.
        importance: As :func:`find_scales`.
        search: As :func:`find_scales`.
    """
    weight = pad_inputs(weight.float(), block)
    scales = find_scales(weight, kind, block, importance, search)
    low, high = LEVELS[kind]
    values = torch.empty(weight.shape, dtype=torch.int8)
    for first, last in _columns(weight):
        blocks = weight[:, first:last].reshape(len(scales), block, -1)
        rounded = (blocks / scales[:, None, first:last]).round_().clamp_(low, high)
        values[:, first:last] = rounded.view(len(weight), -1).to(torch.int8)
    return Quantized(values, scales)


def find_scales(weight: Tensor, kind: Whole, block: int, importance: Tensor | None = None, search: bool = True) -> Tensor:
    """The scale of each block with the least error, [K / block, N] float32 that holds bf16 numbers.

    An engine dequantises in its own dtype. Eight bits are the same number in fp32, in bf16 and, from 2^-17 on, in fp16, so that
    every engine has the scales that the values were rounded under. They make a step at most 0.8 % longer: little beside the half
    step that a value may be off. Scales are shortened before their errors are measured and the values rounded.

    Args:
        weight: [K, N] float32, K in whole blocks.
        kind: ``int8`` or ``int4``.
        block: Inputs that share a scale: a power of two, for int8 any number.
        importance: How much an error at each input counts, [K] (the mean square of what arrives there); all alike where None.
        search: False takes the scale that just holds a block's largest value, all its bits: the plainest way, to compare with.
    """
    n_blocks = len(weight) // block
    scales = torch.empty((n_blocks, weight.shape[1]), dtype=torch.float32)
    counts = None
    if importance is not None:
        counts = F.pad(importance.float(), (0, len(weight) - len(importance))).view(n_blocks, block, 1)
    for first, last in _columns(weight):
        blocks = weight[:, first:last].reshape(n_blocks, block, -1).float()
        scales[:, first:last] = _best_scales(blocks, kind, counts) if search else _holding(blocks, kind)
    return scales


def _holding(blocks: Tensor, kind: Whole) -> Tensor:
    """The scale that just holds the largest value of each block, [n, block, N] → [n, N]."""
    largest = blocks.abs().amax(1)
    return torch.where(largest > 0, (largest / LEVELS[kind][1]).clamp_min(_SMALLEST), 1.0)


def _short(scales: Tensor) -> Tensor:
    """The nearest bf16 numbers, in float32. Of 127 levels the largest value then lies at 127.5 at most below: it is not clipped."""
    return scales.bfloat16().float()


def _best_scales(blocks: Tensor, kind: Whole, counts: Tensor | None) -> Tensor:
    low, high = LEVELS[kind]
    whole, shares = _holding(blocks, kind), _SHARES[kind]
    best = _short(whole)
    if len(shares) == 1:
        return best
    least = torch.full_like(whole, torch.inf)
    for share in shares:
        scale = _short(whole * share)
        error = (blocks / scale[:, None]).round_().clamp_(low, high).mul_(scale[:, None]).sub_(blocks).square_()
        total = _sum_of_inputs(error if counts is None else error.mul_(counts))
        better = total < least
        best, least = torch.where(better, scale, best), torch.where(better, total, least)
    return best.clamp_min_(_SMALLEST)


def _sum_of_inputs(blocks: Tensor) -> Tensor:
    """[n, block, N] → [n, N], halves upon halves: elementwise, and so the same everywhere."""
    while blocks.shape[1] > 1:
        half = blocks.shape[1] // 2
        blocks = blocks[:, :half] + blocks[:, half:]
    return blocks[:, 0]


def _columns(weight: Tensor) -> list[tuple[int, int]]:
    """Runs of outputs that one step handles."""
    step = max(1, _STEP // len(weight))
    return [(first, min(first + step, weight.shape[1])) for first in range(0, weight.shape[1], step)]


def pack_int4(values: Tensor) -> Tensor:
    """Whole numbers from -8 to 7, row-major, two a byte, the first one in the low half; uint8 [ceil(n / 2)]."""
    flat = values.reshape(-1)
    if len(flat) % 2:
        flat = F.pad(flat, (0, 1))
    low, high = flat[0::2], flat[1::2]
    return (low.bitwise_and(15).view(torch.uint8) | (high.view(torch.uint8) << 4)).contiguous()
