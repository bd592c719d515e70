"""Positions: rotary frequencies, ALiBi slopes, and what a query may see."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from tformer_deploy.config import ModelConfig, RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each rotary pair, [dim/2] float32, in the arithmetic of the original models (float32).

    Source: RoFormer (Su et al. 2021), section 3.2.2; llama3 scaling as Llama 3.1's published code; YaRN (Peng et al. 2023),
    section 3.2; LongRoPE (Ding et al. 2024).
    """
    dim = rope.rotated(head_dim)
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32, device="cpu") * powers)
    frequencies = 1.0 / powers
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        kept = 1 - _yarn_ramp(rope, dim)
        return 1.0 / (rope.factor * powers) * (1 - kept) + frequencies * kept
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths divided by the factor, short ones kept, a blend between."""
    wavelengths = 2 * math.pi / frequencies
    low = rope.original_max_length / rope.low_freq_factor
    high = rope.original_max_length / rope.high_freq_factor
    smooth = (rope.original_max_length / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > low, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths <= low) & (wavelengths >= high), blended, scaled)


def _yarn_ramp(rope: RopeConfig, dim: int) -> Tensor:
    """0 where a pair turns often within the original length, 1 where it hardly turns, [dim/2]."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(rope.original_max_length / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)


def alibi_slopes(config: ModelConfig) -> Tensor:
    """How fast each head forgets, [H] float32: powers of 2^(-8/H), and every second one of 2H for heads past a power of two.

    They are rounded to bfloat16 where the model was trained so.

    Source: Press et al. 2021, "Train Short, Test Long", and its published code.
    """
    n_heads = config.n_heads
    nearest = 2 ** math.floor(math.log2(n_heads))
    base = torch.tensor(2 ** (-(2 ** -(math.log2(nearest) - 3))), dtype=torch.float32, device="cpu")
    slopes = torch.pow(base, torch.arange(1, 1 + nearest, dtype=torch.int32, device="cpu"))
    if nearest < n_heads:
        base = torch.tensor(2 ** (-(2 ** -(math.log2(2 * nearest) - 3))), dtype=torch.float32, device="cpu")
        odd = torch.arange(1, 1 + 2 * (n_heads - nearest), 2, dtype=torch.int32, device="cpu")
        slopes = torch.cat((slopes, torch.pow(base, odd)))
    return slopes.bfloat16().float() if config.alibi_bf16 else slopes


def constant_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """What follows from the config alone, under its names in a bundle; float32 in every dtype."""
    ropes = {"rope.frequencies": config.rope, "window_rope.frequencies": config.window_rope}
    tensors = {name: rope_frequencies(rope, config.head_dim) for name, rope in ropes.items() if rope is not None}
    return tensors | ({"alibi.slopes": alibi_slopes(config)} if config.positions == "alibi" else {})


class _Float32Buffer(nn.Module):
    """Holds values that follow from the config alone as a float32 buffer that ``.to(dtype)`` does not round."""

    def __init__(self, name: str, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.buffer, self.make = name, make
        self.register_buffer(name, make(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        setattr(self, self.buffer, self.make().to(getattr(self, self.buffer).device))
        return self


class Rope(_Float32Buffer):
    """Rotary positions."""

    frequencies: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__("frequencies", lambda: rope_frequencies(rope, head_dim))
        self.factor = rope.attention_factor

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The cosines and sines [B, S, dim/2] of ``positions`` [B, S]; angles in float32, then cast."""
        angles = positions[..., None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.factor != 1:
            cos, sin = cos * self.factor, sin * self.factor
        return cos.to(dtype), sin.to(dtype)


class Alibi(_Float32Buffer):
    """A bias on scores that grows with the distance of the key, at another pace in each head."""

    slopes: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__("slopes", lambda: alibi_slopes(config))
        self.rounded, self.scale = config.alibi_bf16, config.alibi_scale

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The bias [B, H, S, C] float32 of positions ``keys`` [C], seen from ``queries`` [B, S]; 0 at the query's own."""
        return (self._at(keys[None, None, None]) - self._at(queries[:, None, :, None])) * self.scale

    def _at(self, positions: Tensor) -> Tensor:
        slopes, positions = self.slopes[:, None, None], positions.float()
        if not self.rounded:
            return slopes * positions
        # bfloat16 times bfloat16 is exact in float32; its rounding is that of a product in bfloat16.
        return (slopes * positions.bfloat16().float()).bfloat16().float()


@dataclass(frozen=True)
class View:
    """What the layers of one kind see in one pass.

    Attributes:
        cos, sin: [B, S, dim/2] in the model's dtype, or None without rotary positions.
        mask: True = seen, [B or 1, 1, S, C] bool; or what is added to scores, [B or 1, H, S, C] in the model's dtype, -inf =
            not seen; None where attention is square and causal.
    """

    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor | None


def seen(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """[B, 1, S, C] bool: keys at positions ``keys`` [C] not after the query of ``queries`` [B, S], and within its window."""
    queries, keys = queries[:, None, :, None], keys[None, None, None]
    causal = keys <= queries
    return causal if window is None else causal & (keys > queries - window)
