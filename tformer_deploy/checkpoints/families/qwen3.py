"""Family ``qwen3``: Llama with a norm over each query and key head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.llama import FREQUENCIES, TENSORS
from tformer_deploy.checkpoints.families.qwen2 import upper_windows
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Table, expand
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Qwen3 ``config.json``."""
    sizes = read_sizes(reader, dim=128, kv_heads=32)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"))
    bias = reader.take("attention_bias", bool, default=False)
    return ModelConfig(
        **sizes._asdict(),
        **upper_windows(reader, sizes.n_layers)._asdict(),
        max_length=max_length,
        norm_eps=reader.take("rms_norm_eps", float, 0.0, 1.0, default=1e-6),
        qk_norm="head",
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="silu"),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        tied=reader.take("tie_word_embeddings", bool, default=False),
    )


_TENSORS = TENSORS | {
    "blocks.{i}.attention.query_norm": "layers.{i}.self_attn.q_norm",
    "blocks.{i}.attention.key_norm": "layers.{i}.self_attn.k_norm",
}


def table(config: ModelConfig) -> Table:
    """Our names → Qwen3's (without ``model.``)."""
    return expand(config, _TENSORS)


QWEN3 = Family(
    name="qwen3",
    read_config=read_config,
    table=table,
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
