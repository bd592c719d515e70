"""Architecture ``bloom``: ALiBi, and a LayerNorm after the embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``bloom.*``; ``context_length`` is what the model was trained on and bounds nothing."""
    trained = reader.take_length("context_length")
    return ModelConfig(
        **reader.sizes()._asdict(),
        max_length=reader.max_length or trained,
        norm="layernorm",
        norm_eps=reader.layer_norm_eps(),
        activation="gelu_tanh",
        gated=False,
        positions="alibi",
        embedding_norm=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=reader.tied,
    )


BLOOM = Architecture("bloom", read_config, split_or_fused)
