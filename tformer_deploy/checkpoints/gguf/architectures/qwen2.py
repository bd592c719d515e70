"""Architecture ``qwen2``: Llama with biases on query, key and value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``qwen2.*``."""
    sizes = reader.sizes()
    reader.ignore("use_parallel_residual")  # in files of Qwen 1.5, whose residuals are not parallel
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm_eps=reader.rms_eps(),
        rope=rope,
        qkv_bias=True,
        tied=reader.tied,
    )


QWEN2 = Architecture("qwen2", read_config, split_or_fused)
