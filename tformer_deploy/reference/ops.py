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


@torch.library.custom_op("tformer::masked_attention", mutates_args=())
def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of ``query`` [B, H, S, D] over the whole cache [B, K, C, D]; ``mask`` [B, 1, S, C] bool, True = seen."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


@torch.library.custom_op("tformer::causal_attention", mutates_args=())
def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Square causal attention of ``query`` [B, H, S, D] over fresh ``key``, ``value`` [B, K, S, D]."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@torch.library.custom_op("tformer::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs (i, i + D/2) of ``x`` [B, H, S, D] by the angles of ``cos``, ``sin`` [B, S, D/2] (dtype of x)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@torch.library.custom_op("tformer::tied_head", mutates_args=())
def tied_head(x: Tensor, embedding: Tensor) -> Tensor:
    """Logits [B, N, V] of ``x`` [B, N, d] against the embedding table [V, d], which is stored once."""
    return x @ embedding.T


tensor_scatter.register_fake(lambda cache, update, write_indices: torch.empty_like(cache))
masked_attention.register_fake(lambda query, key, value, mask: torch.empty_like(query))
causal_attention.register_fake(lambda query, key, value: torch.empty_like(query))
rotary.register_fake(lambda x, cos, sin: torch.empty_like(x))
tied_head.register_fake(lambda x, embedding: x.new_empty((*x.shape[:2], embedding.shape[0])))
