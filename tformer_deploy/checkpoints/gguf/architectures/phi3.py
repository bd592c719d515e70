"""Architecture ``phi3``: Llama with gate and up in one tensor, and LongRoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.family import Source
from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.checkpoints.transforms import Rows
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``phi3.*``."""
    sizes = reader.sizes()
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    return ModelConfig(
        **sizes._asdict(),
        **reader.windows(sizes.n_layers, max_length, period=0)._asdict(),
        max_length=max_length,
        norm_eps=reader.rms_eps(),
        rope=rope,
        tied=reader.tied,
    )


def names(config: ModelConfig, reader: GgufReader) -> dict[str, str | Source]:
    """All rows of the gate, then all of the other factor."""
    return split_or_fused(config, reader) | {
        f"blocks.{{i}}.feed_forward.{ours}": Source("blk.{i}.ffn_up", Rows(2 * config.d_ff, start, config.d_ff))
        for ours, start in (("gate", 0), ("up", config.d_ff))
    }


PHI3 = Architecture("phi3", read_config, names)
