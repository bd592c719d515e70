"""Family ``gpt_neox`` (Pythia): partial rotary positions, query, key and value head by head, parallel residuals by default."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table, expand
from tformer_deploy.checkpoints.reader import head_dim
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.checkpoints.transforms import Rows
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a GPT-NeoX ``config.json``."""
    width, heads = reader.take_size("hidden_size"), reader.take_size("num_attention_heads")
    dim = head_dim(reader.place, ("hidden_size", width), ("num_attention_heads", heads))
    rope, max_length = read_rope(
        reader, dim, reader.take_length("max_position_embeddings"), partial=0.25,
        theta_key="rotary_emb_base", partial_key="rotary_pct",
    )  # fmt: skip
    bias = reader.take("attention_bias", bool, default=True)
    reader.ignore("hidden_dropout", "classifier_dropout")
    return ModelConfig(
        vocab_size=reader.take_size("vocab_size"),
        d_model=width,
        n_layers=reader.take_size("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=dim,
        d_ff=reader.take_size("intermediate_size"),
        max_length=max_length,
        norm="layernorm",
        norm_eps=reader.take("layer_norm_eps", float, 0.0, 1.0, default=1e-5),
        residual="parallel" if reader.take("use_parallel_residual", bool, default=True) else "sequential",
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="gelu"),
        gated=False,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        tied=reader.take("tie_word_embeddings", bool, default=False),
    )


def table(config: ModelConfig) -> Table:
    """Our names → GPT-NeoX's (without ``gpt_neox.``)."""
    dim = config.head_dim
    fused = "layers.{i}.attention.query_key_value"
    names: dict[str, str | Source] = {
        "embedding": "embed_in",
        "blocks.{i}.norm1": "layers.{i}.input_layernorm",
        "blocks.{i}.norm2": "layers.{i}.post_attention_layernorm",
        "blocks.{i}.attention.query": Source(fused, Rows(3 * dim, 0, dim)),
        "blocks.{i}.attention.key": Source(fused, Rows(3 * dim, dim, dim)),
        "blocks.{i}.attention.value": Source(fused, Rows(3 * dim, 2 * dim, dim)),
        "blocks.{i}.attention.out": "layers.{i}.attention.dense",
        "blocks.{i}.feed_forward.up": "layers.{i}.mlp.dense_h_to_4h",
        "blocks.{i}.feed_forward.down": "layers.{i}.mlp.dense_4h_to_h",
        "norm": "final_layer_norm",
        "head": "embed_out",
    }
    return expand(config, names)


GPT_NEOX = Family(
    name="gpt_neox",
    read_config=read_config,
    table=table,
    architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    prefix="gpt_neox.",
    # Causal masks that old versions stored, and frequencies that follow from the config.
    dropped=(re.compile(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"), re.compile(r"rotary_emb\.inv_freq")),
    head="embed_out.weight",
)
