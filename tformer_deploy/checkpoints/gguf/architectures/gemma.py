"""Architecture ``gemma``: Llama with scaled embeddings and a GELU gate; norm weights have their one added already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``gemma.*``."""
    sizes = reader.sizes()
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm_eps=reader.rms_eps(),
        activation="gelu_tanh",
        rope=rope,
        embedding_scale=sizes.d_model**0.5,
        tied=reader.tied,
    )


GEMMA = Architecture("gemma", read_config, split_or_fused)
