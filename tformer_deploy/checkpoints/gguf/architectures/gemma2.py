"""Architecture ``gemma2``: Gemma with norms after attention and feed-forward too, soft caps, and a window in every other layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader

LAYERS_OF_27B = 46


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``gemma2.*``."""
    sizes = reader.sizes()
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    reader.require("rope.freq_base_swa", rope.theta)
    return ModelConfig(
        **sizes._asdict(),
        **reader.windows(sizes.n_layers, max_length, period=2, default=4096)._asdict(),
        max_length=max_length,
        norm_eps=reader.rms_eps(),
        post_norm=True,
        activation="gelu_tanh",
        rope=rope,
        attention_scale=score_scale(reader, sizes.d_model, sizes.n_heads, sizes.n_layers == LAYERS_OF_27B),
        attention_softcap=reader.softcap("attn_logit_softcapping", 50.0),
        embedding_scale=sizes.d_model**0.5,
        logit_softcap=reader.softcap("final_logit_softcapping", 30.0),
        tied=reader.tied,
    )


def score_scale(reader: GgufReader, width: int, heads: int, largest: bool) -> float | None:
    """``query_pre_attn_scalar`` has no key of its own: it is the width of a head but in the largest model of a generation,
    where it is the width of the model shared among the heads.
    """
    given: float = reader.take("attention.scale", float, default=0.0)
    return given or ((width // heads) ** -0.5 if largest else None)


GEMMA2 = Architecture("gemma2", read_config, split_or_fused)
