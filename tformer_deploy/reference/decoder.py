"""The full language model, and the truth that every exported graph is compared with.

Parameter names (the bundle's tensor table uses the same; projections are stored ``[in, out]`` so that the graph holds
``MatMul(x, W)`` and no Transpose; norms have a bias where they are LayerNorms with ``norm_bias``)::

    embedding.weight [V, d]            positions.weight [max_length, d]      (learned positions only)
    embedding_norm.weight|bias [d]     (embedding_norm only)
    blocks.i.norm1.weight|bias [d]     blocks.i.norm2.weight|bias [d]        (pre_norm; norm2 not in parallel_shared)
    blocks.i.attention.query.weight [d, H*D]   .key, .value [d, K*D]   .out [H*D, d]       (+ .bias)
    blocks.i.attention.query_norm.weight|bias, .key_norm   [D], [heads, D] or [heads * D]  (qk_norm only)
    blocks.i.feed_forward.gate (gated only), .up [d, d_ff]   .down [d_ff, d]               (+ .bias)
    blocks.i.post_norm1.weight|bias [d], .post_norm2                         (post_norm only)
    norm.weight|bias [d]               head.weight [d, V]                    (untied only)   head.bias [V]
    rope.frequencies [dim/2], window_rope.frequencies, alibi.slopes [H]      (float32 buffers that follow from the config)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from tformer_deploy.config import ModelConfig
from tformer_deploy.errors import InputError
from tformer_deploy.reference.layers import Block, Embedding, Head, Norm, Step
from tformer_deploy.reference.positions import Alibi, Rope, View, seen

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        self.embedding_norm = Norm(config, config.d_model) if config.embedding_norm else None
        self.rope = None if config.rope is None else Rope(config.rope, config.head_dim)
        self.window_rope = None if config.window_rope is None else Rope(config.window_rope, config.head_dim)
        self.alibi = Alibi(config) if config.positions == "alibi" else None
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = Norm(config, config.d_model)
        self.head = Head(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, S, V] float32 of every position of ``input_ids`` [B, S] int64.

        Raises:
            InputError: (a ValueError) S is above the model's ``max_length``.
        """
        if input_ids.shape[1] > self.config.max_length:
            raise InputError(f"input_ids holds {input_ids.shape[1]} tokens a row; max_length is {self.config.max_length}.")
        x, _ = self._blocks(input_ids, None, None, training=True)
        logits: Tensor = self.head(self.norm(x), self.embedding.weight, training=True)
        return logits

    def prefill(self, input_ids: Tensor, logit_positions: Tensor, past: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Prompts from position 0: attends to the fresh keys and values, writes the caches.

        Args:
            input_ids: [B, S] int64, right-padded.
            logit_positions: [B, N] int64, which positions of S get logits.
            past: 2·L caches [B, K, C, D], key then value of each layer.

        Returns:
            logits [B, N, V] float32, then the 2·L written caches.
        """
        x, present = self._blocks(input_ids, None, past, training=False)
        return (self._logits(x, logit_positions), *present)

    def decode(
        self, input_ids: Tensor, past_lengths: Tensor, logit_positions: Tensor, past: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """New tokens after ``past_lengths`` [B] int64 cached ones; otherwise as :meth:`prefill`."""
        x, present = self._blocks(input_ids, past_lengths, past, training=False)
        return (self._logits(x, logit_positions), *present)

    def _blocks(
        self, input_ids: Tensor, past_lengths: Tensor | None, past: Sequence[Tensor] | None, training: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [B, S, d] and the written caches; ``past_lengths`` None: from position 0, on fresh keys and values."""
        x, step = self.enter(input_ids, past_lengths, past, training)
        present: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x, cache = block(x, step, None if past is None else (past[2 * i], past[2 * i + 1]))
            present += cache or ()
        return x, present

    def enter(
        self, input_ids: Tensor, past_lengths: Tensor | None, past: Sequence[Tensor] | None, training: bool
    ) -> tuple[Tensor, Step]:
        """What the first block reads, [B, S, d], and what all blocks share; arguments as for the blocks themselves."""
        fresh = torch.arange(input_ids.shape[1], device=input_ids.device)
        start = torch.zeros_like(input_ids[:, 0]) if past_lengths is None else past_lengths
        positions = fresh[None].expand(input_ids.shape) if past_lengths is None else start[:, None] + fresh[None]
        x = self.embedding(input_ids)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = self.dropout(x)
        cached = past_lengths is not None and past is not None
        keys = torch.arange(past[0].shape[2], device=x.device) if cached and past is not None else fresh
        # Fresh queries stand at the same positions in every row: one mask serves all.
        queries = positions if cached else fresh[None]
        full = self._view(self.rope, positions, self._mask(queries, keys, None, x.dtype, cached), x.dtype)
        window = None
        if self.config.window_layers:
            mask = self._mask(queries, keys, self.config.window, x.dtype, cached)
            window = self._view(self.window_rope or self.rope, positions, mask, x.dtype)
        return x, Step(full, window, None if past is None else start, cached, training)

    def _mask(self, queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype, cached: bool) -> Tensor | None:
        """See :class:`View`; ``queries`` [B or 1, S] and ``keys`` [C] are positions."""
        if window is None and self.alibi is None and not cached:
            return None
        mask = seen(queries, keys, window)
        if self.alibi is None:
            return mask
        return torch.where(mask, self.alibi(queries, keys), float("-inf")).to(dtype)

    def _view(self, rope: Rope | None, positions: Tensor, mask: Tensor | None, dtype: torch.dtype) -> View:
        cos, sin = (None, None) if rope is None else rope(positions, dtype)
        return View(cos, sin, mask)

    def _logits(self, x: Tensor, logit_positions: Tensor) -> Tensor:
        x = torch.gather(x, 1, logit_positions[..., None].expand(-1, -1, x.shape[-1]))
        logits: Tensor = self.head(self.norm(x), self.embedding.weight, training=False)
        return logits

    def save_pretrained(self, path: str | Path) -> None:
        """Writes ``config.json`` (model_type ``tformer``) and ``model.safetensors`` into the folder ``path``."""
        from tformer_deploy.checkpoints.families.tformer import write_checkpoint

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
        dtype = dtype or torch.float32
        model = model.to(dtype).to_empty(device="cpu")
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name in checkpoint.tensors:
                parameters[name].copy_(checkpoint.read(name, dtype))
        return model.eval()
