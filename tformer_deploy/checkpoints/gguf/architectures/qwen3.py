"""Architecture ``qwen3``: Llama with a norm over each query and key head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``qwen3.*``."""
    sizes = reader.sizes()
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    return ModelConfig(
        **sizes._asdict(),
        **reader.biases()._asdict(),
        max_length=max_length,
        norm_eps=reader.rms_eps(),
        qk_norm="head",
        rope=rope,
        tied=reader.tied,
    )


QWEN3 = Architecture("qwen3", read_config, split_or_fused)
