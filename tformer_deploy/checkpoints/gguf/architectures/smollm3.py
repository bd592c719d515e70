"""Architecture ``smollm3``: Llama in which every fourth layer has no rotary positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, interleaved
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``smollm3.*``."""
    sizes = reader.sizes()
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    return ModelConfig(
        **sizes._asdict(),
        **reader.biases()._asdict(),
        max_length=max_length,
        norm_eps=reader.rms_eps(),
        rope=rope,
        nope_layers=tuple(layer for layer in range(sizes.n_layers) if layer % 4 == 3),
        tied=reader.tied,
    )


SMOLLM3 = Architecture("smollm3", read_config, interleaved)
