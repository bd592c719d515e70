"""Family ``stablelm``: LayerNorm, partial rotary positions, a gated feed-forward, and perhaps a norm for every head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.llama import FREQUENCIES, TENSORS
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table, expand
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.checkpoints.transforms import IntoRow
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a StableLM ``config.json``."""
    sizes = read_sizes(reader)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"), partial=0.25)
    reader.ignore("hidden_dropout")
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm="layernorm",
        norm_eps=reader.take("layer_norm_eps", float, 0.0, 1.0, default=1e-5),
        qk_norm="each_head" if reader.take("qk_layernorm", bool, default=False) else "none",
        residual="parallel_shared" if reader.take("use_parallel_residual", bool, default=False) else "sequential",
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="silu"),
        rope=rope,
        qkv_bias=reader.take("use_qkv_bias", bool, default=False),
        tied=reader.take("tie_word_embeddings", bool, default=False),
    )


def table(config: ModelConfig) -> Table:
    """Our names → StableLM's (without ``model.``); each head's norm is a tensor of its own."""
    result = expand(config, TENSORS)
    for i in range(config.n_layers):
        for ours, theirs, heads in (("query", "q", config.n_heads), ("key", "k", config.n_kv_heads)):
            result[f"blocks.{i}.attention.{ours}_norm.weight"] = tuple(
                Source(f"layers.{i}.self_attn.{theirs}_layernorm.norms.{head}.weight", IntoRow(head)) for head in range(heads)
            )
    return result


STABLELM = Family(
    name="stablelm",
    read_config=read_config,
    table=table,
    architectures=("StableLmForCausalLM", "StableLmModel"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
