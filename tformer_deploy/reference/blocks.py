"""The textbook form: multi-head attention with a mask and materialised scores, and the pre-norm block around it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tformer_deploy.errors import InputError


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of one block.

    Attributes:
        d_model: Width.
        n_heads: Heads, each ``d_model // n_heads`` wide.
        d_ff: Inner width of the feed-forward.
        dropout: Probability in training; nothing at inference.

    Raises:
        InputError: (a ValueError) A size is below one, the heads do not divide the width, or dropout is not in [0, 1).
    """

    d_model: int = 512
    n_heads: int = 8
    d_ff: int = 2048
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("d_model", "n_heads", "d_ff"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; expected at least 1.")
        check_heads(self.d_model, self.n_heads)
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout is {self.dropout}; expected 0 ≤ dropout < 1.")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.n_heads


def check_heads(d_model: int, n_heads: int) -> None:
    """Raises InputError unless ``n_heads`` heads share the width ``d_model`` evenly."""
    if n_heads < 1 or d_model < 1 or d_model % n_heads:
        raise InputError(f"d_model is {d_model} and n_heads {n_heads}; the second must divide the first.")


def causal_mask(seq_len: int, device: torch.device | str | None = None) -> Tensor:
    """[seq_len, seq_len] bool, True on and below the diagonal: row i may see columns j ≤ i."""
    return torch.ones(seq_len, seq_len, dtype=torch.bool, device=device).tril()


def split_heads(x: Tensor, n_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each [B, H, S, D], of the fused projection ``x`` [B, S, 3·H·D]: all queries, all keys, all values."""
    batch, length, width = x.shape
    query, key, value = x.reshape(batch, length, 3, n_heads, width // (3 * n_heads)).permute(2, 0, 3, 1, 4)
    return query, key, value


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, S, D] → [B, S, H·D], the inverse of the split."""
    return x.transpose(1, 2).flatten(2)


class MultiHeadAttention(nn.Module):
    """Attention that materialises its scores, [B, H, S, S]: the form to read and to compare with.

    Parameters are those of every other form here (``FastAttention``, ``CachedAttention``), so that a ``state_dict`` of one
    loads into another: ``qkv.weight`` [3·d_model, d_model] (rows: all query heads, all key heads, all value heads),
    ``out.weight`` [d_model, d_model], ``out.bias`` [d_model].
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        self.out = nn.Linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attends within each row of ``x`` [B, S, d_model].

        Args:
            x: [B, S, d_model].
            mask: Bool or number, anything that broadcasts to [B, H, S, S]; 0 = blocked. None: everything is seen.
                A query that may see nothing has no answer: its row of the result is NaN.

        Returns:
            [B, S, d_model].
        """
        query, key, value = split_heads(self.qkv(x), self.config.n_heads)
        scores = query @ key.transpose(-2, -1) / math.sqrt(self.config.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights: Tensor = self.dropout(scores.softmax(dim=-1))
        y: Tensor = self.out(merge_heads(weights @ value))
        return y


class TransformerBlock(nn.Module):
    """Pre-norm residual block: ``x + attention(norm1(x))``, then ``x + feed_forward(norm2(x))``."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.attention = MultiHeadAttention(config)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.d_model, config.d_ff), nn.GELU(), nn.Linear(config.d_ff, config.d_model)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[B, S, d_model] → [B, S, d_model]; ``mask`` as in :class:`MultiHeadAttention`."""
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        y: Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return y
