"""Family ``olmo2``: Llama with norms after attention and feed-forward instead of before, and over all queries and all keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.llama import FREQUENCIES, TENSORS
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Table, expand
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of an OLMo 2 ``config.json``."""
    sizes = read_sizes(reader)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"))
    bias = reader.take("attention_bias", bool, default=False)
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm_eps=reader.take("rms_norm_eps", float, 0.0, 1.0, default=1e-5),
        pre_norm=False,
        post_norm=True,
        qk_norm="width",
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="silu"),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        tied=reader.take("tie_word_embeddings", bool, default=False),
    )


_TENSORS = TENSORS | {
    "blocks.{i}.attention.query_norm": "layers.{i}.self_attn.q_norm",
    "blocks.{i}.attention.key_norm": "layers.{i}.self_attn.k_norm",
    "blocks.{i}.post_norm1": "layers.{i}.post_attention_layernorm",
    "blocks.{i}.post_norm2": "layers.{i}.post_feedforward_layernorm",
}


def table(config: ModelConfig) -> Table:
    """Our names → OLMo 2's (without ``model.``)."""
    return expand(config, _TENSORS)


OLMO2 = Family(
    name="olmo2",
    read_config=read_config,
    table=table,
    architectures=("Olmo2ForCausalLM", "Olmo2Model"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
