"""Architecture ``llama``: Llama and Mistral (whose window no key carries); biases as the file has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, interleaved
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``llama.*``."""
    sizes = reader.sizes()
    reader.require("tensor_data_layout", "Meta AI original pth")  # in early files; queries and keys lie as in all others
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    return ModelConfig(
        **sizes._asdict(),
        **reader.biases()._asdict(),
        max_length=max_length,
        norm_eps=reader.rms_eps(),
        rope=rope,
        tied=reader.tied,
    )


LLAMA = Architecture("llama", read_config, interleaved)
