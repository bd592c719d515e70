"""Family ``starcoder2``: LayerNorm, biases, grouped queries, a plain GELU feed-forward, and a window in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.llama import FREQUENCIES, TENSORS
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Table, expand
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.checkpoints.windows import read_windows
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a StarCoder2 ``config.json``."""
    sizes = read_sizes(reader, kv_heads=2)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"))
    bias = reader.take("use_bias", bool, default=True)
    reader.require("mlp_type", "default")
    reader.require("norm_type", "layer_norm")
    reader.ignore("residual_dropout", "embedding_dropout")
    return ModelConfig(
        **sizes._asdict(),
        **read_windows(reader, sizes.n_layers, lambda layer: True)._asdict(),
        max_length=max_length,
        norm="layernorm",
        norm_eps=reader.take("norm_epsilon", float, 0.0, 1.0, default=1e-5),
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="gelu_pytorch_tanh"),
        gated=False,
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=reader.take("tie_word_embeddings", bool, default=True),
    )


_TENSORS = TENSORS | {
    "blocks.{i}.feed_forward.up": "layers.{i}.mlp.c_fc",
    "blocks.{i}.feed_forward.down": "layers.{i}.mlp.c_proj",
}


def table(config: ModelConfig) -> Table:
    """Our names → StarCoder2's (without ``model.``)."""
    return expand(config, _TENSORS)


STARCODER2 = Family(
    name="starcoder2",
    read_config=read_config,
    table=table,
    architectures=("Starcoder2ForCausalLM", "Starcoder2Model"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
