"""Family ``gemma``: Llama with scaled embeddings, norm weights stored as their distance from one, and a GELU gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.llama import FREQUENCIES, TENSORS
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table, expand
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.checkpoints.transforms import PlusOne
from tformer_deploy.config import Activation, ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Gemma ``config.json``."""
    sizes = read_sizes(reader, dim=256, kv_heads=16)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"))
    bias = reader.take("attention_bias", bool, default=False)
    reader.require("use_bidirectional_attention", False)
    return ModelConfig(
        **sizes._asdict(),
        max_length=max_length,
        norm_eps=reader.take("rms_norm_eps", float, 0.0, 1.0, default=1e-6),
        activation=_activation(reader),
        rope=rope,
        embedding_scale=sizes.d_model**0.5,
        qkv_bias=bias,
        out_bias=bias,
        tied=reader.take("tie_word_embeddings", bool, default=True),
    )


def _activation(reader: ConfigReader) -> Activation:
    """What transformers 5 does: ``hidden_act`` decides, and its "gelu" means the tanh form that Gemma was trained with."""
    choices = ACTIVATIONS | {"gelu": "gelu_tanh"}
    chosen: Activation = reader.take_choice("hidden_act", choices, default="gelu_pytorch_tanh")
    other = reader.take_choice("hidden_activation", ACTIVATIONS | {"": chosen}, default="")
    if other != chosen:
        reader.warn(f"{reader.place}: hidden_activation asks for {other}, but hidden_act decides: {chosen}.")
    return chosen


# Our names → Gemma's (without ``model.``).
GEMMA_TENSORS: dict[str, str | Source] = TENSORS | {
    "blocks.{i}.norm1": Source("layers.{i}.input_layernorm", PlusOne()),
    "blocks.{i}.norm2": Source("layers.{i}.post_attention_layernorm", PlusOne()),
    "norm": Source("norm", PlusOne()),
}


def table(config: ModelConfig) -> Table:
    """Our names → Gemma's."""
    return expand(config, GEMMA_TENSORS)


GEMMA = Family(
    name="gemma",
    read_config=read_config,
    table=table,
    architectures=("GemmaForCausalLM", "GemmaModel"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
