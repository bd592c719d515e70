"""Family ``falcon``: multi-query, grouped or full heads in three layouts of one tensor; rotary positions or ALiBi."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table, expand
from tformer_deploy.checkpoints.reader import head_dim
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.checkpoints.transforms import Rows
from tformer_deploy.config import ModelConfig, Residual

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Falcon ``config.json``."""
    width, heads = _size(reader, "hidden_size", "n_embed"), _size(reader, "num_attention_heads", "n_head")
    dim = head_dim(reader.place, ("hidden_size", width), ("num_attention_heads", heads))
    grouped = reader.take("new_decoder_architecture", bool, default=False)
    alibi = reader.take("alibi", bool, default=False)
    multi_query = reader.take("multi_query", bool, default=True)
    listed = _size(reader, "num_kv_heads", "n_head_kv", default=heads)
    max_length, rope = reader.take_length("max_position_embeddings"), None
    if alibi:
        reader.ignore("rope_theta", "rope_scaling", "rope_parameters")
    else:
        rope, max_length = read_rope(reader, dim, max_length)
    reader.require("apply_residual_connection_post_layernorm", False)
    reader.ignore("hidden_dropout")
    bias = reader.take("bias", bool, default=False)
    return ModelConfig(
        vocab_size=reader.take_size("vocab_size"),
        d_model=width,
        n_layers=_size(reader, "num_hidden_layers", "n_layer"),
        n_heads=heads,
        n_kv_heads=listed if grouped else 1 if multi_query else heads,
        head_dim=dim,
        d_ff=reader.take_size("ffn_hidden_size", default=4 * width),
        max_length=max_length,
        norm="layernorm",
        norm_eps=reader.take("layer_norm_epsilon", float, 0.0, 1.0, default=1e-5),
        residual=_residual(reader, grouped),
        activation=reader.take_choice("activation", ACTIVATIONS, default="gelu"),
        gated=False,
        positions="alibi" if alibi else "rotary",
        rope=rope,
        alibi_scale=dim**-0.5 if alibi else 1.0,  # the bias is added before scores are scaled
        alibi_bf16=alibi,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=reader.take("tie_word_embeddings", bool, default=True),
    )


def _size(reader: ConfigReader, key: str, old: str, default: int | None = None) -> int:
    """A size under its name, or its name of old."""
    value: int | None = reader.take_size(old, default=default)
    return int(reader.take_size(key, default=value) if value is not None else reader.take_size(key))


def _residual(reader: ConfigReader, grouped: bool) -> Residual:
    norms = reader.take("num_ln_in_parallel_attn", int, 1, 2, default=2 if grouped else 1)
    parallel = reader.take("parallel_attn", bool, default=True)
    if grouped and norms == 2:
        reader.require("parallel_attn", True)
        return "parallel"
    if norms == 2:
        reader.require("num_ln_in_parallel_attn", 1)
    if grouped:
        reader.require("parallel_attn", True)
    return "parallel_shared" if parallel else "sequential"


def table(config: ModelConfig) -> Table:
    """Our names → Falcon's (without ``transformer.``).

    Rows of the fused tensor: a group of query heads, then its key, then its value. With one key/value head that is all
    queries, the key, the value; with as many as queries it is query, key and value head by head.
    """
    dim = config.head_dim
    query = config.n_heads // config.n_kv_heads * dim
    group, fused = query + 2 * dim, "h.{i}.self_attention.query_key_value"
    two = config.residual == "parallel"
    names: dict[str, str | Source] = {
        "embedding": "word_embeddings",
        "blocks.{i}.norm1": "h.{i}.ln_attn" if two else "h.{i}.input_layernorm",
        "blocks.{i}.norm2": "h.{i}.ln_mlp" if two else "h.{i}.post_attention_layernorm",
        "blocks.{i}.attention.query": Source(fused, Rows(group, 0, query)),
        "blocks.{i}.attention.key": Source(fused, Rows(group, query, dim)),
        "blocks.{i}.attention.value": Source(fused, Rows(group, query + dim, dim)),
        "blocks.{i}.attention.out": "h.{i}.self_attention.dense",
        "blocks.{i}.feed_forward.up": "h.{i}.mlp.dense_h_to_4h",
        "blocks.{i}.feed_forward.down": "h.{i}.mlp.dense_4h_to_h",
        "norm": "ln_f",
        "head": "lm_head",
    }
    return expand(config, names)


FALCON = Family(
    name="falcon",
    read_config=read_config,
    table=table,
    architectures=("FalconForCausalLM", "FalconModel"),
    prefix="transformer.",
    head="lm_head.weight",
)
