"""The few operations that the exporter translates to one ONNX operator each.

In PyTorch each has a real eager body (what the numbers mean) and a fake one (shapes, for tracing on the meta device).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("tformer::tensor_scatter", mutates_args=())
def tensor_scatter(cache: Tensor, update: Tensor, write_indices: Tensor) -> Tensor:
    """Writes ``update`` [B, K, S, D] into a copy of ``cache`` [B, K, C, D] from slot ``write_indices`` [B] (int64) on."""
    out = cache.clone()
    for row, start in enumerate(write_indices.tolist()):
        out[row, :, start : start + update.shape[2]] = update[row]
    return out


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """Attention of ``query`` [B, H, S, D] over ``key``, ``value`` [B, K, C, D].

    Args:
        query: [B, H, S, D].
        key: [B, K, C, D]; kv head j serves query heads j*H/K … (j+1)*H/K - 1.
        value: As ``key``.
        mask: Broadcasts to [B, H, S, C]: bool, True = seen, or a number that is added to the scores; None: causal and square.
        scale: Scores are multiplied by it.
        softcap: Scores become softcap * tanh(score / softcap) before the mask; 0: they stay.

    Returns:
        [B, H, S, D].
    """
    if not softcap:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = softcap * torch.tanh(query @ key.transpose(-2, -1) * (scale / softcap))
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value


@torch.library.custom_op("tformer::masked_attention", mutates_args=())
def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float) -> Tensor:
    """:func:`attend` with a mask."""
    return attend(query, key, value, mask, scale, softcap)


@torch.library.custom_op("tformer::causal_attention", mutates_args=())
def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float) -> Tensor:
    """:func:`attend` over fresh keys and values, square and causal."""
    return attend(query, key, value, None, scale, softcap)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (i, i + dim/2) of the first dim dims of ``x`` [B, H, S, D] by angles given as [B, S, dim/2] (dtype of x)."""
    dim = 2 * cos.shape[-1]
    first, second = x[..., :dim].chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated if dim == x.shape[-1] else (*rotated, x[..., dim:]), dim=-1)


@torch.library.custom_op("tformer::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """:func:`rotate` as one operation."""
    return rotate(x, cos, sin)


@torch.library.custom_op("tformer::tied_head", mutates_args=())
def tied_head(x: Tensor, embedding: Tensor) -> Tensor:
    """Logits [B, N, V] of ``x`` [B, N, d] against the embedding table [V, d], which is stored once."""
    return x @ embedding.T


tensor_scatter.register_fake(lambda cache, update, write_indices: torch.empty_like(cache))
masked_attention.register_fake(lambda query, key, value, mask, scale, softcap: torch.empty_like(query))
causal_attention.register_fake(lambda query, key, value, scale, softcap: torch.empty_like(query))
rotary.register_fake(lambda x, cos, sin: torch.empty_like(x))
tied_head.register_fake(lambda x, embedding: x.new_empty((*x.shape[:2], embedding.shape[0])))
