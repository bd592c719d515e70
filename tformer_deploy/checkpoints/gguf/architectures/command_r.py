"""Architecture ``command-r``: one LayerNorm without bias before attention and feed-forward side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.family import Source
from tformer_deploy.checkpoints.gguf.architecture import Architecture, interleaved
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.checkpoints.transforms import UnpermuteHeads
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``command-r.*``."""
    sizes = reader.sizes()
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    return ModelConfig(
        **sizes._asdict(),
        **reader.biases()._asdict(),
        max_length=max_length,
        norm="layernorm",
        norm_eps=reader.layer_norm_eps(),
        norm_bias=False,
        qk_norm="each_head" if reader.has("blk.0.attn_q_norm.weight") else "none",
        residual="parallel_shared",
        rope=rope,
        logit_scale=reader.take("logit_scale", float, default=0.0) or 1.0,
        tied=reader.tied,
    )


def names(config: ModelConfig, reader: GgufReader) -> dict[str, str | Source]:
    """The norms of queries and keys are interleaved as those are."""
    return interleaved(config, reader) | {
        "blocks.{i}.attention.query_norm": Source("blk.{i}.attn_q_norm", UnpermuteHeads()),
        "blocks.{i}.attention.key_norm": Source("blk.{i}.attn_k_norm", UnpermuteHeads()),
    }


COMMAND_R = Architecture("cohere", read_config, names)
