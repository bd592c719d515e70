"""Family ``phi``: attention and feed-forward side by side after one LayerNorm, partial rotary positions, biases everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.llama import FREQUENCIES, TENSORS
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Table, expand
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Phi ``config.json``."""
    sizes = read_sizes(reader)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"), partial=0.5)
    reader.ignore("embd_pdrop", "resid_pdrop")
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm="layernorm",
        norm_eps=reader.take("layer_norm_eps", float, 0.0, 1.0, default=1e-5),
        qk_norm="head" if reader.take("qk_layernorm", bool, default=False) else "none",
        residual="parallel_shared",
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="gelu_new"),
        gated=False,
        rope=rope,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        tied=reader.take("tie_word_embeddings", bool, default=False),
    )


_TENSORS = TENSORS | {
    "blocks.{i}.attention.out": "layers.{i}.self_attn.dense",
    "blocks.{i}.attention.query_norm": "layers.{i}.self_attn.q_layernorm",
    "blocks.{i}.attention.key_norm": "layers.{i}.self_attn.k_layernorm",
    "blocks.{i}.feed_forward.up": "layers.{i}.mlp.fc1",
    "blocks.{i}.feed_forward.down": "layers.{i}.mlp.fc2",
    "norm": "final_layernorm",
}


def table(config: ModelConfig) -> Table:
    """Our names → Phi's (without ``model.``)."""
    return expand(config, _TENSORS)


PHI = Family(
    name="phi",
    read_config=read_config,
    table=table,
    architectures=("PhiForCausalLM", "PhiModel"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
