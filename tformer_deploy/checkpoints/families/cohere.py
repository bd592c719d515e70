"""Family ``cohere``: one LayerNorm without bias before attention and feed-forward side by side, interleaved rotary pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.llama import FREQUENCIES, TENSORS
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table, expand
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.checkpoints.transforms import Unpermute, UnpermuteHeads
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Cohere ``config.json``."""
    sizes = read_sizes(reader)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"), theta=500000.0)
    bias = reader.take("attention_bias", bool, default=False)
    reader.require("use_parallel_block", True)
    reader.require("use_parallel_embedding", True)
    reader.require("use_gated_activation", True)
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm="layernorm",
        norm_eps=reader.take("layer_norm_eps", float, 0.0, 1.0, default=1e-5),
        norm_bias=False,
        qk_norm="each_head" if reader.take("use_qk_norm", bool, default=False) else "none",
        residual="parallel_shared",
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="silu"),
        rope=rope,
        logit_scale=reader.take("logit_scale", float, default=0.0625),
        qkv_bias=bias,
        out_bias=bias,
        tied=reader.take("tie_word_embeddings", bool, default=True),
    )


def table(config: ModelConfig) -> Table:
    """Our names → Cohere's (without ``model.``)."""
    assert config.rope is not None
    halves = Unpermute(config.head_dim, config.rope.dim)
    names: dict[str, str | Source] = TENSORS | {
        "blocks.{i}.attention.query": Source("layers.{i}.self_attn.q_proj", halves),
        "blocks.{i}.attention.key": Source("layers.{i}.self_attn.k_proj", halves),
        "blocks.{i}.attention.query_norm": Source("layers.{i}.self_attn.q_norm", UnpermuteHeads()),
        "blocks.{i}.attention.key_norm": Source("layers.{i}.self_attn.k_norm", UnpermuteHeads()),
    }
    return expand(config, names)


COHERE = Family(
    name="cohere",
    read_config=read_config,
    table=table,
    architectures=("CohereForCausalLM", "CohereModel"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
