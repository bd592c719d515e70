"""The full language model, and the truth that every exported graph is compared with.

Parameter names (the bundle's tensor table uses the same; projections are stored ``[in, out]`` so that the graph holds
``MatMul(x, W)`` and no Transpose)::

    embedding.weight [V, d]            positions.weight [max_length, d]      (learned positions only)
    blocks.i.norm1.weight|bias [d]     blocks.i.norm2.weight|bias [d]        (bias: layernorm only)
    blocks.i.attention.query.weight [d, H*D]   .key, .value [d, K*D]   .out [H*D, d]       (+ .bias)
    blocks.i.feed_forward.gate (gated only), .up [d, d_ff]   .down [d_ff, d]               (+ .bias)
    norm.weight|bias [d]               head.weight [d, V]                    (untied only)
    rope.frequencies [D/2] float32     (rotary only; a buffer computed from the config, never read from a checkpoint)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tformer_deploy.config import ModelConfig
from tformer_deploy.errors import InputError
from tformer_deploy.reference import ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Cache = tuple[Tensor, Tensor]


def rope_frequencies(config: ModelConfig) -> Tensor:
    """Angle per position of each rotary pair, [D/2] float32, in the arithmetic of the original models (float32).

    Source: RoFormer (Su et al. 2021), section 3.2.2; llama3 scaling as Llama 3.1's published code.
    """
    assert config.rope is not None
    rope, dim = config.rope, config.head_dim
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim))
    if rope.kind == "default":
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low = rope.original_max_length / rope.low_freq_factor
    high = rope.original_max_length / rope.high_freq_factor
    smooth = (rope.original_max_length / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > low, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths <= low) & (wavelengths >= high), blended, scaled)


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


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last axis, computed in float32 whatever the dtype of x."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.d_model)) if config.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """[…, d] → […, d]."""
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention over fresh keys and values (``cache`` None) or over the cache they are written to."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        d, heads, kv_heads, dim = config.d_model, config.n_heads, config.n_kv_heads, config.head_dim
        self.query = Linear(d, heads * dim, config.qkv_bias)
        self.key = Linear(d, kv_heads * dim, config.qkv_bias)
        self.value = Linear(d, kv_heads * dim, config.qkv_bias)
        self.out = Linear(heads * dim, d, config.out_bias)

    def forward(self, x: Tensor, step: Step, cache: Cache | None) -> tuple[Tensor, Cache | None]:
        """[B, S, d] → [B, S, d], and the cache (key, value, each [B, K, C, D]) with the new tokens written."""
        query, key, value = (self._heads(p(x)) for p in (self.query, self.key, self.value))
        if step.cos is not None and step.sin is not None:
            query, key = step.rotate(query), step.rotate(key)
        if cache is not None:
            assert step.write is not None
            cache = (ops.tensor_scatter(cache[0], key, step.write), ops.tensor_scatter(cache[1], value, step.write))
        if cache is not None and step.mask is not None:
            y = ops.masked_attention(query, *cache, step.mask)
        elif step.training:
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            y = ops.causal_attention(query, key, value)
        y = y.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)
        y = self.out(y)
        return y, cache

    def _heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * D] → [B, heads, S, D]."""
        return x.reshape(x.shape[0], x.shape[1], -1, self.config.head_dim).transpose(1, 2)


class Step:
    """What every block of one forward pass shares: rotation angles, where to write, what to see.

    Attributes:
        cos, sin: [B, S, D/2] in the model's dtype, or None without rotary positions.
        write: First slot written in each row, [B] int64, or None without a cache.
        mask: [B, 1, S, C] bool, True = seen; None where attention is square and causal.
        training: True: operations that autograd knows; False: those that the exporter translates. Same numbers.
    """

    def __init__(self, cos: Tensor | None, sin: Tensor | None, write: Tensor | None, mask: Tensor | None, training: bool) -> None:
        self.cos, self.sin, self.write, self.mask, self.training = cos, sin, write, mask, training

    def rotate(self, x: Tensor) -> Tensor:
        """Queries or keys [B, heads, S, D], turned by their positions' angles."""
        assert self.cos is not None
        assert self.sin is not None
        if not self.training:
            rotated: Tensor = ops.rotary(x, self.cos, self.sin)
            return rotated
        first, second = x.chunk(2, dim=-1)
        cos, sin = self.cos[:, None], self.sin[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


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
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")


class Block(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(config), Norm(config)
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, step: Step, cache: Cache | None) -> tuple[Tensor, Cache | None]:
        """[B, S, d] → [B, S, d]; ``cache`` as in :class:`Attention`."""
        y, cache = self.attention(self.norm1(x), step, cache)
        x = x + self.dropout(y)
        return x + self.dropout(self.feed_forward(self.norm2(x))), cache


class Embedding(nn.Module):
    """A table of rows, [n, d]."""

    def __init__(self, n: int, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, d))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """[…] int64 → […, d]."""
        return F.embedding(ids, self.weight)


