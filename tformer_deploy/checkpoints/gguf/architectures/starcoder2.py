"""Architecture ``starcoder2``: LayerNorm, biases, grouped queries, a plain GELU feed-forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader

PUBLISHED_WINDOW = 4096


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``starcoder2.*``.

    Every published StarCoder2 has a window, which no key carries; up to its length a row is the same without.
    """
    sizes = reader.sizes()
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    if max_length > PUBLISHED_WINDOW:
        reader.warn(
            f"{reader.place}: a GGUF file lacks the window of {PUBLISHED_WINDOW} tokens that StarCoder2 was trained with, "
            f"so rows are bounded to that instead of {max_length}."
        )
    return ModelConfig(
        **sizes._asdict(),
        **reader.biases()._asdict(),
        max_length=min(max_length, PUBLISHED_WINDOW),
        norm="layernorm",
        norm_eps=reader.layer_norm_eps(),
        activation="gelu_tanh",
        gated=False,
        rope=rope,
        tied=reader.tied,
    )


STARCODER2 = Architecture("starcoder2", read_config, split_or_fused)
