"""Family ``granite``: Llama with multipliers on embeddings, scores, residuals and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.llama import FREQUENCIES, table
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.config import ModelConfig
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Granite ``config.json``."""
    sizes = read_sizes(reader)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"))
    bias = reader.take("attention_bias", bool, default=False)
    divisor = reader.take("logits_scaling", float, default=1.0)
    if divisor <= 0:
        raise InputError(f"{reader.place}: logits_scaling is {divisor:g}; expected a number above 0.")
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm_eps=reader.take("rms_norm_eps", float, 0.0, 1.0, default=1e-6),
        residual_scale=reader.take("residual_multiplier", float, default=1.0),
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="silu"),
        rope=rope,
        attention_scale=reader.take("attention_multiplier", float, default=1.0),
        embedding_scale=reader.take("embedding_multiplier", float, default=1.0),
        logit_scale=1.0 / divisor,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.take("mlp_bias", bool, default=False),
        tied=reader.take("tie_word_embeddings", bool, default=False),
    )


GRANITE = Family(
    name="granite",
    read_config=read_config,
    table=table,
    architectures=("GraniteForCausalLM", "GraniteModel"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
