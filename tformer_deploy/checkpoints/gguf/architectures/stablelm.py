"""Architecture ``stablelm``: LayerNorm, partial rotary positions, a gated feed-forward, and perhaps a norm for every head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``stablelm.*``; of residuals the tensors tell, for old files say parallel whatever they are."""
    sizes = reader.sizes()
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    reader.ignore("use_parallel_residual")
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm="layernorm",
        norm_eps=reader.layer_norm_eps(),
        qk_norm="each_head" if reader.has("blk.0.attn_q_norm.weight") else "none",
        residual="sequential" if reader.has("blk.0.ffn_norm.weight") else "parallel_shared",
        rope=rope,
        qkv_bias=reader.biases().qkv_bias,
        tied=reader.tied,
    )


STABLELM = Architecture("stablelm", read_config, split_or_fused)
