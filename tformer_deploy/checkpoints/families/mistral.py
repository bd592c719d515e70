"""Family ``mistral``: Llama with a sliding window in every layer, or in none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.llama import FREQUENCIES, table
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.checkpoints.windows import read_windows
from tformer_deploy.config import ModelConfig
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Mistral ``config.json``."""
    sizes = read_sizes(reader, kv_heads=8)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"))
    windows = read_windows(reader, sizes.n_layers, lambda layer: True, default=4096)
    if 0 < len(windows.window_layers) < sizes.n_layers:
        raise InputError(
            f"{reader.place}: layer_types has a window in {len(windows.window_layers)} of {sizes.n_layers} layers; "
            "mistral has one in every layer or in none."
        )
    return ModelConfig(
        **sizes._asdict(),
        **windows._asdict(),
        max_length=max_length,
        norm_eps=reader.take("rms_norm_eps", float, 0.0, 1.0, default=1e-6),
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="silu"),
        rope=rope,
        tied=reader.take("tie_word_embeddings", bool, default=False),
    )


MISTRAL = Family(
    name="mistral",
    read_config=read_config,
    table=table,
    architectures=("MistralForCausalLM", "MistralModel"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
