"""Architecture ``gemma3`` (text): Gemma 2 with norms on queries and keys instead of soft caps, and two rotary bases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.checkpoints.gguf.architectures.gemma2 import score_scale
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader

LAYERS_OF_27B = 62


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``gemma3.*``."""
    sizes = reader.sizes()
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    windows = reader.windows(sizes.n_layers, max_length, period=6)
    window_rope = RopeConfig(theta=reader.take("rope.freq_base_swa", float, default=10000.0))
    return ModelConfig(
        **sizes._asdict(),
        **windows._asdict(),
        max_length=max_length,
        norm_eps=reader.rms_eps(),
        post_norm=True,
        qk_norm="head",
        activation="gelu_tanh",
        rope=rope,
        window_rope=window_rope if windows.window_layers and window_rope != rope else None,
        attention_scale=score_scale(reader, sizes.d_model, sizes.n_heads, sizes.n_layers == LAYERS_OF_27B),
        embedding_scale=sizes.d_model**0.5,
        logit_softcap=reader.softcap("final_logit_softcapping"),
        tied=reader.tied,
    )


GEMMA3 = Architecture("gemma3_text", read_config, split_or_fused)
