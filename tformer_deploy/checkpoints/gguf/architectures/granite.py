"""Architecture ``granite``: Llama with multipliers on embeddings, scores, residuals and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, interleaved
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``granite.*``; ``logit_scale`` divides, and a scale of 0 is none."""
    sizes = reader.sizes()
    reader.require("rope.scaling.finetuned", True)  # here, and only here, it switches rotary positions on
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    return ModelConfig(
        **sizes._asdict(),
        **reader.biases()._asdict(),
        max_length=max_length,
        norm_eps=reader.rms_eps(),
        residual_scale=reader.take("residual_scale", float, default=0.0) or 1.0,
        rope=rope,
        attention_scale=reader.take("attention.scale", float, default=0.0) or None,
        embedding_scale=reader.take("embedding_scale", float, default=0.0) or 1.0,
        logit_scale=1 / (reader.take("logit_scale", float, default=0.0) or 1.0),
        tied=reader.tied,
    )


GRANITE = Architecture("granite", read_config, interleaved)
