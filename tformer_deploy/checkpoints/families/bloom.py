"""Family ``bloom``: ALiBi, a LayerNorm after the embedding, query, key and value head by head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.family import Family, Source, Table, expand
from tformer_deploy.checkpoints.reader import head_dim
from tformer_deploy.checkpoints.transforms import Rows
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader

# What every published BLOOM was trained on; its config bounds no length.
TRAINED_LENGTH = 2048


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a BLOOM ``config.json``."""
    width = _either(reader, "hidden_size", "n_embed")
    heads = _either(reader, "n_head", "num_attention_heads")
    layers = _either(reader, "n_layer", "num_hidden_layers")
    reader.require("apply_residual_connection_post_layernorm", False)
    # Where products are split or kept in another order for exactness on several machines.
    reader.ignore("pretraining_tp", "slow_but_exact", "skip_bias_add", "skip_bias_add_qkv", "hidden_dropout", "unk_token_id")
    reader.ignore("attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion", "offset_alibi", "n_inner")
    max_length = reader.take_size("seq_length", default=None) if reader.max_length is None else reader.max_length
    if max_length is None:
        max_length = TRAINED_LENGTH
        reader.warn(f"{reader.place} bounds no length; rows are bounded to {TRAINED_LENGTH} tokens. --max-length sets another.")
    reader.ignore("seq_length")
    return ModelConfig(
        vocab_size=reader.take_size("vocab_size"),
        d_model=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=head_dim(reader.place, ("hidden_size", width), ("n_head", heads)),
        d_ff=4 * width,
        max_length=max_length,
        norm="layernorm",
        norm_eps=reader.take("layer_norm_epsilon", float, 0.0, 1.0, default=1e-5),
        activation="gelu_tanh",
        gated=False,
        positions="alibi",
        embedding_norm=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=reader.take("tie_word_embeddings", bool, default=True),
    )


def _either(reader: ConfigReader, key: str, other: str) -> int:
    """A size under one of its two names."""
    value: int | None = reader.take_size(other, default=None)
    return int(reader.take_size(key, default=value) if value is not None else reader.take_size(key))


def table(config: ModelConfig) -> Table:
    """Our names → BLOOM's (without ``transformer.``)."""
    dim = config.head_dim
    fused = "h.{i}.self_attention.query_key_value"
    names: dict[str, str | Source] = {
        "embedding": "word_embeddings",
        "embedding_norm": "word_embeddings_layernorm",
        "blocks.{i}.norm1": "h.{i}.input_layernorm",
        "blocks.{i}.norm2": "h.{i}.post_attention_layernorm",
        "blocks.{i}.attention.query": Source(fused, Rows(3 * dim, 0, dim)),
        "blocks.{i}.attention.key": Source(fused, Rows(3 * dim, dim, dim)),
        "blocks.{i}.attention.value": Source(fused, Rows(3 * dim, 2 * dim, dim)),
        "blocks.{i}.attention.out": "h.{i}.self_attention.dense",
        "blocks.{i}.feed_forward.up": "h.{i}.mlp.dense_h_to_4h",
        "blocks.{i}.feed_forward.down": "h.{i}.mlp.dense_4h_to_h",
        "norm": "ln_f",
        "head": "lm_head",
    }
    return expand(config, names)


BLOOM = Family(
    name="bloom",
    read_config=read_config,
    table=table,
    architectures=("BloomForCausalLM", "BloomModel"),
    prefix="transformer.",
    head="lm_head.weight",
)
