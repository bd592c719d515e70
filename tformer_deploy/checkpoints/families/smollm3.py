"""Family ``smollm3``: Llama with some layers that have no rotary positions, and perhaps a window in those."""

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
    """The model of a SmolLM3 ``config.json``."""
    sizes = read_sizes(reader, kv_heads=4)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"), theta=2e6)
    nope = _nope_layers(reader, sizes.n_layers)
    enabled = reader.take("use_sliding_window", bool, default=False)
    reader.ignore("max_window_layers", "pretraining_tp")
    bias = reader.take("attention_bias", bool, default=False)
    return ModelConfig(
        **sizes._asdict(),
        **read_windows(reader, sizes.n_layers, lambda layer: layer in nope, enabled=enabled)._asdict(),
        max_length=max_length,
        norm_eps=reader.take("rms_norm_eps", float, 0.0, 1.0, default=1e-6),
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="silu"),
        rope=rope,
        nope_layers=nope,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.take("mlp_bias", bool, default=False),
        tied=reader.take("tie_word_embeddings", bool, default=True),
    )


def _nope_layers(reader: ConfigReader, n_layers: int) -> tuple[int, ...]:
    """Layers whose item in ``no_rope_layers`` is 0; without the list, every ``no_rope_layer_interval``-th."""
    every = reader.take("no_rope_layer_interval", int, 1, default=4)
    listed = reader.take("no_rope_layers", list, default=None)
    if listed is None:
        return tuple(layer for layer in range(n_layers) if (layer + 1) % every == 0)
    if len(listed) != n_layers or any(type(item) not in (int, bool) or item not in (0, 1) for item in listed):
        raise InputError(f"{reader.place}: no_rope_layers has {len(listed)} items; expected {n_layers} of 0 or 1, one a layer.")
    return tuple(layer for layer, rotary in enumerate(listed) if not rotary)


SMOLLM3 = Family(
    name="smollm3",
    read_config=read_config,
    table=table,
    architectures=("SmolLM3ForCausalLM", "SmolLM3Model"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
