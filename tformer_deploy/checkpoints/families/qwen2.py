"""Family ``qwen2``: Llama with biases on query, key and value, and a window in the upper layers if it is switched on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.llama import FREQUENCIES, table
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.checkpoints.windows import Windows, read_windows
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Qwen2 ``config.json``."""
    sizes = read_sizes(reader, kv_heads=32)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"))
    return ModelConfig(
        **sizes._asdict(),
        **upper_windows(reader, sizes.n_layers)._asdict(),
        max_length=max_length,
        norm_eps=reader.take("rms_norm_eps", float, 0.0, 1.0, default=1e-6),
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="silu"),
        rope=rope,
        qkv_bias=True,
        tied=reader.take("tie_word_embeddings", bool, default=False),
    )


def upper_windows(reader: ConfigReader, n_layers: int) -> Windows:
    """A window in layers from ``max_window_layers`` on, if ``use_sliding_window`` is true."""
    first = reader.take("max_window_layers", int, 0, default=28)
    enabled = reader.take("use_sliding_window", bool, default=False)
    return read_windows(reader, n_layers, lambda layer: layer >= first, default=4096, enabled=enabled)


QWEN2 = Family(
    name="qwen2",
    read_config=read_config,
    table=table,
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
