"""Architecture ``gptneox`` (Pythia): partial rotary positions, biases everywhere, parallel residuals or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``gptneox.*``."""
    sizes = reader.sizes()
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm="layernorm",
        norm_eps=reader.layer_norm_eps(),
        residual="parallel" if reader.take("use_parallel_residual", bool) else "sequential",
        activation="gelu",
        gated=False,
        rope=rope,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=reader.tied,
    )


GPTNEOX = Architecture("gpt_neox", read_config, split_or_fused)
