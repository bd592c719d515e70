"""The fast forms: attention that never holds an n × n matrix, and attention that keeps keys and values between calls.

Both have the parameters of :class:`~tformer_deploy.reference.blocks.MultiHeadAttention` (``qkv.weight``, ``out.weight``,
``out.bias``) and load its ``state_dict``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer_deploy.errors import InputError
from tformer_deploy.reference.blocks import check_heads, merge_heads, split_heads


class FastAttention(nn.Module):
    """Scaled-dot-product attention by PyTorch's fused kernel: memory grows linearly with the length.

    Source: Dao et al. 2022, "FlashAttention".
    """

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        check_heads(d_model, n_heads)
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:
        """[B, S, d_model] → [B, S, d_model]; position i sees j ≤ i, or everything when ``is_causal`` is False."""
        query, key, value = split_heads(self.qkv(x), self.n_heads)
        y: Tensor = self.out(merge_heads(F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)))
        return y


class CachedAttention(nn.Module):
    """Causal attention for generation: each call brings new tokens only, earlier keys and values are kept.

    The caches ``keys`` and ``values``, [max_batch, H, max_seq, D], are allocated once (zeros), belong to no ``state_dict`` and
    are written in place. A call at position 0 begins anew: slots beyond what a call has written are never read.
    For inference: a cached tensor carries no gradient.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, d_model: int, n_heads: int, max_seq: int, max_batch: int) -> None:
        super().__init__()
        check_heads(d_model, n_heads)
        if max_seq < 1 or max_batch < 1:
            raise InputError(f"max_seq is {max_seq} and max_batch {max_batch}; expected at least 1 each.")
        self.n_heads, self.max_seq, self.max_batch = n_heads, max_seq, max_batch
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model)
        shape = (max_batch, n_heads, max_seq, d_model // n_heads)
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, position: int) -> Tensor:
        """Attends from ``x`` [B, S, d_model], the tokens ``position`` … ``position + S - 1`` of every row.

        One token (S = 1) sees all cached tokens and itself; in a chunk, token i also sees the chunk's tokens up to i.

        Returns:
            [B, S, d_model].

        Raises:
            InputError: (a ValueError) The call does not fit the capacity or the batch; nothing is written then.
        """
        batch, length, _ = x.shape
        end = position + length
        if position < 0 or length < 1 or end > self.max_seq:
            raise InputError(
                f"CachedAttention: {length} tokens from position {position} end at {end}; the cache holds {self.max_seq}.",
                "Make it with a larger max_seq, or begin again at position 0.",
            )
        if not 1 <= batch <= self.max_batch:
            raise InputError(
                f"CachedAttention: {batch} rows; the cache has {self.max_batch}.", "Make it with a larger max_batch."
            )
        query, key, value = split_heads(self.qkv(x), self.n_heads)
        self.keys[:batch, :, position:end] = key
        self.values[:batch, :, position:end] = value
        seen_keys, seen_values = self.keys[:batch, :, :end], self.values[:batch, :, :end]
        # A causal flag would align the triangle to position 0, not to the chunk's offset: the mask says it in full.
        mask = None if length == 1 else torch.ones(length, end, dtype=torch.bool, device=x.device).tril(position)
        y: Tensor = self.out(merge_heads(F.scaled_dot_product_attention(query, seen_keys, seen_values, attn_mask=mask)))
        return y
