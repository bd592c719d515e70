"""Family ``opt``: learned positions after two rows that are never used, ReLU, biases everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table, expand
from tformer_deploy.checkpoints.reader import head_dim
from tformer_deploy.checkpoints.transforms import SkipRows
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of an OPT ``config.json``; one that norms after the residual, or projects its embeddings, is refused."""
    width, heads = reader.take_size("hidden_size"), reader.take_size("num_attention_heads")
    reader.require("do_layer_norm_before", True)
    reader.require("layer_norm_elementwise_affine", True)
    reader.require("_remove_final_layer_norm", False)
    reader.require("word_embed_proj_dim", width)
    reader.ignore("dropout", "activation_dropout", "layerdrop", "init_std")
    bias = reader.take("enable_bias", bool, default=True)
    return ModelConfig(
        vocab_size=reader.take_size("vocab_size"),
        d_model=width,
        n_layers=reader.take_size("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=head_dim(reader.place, ("hidden_size", width), ("num_attention_heads", heads)),
        d_ff=reader.take_size("ffn_dim"),
        max_length=reader.take_length("max_position_embeddings"),
        norm="layernorm",
        norm_eps=1e-5,  # no key sets it
        activation=reader.take_choice("activation_function", ACTIVATIONS, default="relu"),
        gated=False,
        positions="learned",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=reader.take("tie_word_embeddings", bool, default=True),
    )


_TENSORS: dict[str, str | Source] = {
    "embedding": "decoder.embed_tokens",
    "positions": Source("decoder.embed_positions", SkipRows(2)),
    "blocks.{i}.norm1": "decoder.layers.{i}.self_attn_layer_norm",
    "blocks.{i}.norm2": "decoder.layers.{i}.final_layer_norm",
    "blocks.{i}.attention.query": "decoder.layers.{i}.self_attn.q_proj",
    "blocks.{i}.attention.key": "decoder.layers.{i}.self_attn.k_proj",
    "blocks.{i}.attention.value": "decoder.layers.{i}.self_attn.v_proj",
    "blocks.{i}.attention.out": "decoder.layers.{i}.self_attn.out_proj",
    "blocks.{i}.feed_forward.up": "decoder.layers.{i}.fc1",
    "blocks.{i}.feed_forward.down": "decoder.layers.{i}.fc2",
    "norm": "decoder.final_layer_norm",
    "head": "lm_head",
}


def table(config: ModelConfig) -> Table:
    """Our names → OPT's (without ``model.``)."""
    return expand(config, _TENSORS)


OPT = Family(
    name="opt",
    read_config=read_config,
    table=table,
    architectures=("OPTForCausalLM", "OPTModel"),
    prefix="model.",
    head="lm_head.weight",
)
