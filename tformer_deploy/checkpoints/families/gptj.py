"""Family ``gptj``: interleaved partial rotary positions, one LayerNorm before attention and feed-forward, a head with a bias."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.gpt2 import GPT2_KEYS
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table, expand
from tformer_deploy.checkpoints.reader import head_dim
from tformer_deploy.checkpoints.transforms import Unpermute
from tformer_deploy.config import ModelConfig, RopeConfig
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a GPT-J ``config.json``."""
    width, heads = reader.take_size("n_embd"), reader.take_size("n_head")
    dim = head_dim(reader.place, ("n_embd", width), ("n_head", heads))
    rotated = reader.take("rotary_dim", int, 2, dim, default=64)
    if rotated % 2:
        raise InputError(f"{reader.place}: rotary_dim is {rotated}; expected an even number.")
    reader.require("rotary", True)
    reader.require("scale_attn_weights", True)
    reader.ignore(*GPT2_KEYS)
    return ModelConfig(
        vocab_size=reader.take_size("vocab_size"),
        d_model=width,
        n_layers=reader.take_size("n_layer"),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=dim,
        d_ff=reader.take_size("n_inner", default=4 * width),
        max_length=reader.take_length("n_positions"),
        norm="layernorm",
        norm_eps=reader.take("layer_norm_epsilon", float, 0.0, 1.0, default=1e-5),
        residual="parallel_shared",
        activation=reader.take_choice("activation_function", ACTIVATIONS, default="gelu_new"),
        gated=False,
        rope=RopeConfig(dim=None if rotated == dim else rotated),
        mlp_bias=True,
        head_bias=True,
        tied=reader.take("tie_word_embeddings", bool, default=False),
    )


def table(config: ModelConfig) -> Table:
    """Our names → GPT-J's (without ``transformer.``)."""
    assert config.rope is not None
    halves = Unpermute(config.head_dim, config.rope.dim)
    names: dict[str, str | Source] = {
        "embedding": "wte",
        "blocks.{i}.norm1": "h.{i}.ln_1",
        "blocks.{i}.attention.query": Source("h.{i}.attn.q_proj", halves),
        "blocks.{i}.attention.key": Source("h.{i}.attn.k_proj", halves),
        "blocks.{i}.attention.value": "h.{i}.attn.v_proj",
        "blocks.{i}.attention.out": "h.{i}.attn.out_proj",
        "blocks.{i}.feed_forward.up": "h.{i}.mlp.fc_in",
        "blocks.{i}.feed_forward.down": "h.{i}.mlp.fc_out",
        "norm": "ln_f",
        "head": "lm_head",
    }
    return expand(config, names)


GPTJ = Family(
    name="gptj",
    read_config=read_config,
    table=table,
    architectures=("GPTJForCausalLM", "GPTJModel"),
    prefix="transformer.",
    dropped=(re.compile(r"h\.\d+\.attn\.(bias|masked_bias|embed_positions)"),),
    head="lm_head.weight",
)
