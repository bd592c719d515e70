"""Architecture ``olmo2``: norms after attention and feed-forward, and over all queries and all keys; OLMo 3 with its windows too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.gguf.architecture import Architecture, split_or_fused
from tformer_deploy.checkpoints.gguf.rope import read_rope
from tformer_deploy.config import ModelConfig, RopeConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.keys import GgufReader


def read_config(reader: GgufReader) -> ModelConfig:
    """The model of the keys ``olmo2.*``; positions are scaled in layers without a window only."""
    sizes = reader.sizes()
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("context_length"))
    windows = reader.windows(sizes.n_layers, max_length, period=4)
    window_rope = RopeConfig(theta=reader.take("rope.freq_base_swa", float, default=rope.theta))
    return ModelConfig(
        **sizes._asdict(),
        **windows._asdict(),
        max_length=max_length,
        norm_eps=reader.rms_eps(),
        pre_norm=False,
        post_norm=True,
        qk_norm="width",
        rope=rope,
        window_rope=window_rope if windows.window_layers and window_rope != rope else None,
        tied=reader.tied,
    )


OLMO2 = Architecture("olmo2", read_config, split_or_fused)