class Rope(nn.Module):
    """Holds the frequencies as a float32 buffer that ``.to(dtype)`` does not round; they come from the config alone."""

    frequencies: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("frequencies", rope_frequencies(config), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frequencies = rope_frequencies(self.config).to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The cosines and sines [B, S, D/2] of ``positions`` [B, S]; angles in float32, then cast."""
        angles = positions[..., None].float() * self.frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Decoder(nn.Module):
    """A decoder-only language model.

    ``forward`` is the oracle and the training path: one full causal pass without a cache. ``prefill`` and ``decode`` are
    the two graphs, with their inputs in the order of ``bundle/signature.py``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model)
        self.positions = Embedding(config.max_length, config.d_model) if config.positions == "learned" else None
        self.rope = Rope(config) if config.positions == "rotary" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = Norm(config)
        self.head = None if config.tied else Linear(config.d_model, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, S, V] float32 of every position of ``input_ids`` [B, S] int64.

        Raises:
            InputError: (a ValueError) S is above the model's ``max_length``.
        """
        if input_ids.shape[1] > self.config.max_length:
            raise InputError(f"input_ids holds {input_ids.shape[1]} tokens a row; max_length is {self.config.max_length}.")
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None].expand(input_ids.shape)
        x, _ = self._blocks(input_ids, positions, None, None, None, training=True)
        x = self.norm(x)
        logits: Tensor = x @ self.embedding.weight.T if self.head is None else self.head(x)
        return logits.float()

    def prefill(self, input_ids: Tensor, logit_positions: Tensor, past: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Prompts from position 0: attends to the fresh keys and values, writes the caches.

        Args:
            input_ids: [B, S] int64, right-padded.
            logit_positions: [B, N] int64, which positions of S get logits.
            past: 2·L caches [B, K, C, D], key then value of each layer.

        Returns:
            logits [B, N, V] float32, then the 2·L written caches.
        """
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None].expand(input_ids.shape)
        write = torch.zeros_like(input_ids[:, 0])
        x, present = self._blocks(input_ids, positions, write, None, past, training=False)
        return (self._logits(x, logit_positions), *present)

    def decode(
        self, input_ids: Tensor, past_lengths: Tensor, logit_positions: Tensor, past: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """New tokens after ``past_lengths`` [B] int64 cached ones; otherwise as :meth:`prefill`."""
        positions = past_lengths[:, None] + torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        slots = torch.arange(past[0].shape[2], device=input_ids.device)
        mask = slots[None, None, None, :] <= positions[:, None, :, None]
        x, present = self._blocks(input_ids, positions, past_lengths, mask, past, training=False)
        return (self._logits(x, logit_positions), *present)

    def _blocks(
        self, input_ids: Tensor, positions: Tensor, write: Tensor | None, mask: Tensor | None,
        past: Sequence[Tensor] | None, training: bool,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        x = self.embedding(input_ids)
        if self.positions is not None:
            x = x + self.positions(positions)
        cos, sin = self.rope(positions, x.dtype) if self.rope is not None else (None, None)
        step = Step(cos, sin, write, mask, training)
        x = self.dropout(x)
        present: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x, cache = block(x, step, None if past is None else (past[2 * i], past[2 * i + 1]))
            present += cache or ()
        return x, present

    def _logits(self, x: Tensor, logit_positions: Tensor) -> Tensor:
        x = torch.gather(x, 1, logit_positions[..., None].expand(-1, -1, x.shape[-1]))
        x = self.norm(x)
        logits: Tensor = ops.tied_head(x, self.embedding.weight) if self.head is None else self.head(x)
        return logits.float()

    def save_pretrained(self, path: str | Path) -> None:
        """Writes ``config.json`` (model_type ``tformer``) and ``model.safetensors`` into the folder ``path``."""
        from tformer_deploy.checkpoints.tformer import write_checkpoint

        write_checkpoint(Path(path), self.config, self.state_dict())

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype: torch.dtype | None = None, max_length: int | None = None) -> Self:
        """Loads a checkpoint of any supported family (folder or GGUF file), in ``dtype`` or float32.

        ``max_length`` stands in where the checkpoint bounds no length.

        Raises:
            InputError: The checkpoint is damaged or not supported.
        """
        from tformer_deploy.checkpoints import open_checkpoint

        checkpoint = open_checkpoint(path, max_length)
        with torch.device("meta"):
            model = cls(checkpoint.config)
        model = model.to(dtype or torch.float32).to_empty(device="cpu")
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name in checkpoint.tensors:
                parameters[name].copy_(checkpoint.read(name))
        return model.eval()
