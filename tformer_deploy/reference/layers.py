"""The parts of a Decoder: projections, norms, attention, feed-forward, blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer_deploy.reference import ops

if TYPE_CHECKING:
    from tformer_deploy.config import ModelConfig
    from tformer_deploy.reference.positions import View

Cache = tuple[Tensor, Tensor]


class Linear(nn.Module):
    """``x @ weight + bias`` with the weight stored [in, out]."""

    def __init__(self, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """[…, n_in] → […, n_out]."""
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class Embedding(nn.Module):
    """A table of rows, [n, d]."""

    def __init__(self, n: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, d))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """[…] int64 → […, d]."""
        return F.embedding(ids, self.weight)


class Head(nn.Module):
    """Hidden states to logits; a tied head has no weight of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = None if config.tied else nn.Parameter(torch.empty(config.d_model, config.vocab_size))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.head_bias else None
        self.scale, self.softcap = config.logit_scale, config.logit_softcap
        if self.weight is not None:
            nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, embedding: Tensor, training: bool) -> Tensor:
        """[B, N, d] → [B, N, V] float32; ``embedding`` [V, d] stands in for a tied head's weight."""
        y = self._product(x, embedding, training)
        y = (y if self.bias is None else y + self.bias).float()
        if self.scale != 1:
            y = y * self.scale
        return y if self.softcap is None else self.softcap * torch.tanh(y / self.softcap)

    def _product(self, x: Tensor, embedding: Tensor, training: bool) -> Tensor:
        if self.weight is not None:
            return x @ self.weight
        return x @ embedding.T if training else ops.tied_head(x, embedding)


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis, computed in float32 whatever the dtype of x."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.centred = config.norm == "layernorm"
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if self.centred and config.norm_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] → […, width]."""
        if self.centred:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class EachHeadNorm(nn.Module):
    """A norm over each head with a weight of its own for every head, and no bias."""

    def __init__(self, config: ModelConfig, n_heads: int) -> None:
        super().__init__()
        self.eps, self.centred = config.norm_eps, config.norm == "layernorm"
        self.weight = nn.Parameter(torch.ones(n_heads, config.head_dim))

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, heads, D] → [B, S, heads, D]."""
        shape = self.weight.shape[1:]
        y = F.layer_norm(x, shape, None, None, self.eps) if self.centred else F.rms_norm(x, shape, None, self.eps)
        return y * self.weight


def _qk_norm(config: ModelConfig, n_heads: int) -> Norm | EachHeadNorm | None:
    if config.qk_norm == "none":
        return None
    if config.qk_norm == "each_head":
        return EachHeadNorm(config, n_heads)
    return Norm(config, config.head_dim if config.qk_norm == "head" else n_heads * config.head_dim)


@dataclass(frozen=True)
class Step:
    """What every block of one forward pass shares.

    Attributes:
        full: What layers that see everything before a token see.
        window: What windowed layers see; None where there are none.
        write: First slot written in each row, [B] int64, or None without a cache.
        cached: Attention reads the caches; otherwise the fresh keys and values, from position 0.
        training: True: operations that autograd knows; False: those that the exporter translates. Same numbers.
    """

    full: View
    window: View | None
    write: Tensor | None
    cached: bool
    training: bool


class Attention(nn.Module):
    """Grouped-query attention over fresh keys and values, or over the cache they are written to."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.windowed, self.rotated = layer in config.window_layers, layer not in config.nope_layers
        d, heads, kv_heads, dim = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
        self.scale = dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.softcap = config.attention_softcap or 0.0
        self.query = Linear(d, heads * dim, config.qkv_bias)
        self.key = Linear(d, kv_heads * dim, config.qkv_bias)
        self.value = Linear(d, kv_heads * dim, config.qkv_bias)
        self.out = Linear(heads * dim, d, config.out_bias)
        self.query_norm, self.key_norm = _qk_norm(config, heads), _qk_norm(config, kv_heads)

    def forward(self, x: Tensor, step: Step, cache: Cache | None) -> tuple[Tensor, Cache | None]:
        """[B, S, d] → [B, S, d], and the cache (key, value, each [B, K, C, D]) with the new tokens written."""
        view = step.window if self.windowed and step.window is not None else step.full
        query = self._heads(self.query(x), self.query_norm)
        key = self._heads(self.key(x), self.key_norm)
        value = self._heads(self.value(x), None)
        if self.rotated and view.cos is not None and view.sin is not None:
            turn = ops.rotate if step.training else ops.rotary
            query, key = turn(query, view.cos, view.sin), turn(key, view.cos, view.sin)
        if cache is not None:
            assert step.write is not None
            cache = (ops.tensor_scatter(cache[0], key, step.write), ops.tensor_scatter(cache[1], value, step.write))
        keys, values = cache if step.cached and cache is not None else (key, value)
        if view.mask is not None:
            attend = ops.attend if step.training else ops.masked_attention
            y = attend(query, keys, values, view.mask, self.scale, self.softcap)
        elif step.training:
            y = ops.attend(query, keys, values, None, self.scale, self.softcap)
        else:
            y = ops.causal_attention(query, keys, values, self.scale, self.softcap)
        y = self.out(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))
        return y, cache

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """[B, S, heads * D] → [B, heads, S, D], normed on the way."""
        if norm is not None and self.config.qk_norm == "width":
            x = norm(x)
        x = x.reshape(x.shape[0], x.shape[1], -1, self.config.head_dim)
        if norm is not None and self.config.qk_norm != "width":
            x = norm(x)
        return x.transpose(1, 2)


class FeedForward(nn.Module):
    """``down(act(up(x)))``, or gated: ``down(act(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = Linear(config.d_model, config.d_ff, config.mlp_bias) if config.gated else None
        self.up = Linear(config.d_model, config.d_ff, config.mlp_bias)
        self.down = Linear(config.d_ff, config.d_model, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, d] → [B, S, d]."""
        inner = self._act(self.up(x)) if self.gate is None else self._act(self.gate(x)) * self.up(x)
        y: Tensor = self.down(inner)
        return y

    def _act(self, x: Tensor) -> Tensor:
        if self.activation == "silu":
            return F.silu(x)
        if self.activation == "relu":
            return F.relu(x)
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")


class Block(nn.Module):
    """A residual block in one of the layouts of ``ModelConfig.residual``, ``pre_norm`` and ``post_norm``."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.parallel, self.scale = config.residual != "sequential", config.residual_scale
        width = config.d_model
        self.norm1 = Norm(config, width) if config.pre_norm else None
        self.norm2 = Norm(config, width) if config.pre_norm and config.residual != "parallel_shared" else None
        self.attention, self.feed_forward = Attention(config, layer), FeedForward(config)
        self.post_norm1, self.post_norm2 = (Norm(config, width) if config.post_norm else None for _ in range(2))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, step: Step, cache: Cache | None) -> tuple[Tensor, Cache | None]:
        """[B, S, d] → [B, S, d]; ``cache`` as in :class:`Attention`."""
        normed = x if self.norm1 is None else self.norm1(x)
        y, cache = self.attention(normed, step, cache)
        if self.parallel:
            y = y + self.feed_forward(normed if self.norm2 is None else self.norm2(x))
            return self._add(x, y), cache
        x = self._add(x, y if self.post_norm1 is None else self.post_norm1(y))
        y = self.feed_forward(x if self.norm2 is None else self.norm2(x))
        return self._add(x, y if self.post_norm2 is None else self.post_norm2(y)), cache

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        y = self.dropout(y)
        return x + (y if self.scale == 1 else y * self.scale)
