"""Family ``phi3``: Llama with query, key and value in one tensor, gate and up in another, and LongRoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.llama import FREQUENCIES, TENSORS
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table, expand
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.checkpoints.transforms import Rows
from tformer_deploy.checkpoints.windows import read_windows
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Phi-3 ``config.json``."""
    sizes = read_sizes(reader)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"), partial=1.0)
    reader.require("attention_bias", False)
    reader.require("mlp_bias", False)
    reader.ignore("embd_pdrop", "resid_pdrop")
    return ModelConfig(
        **sizes._asdict(),
        **read_windows(reader, sizes.n_layers, lambda layer: True)._asdict(),
        max_length=max_length,
        norm_eps=reader.take("rms_norm_eps", float, 0.0, 1.0, default=1e-5),
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="silu"),
        rope=rope,
        tied=reader.take("tie_word_embeddings", bool, default=False),
    )


def table(config: ModelConfig) -> Table:
    """Our names → Phi-3's (without ``model.``)."""
    query, key, inner = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim, config.d_ff
    names: dict[str, str | Source] = {**TENSORS}
    for ours, start, count in (("query", 0, query), ("key", query, key), ("value", query + key, key)):
        names[f"blocks.{{i}}.attention.{ours}"] = Source("layers.{i}.self_attn.qkv_proj", Rows(query + 2 * key, start, count))
    for ours, start in (("gate", 0), ("up", inner)):
        names[f"blocks.{{i}}.feed_forward.{ours}"] = Source("layers.{i}.mlp.gate_up_proj", Rows(2 * inner, start, inner))
    return expand(config, names)


PHI3 = Family(
    name="phi3",
    read_config=read_config,
    table=table,
    architectures=("Phi3ForCausalLM", "Phi3Model"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
