"""Family ``gpt_bigcode``: GPT-2 with one key/value head for all queries, or query, key and value head by head."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.gpt2 import GPT2_KEYS, TENSORS
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table, expand
from tformer_deploy.checkpoints.reader import head_dim
from tformer_deploy.checkpoints.transforms import Rows
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a GPTBigCode ``config.json``."""
    width, heads = reader.take_size("n_embd"), reader.take_size("n_head")
    kv_heads = 1 if reader.take("multi_query", bool, default=True) else heads
    reader.require("num_key_value_heads", kv_heads)
    # Where softmax is computed in float32, scores are scaled down and up again, which changes nothing in float32.
    reader.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner", "validate_runner_input")
    reader.ignore("pre_allocate_kv_cache", "max_sequence_length", "max_batch_size", "pad_key_length", *GPT2_KEYS)
    return ModelConfig(
        vocab_size=reader.take_size("vocab_size"),
        d_model=width,
        n_layers=reader.take_size("n_layer"),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim(reader.place, ("n_embd", width), ("n_head", heads)),
        d_ff=reader.take_size("n_inner", default=4 * width),
        max_length=reader.take_length("n_positions"),
        norm="layernorm",
        norm_eps=reader.take("layer_norm_epsilon", float, 0.0, 1.0, default=1e-5),
        activation=reader.take_choice("activation_function", ACTIVATIONS, default="gelu_pytorch_tanh"),
        gated=False,
        positions="learned",
        attention_scale=None if reader.take("scale_attn_weights", bool, default=True) else 1.0,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=reader.take("tie_word_embeddings", bool, default=True),
    )


def table(config: ModelConfig) -> Table:
    """Our names → GPTBigCode's (without ``transformer.``)."""
    dim, query = config.head_dim, config.n_heads * config.head_dim
    if config.n_kv_heads == 1 < config.n_heads:
        parts = (Rows(query + 2 * dim, 0, query), Rows(query + 2 * dim, query, dim), Rows(query + 2 * dim, query + dim, dim))
    else:
        parts = (Rows(3 * dim, 0, dim), Rows(3 * dim, dim, dim), Rows(3 * dim, 2 * dim, dim))
    names: dict[str, str | Source] = {**TENSORS}
    for ours, rows in zip(("query", "key", "value"), parts, strict=True):
        names[f"blocks.{{i}}.attention.{ours}"] = Source("h.{i}.attn.c_attn", rows)
    for ours, theirs in (("attention.out", "attn.c_proj"), ("feed_forward.up", "mlp.c_fc"), ("feed_forward.down", "mlp.c_proj")):
        names[f"blocks.{{i}}.{ours}"] = f"h.{{i}}.{theirs}"
    return expand(config, names)


GPT_BIGCODE = Family(
    name="gpt_bigcode",
    read_config=read_config,
    table=table,
    architectures=("GPTBigCodeForCausalLM", "GPTBigCodeModel"),
    prefix="transformer.",
    dropped=(re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),),
    head="lm_head.weight",
)
