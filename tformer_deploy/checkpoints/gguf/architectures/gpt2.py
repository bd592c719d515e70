"""Architecture ``gpt2``: learned positions, LayerNorm, biases everywhere; weights are stored [out, in] here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``gpt2.*``."""
    return ModelConfig(
        **reader.sizes()._asdict(),
        max_length=reader.take_length("context_length"),
        norm="layernorm",
        norm_eps=reader.layer_norm_eps(),
        activation="gelu_tanh",
        gated=False,
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=reader.tied,
    )


GPT2 = Architecture("gpt2", read_config, split_or_fused)
