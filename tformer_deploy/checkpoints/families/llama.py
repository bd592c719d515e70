"""Family ``llama``: rotary positions, RMSNorm, SwiGLU, grouped queries; Linear weights are stored [out, in]."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Table, expand
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Llama ``config.json``."""
    sizes = read_sizes(reader)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"))
    bias = reader.take("attention_bias", bool, default=False)
    reader.require("rope_interleaved", False)
    if set(map(str, reader.take("layer_types", list, default=[]))) - {"full_attention"}:
        reader.require("layer_types")
    reader.ignore("pretraining_tp")  # splits products without changing them
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm_eps=reader.take("rms_norm_eps", float, 0.0, 1.0, default=1e-6),
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="silu"),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.take("mlp_bias", bool, default=False),
        tied=reader.take("tie_word_embeddings", bool, default=False),
    )


# Our names → Llama's (without ``model.``), which many families share.
TENSORS = {
    "embedding": "embed_tokens",
    "blocks.{i}.norm1": "layers.{i}.input_layernorm",
    "blocks.{i}.norm2": "layers.{i}.post_attention_layernorm",
    "blocks.{i}.attention.query": "layers.{i}.self_attn.q_proj",
    "blocks.{i}.attention.key": "layers.{i}.self_attn.k_proj",
    "blocks.{i}.attention.value": "layers.{i}.self_attn.v_proj",
    "blocks.{i}.attention.out": "layers.{i}.self_attn.o_proj",
    "blocks.{i}.feed_forward.gate": "layers.{i}.mlp.gate_proj",
    "blocks.{i}.feed_forward.up": "layers.{i}.mlp.up_proj",
    "blocks.{i}.feed_forward.down": "layers.{i}.mlp.down_proj",
    "norm": "norm",
    "head": "lm_head",
}
FREQUENCIES = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")  # follow from the config


def table(config: ModelConfig) -> Table:
    """Our names → Llama's."""
    return expand(config, TENSORS)


LLAMA = Family(
    name="llama",
    read_config=read_config,
    table=table,
    architectures=("LlamaForCausalLM", "LlamaModel"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
