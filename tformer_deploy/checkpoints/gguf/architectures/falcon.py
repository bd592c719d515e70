"""Architecture ``falcon``: rotary positions, attention and feed-forward side by side after one norm or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.family import Source
from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``falcon.*``."""
    sizes = reader.sizes()
    reader.require("tensor_data_layout", "jploski")  # all queries, all keys, all values
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm="layernorm",
        norm_eps=reader.layer_norm_eps(),
        residual="parallel" if reader.has("blk.0.attn_norm_2.weight") else "parallel_shared",
        activation="gelu",
        gated=False,
        rope=rope,
        tied=reader.tied,
    )


def names(config: ModelConfig, reader: GgufReader) -> dict[str, str | Source]:
    """Where there are two norms, attention reads through the second."""
    norms: dict[str, str | Source] = {"blocks.{i}.norm1": "blk.{i}.attn_norm_2", "blocks.{i}.norm2": "blk.{i}.attn_norm"}
    return split_or_fused(config, reader) | (norms if config.residual == "parallel" else {})


FALCON = Architecture("falcon", read_config, names)
