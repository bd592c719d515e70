"""Architecture ``gptj``: interleaved partial rotary positions, one LayerNorm before both halves of a block, a head with a bias."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, interleaved
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``gptj.*``; llama.cpp has names for it, but no converter: tensors are as in a Hugging Face folder."""
    sizes = reader.sizes()
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm="layernorm",
        norm_eps=reader.layer_norm_eps(),
        residual="parallel_shared",
        activation="gelu_tanh",
        gated=False,
        rope=rope,
        mlp_bias=True,
        head_bias=True,
        tied=reader.tied,
    )


GPTJ = Architecture("gptj", read_config, interleaved)
