"""Family ``gpt2``: learned positions, LayerNorm, biases everywhere; Conv1D weights are stored [in, out] like ours."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table, expand
from tformer_deploy.checkpoints.reader import head_dim
from tformer_deploy.checkpoints.transforms import SAME, SplitQkv
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a GPT-2 ``config.json``."""
    width, heads = reader.take_size("n_embd"), reader.take_size("n_head")
    reader.require("scale_attn_by_inverse_layer_idx", False)
    # reorder_and_upcast_attn changes the order of operations, not their meaning; n_ctx is an old name of n_positions.
    reader.ignore("reorder_and_upcast_attn", *GPT2_KEYS)  # it changes the order of operations, not their meaning
    return ModelConfig(
        vocab_size=reader.take_size("vocab_size"),
        d_model=width,
        n_layers=reader.take_size("n_layer"),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=head_dim(reader.place, ("n_embd", width), ("n_head", heads)),
        d_ff=reader.take_size("n_inner", default=4 * width),
        max_length=reader.take_length("n_positions"),
        norm="layernorm",
        norm_eps=reader.take("layer_norm_epsilon", float, 0.0, 1.0, default=1e-5),
        activation=reader.take_choice("activation_function", ACTIVATIONS, default="gelu_new"),
        gated=False,
        positions="learned",
        attention_scale=None if reader.take("scale_attn_weights", bool, default=True) else 1.0,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=reader.take("tie_word_embeddings", bool, default=True),
    )


# Training, heads for classification, and n_ctx, an old name of n_positions.
GPT2_KEYS = (
    "n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj",
)  # fmt: skip

# Our names → GPT-2's (without ``transformer.``).
TENSORS: dict[str, str | Source] = {
    "embedding": "wte",
    "positions": "wpe",
    "blocks.{i}.norm1": "h.{i}.ln_1",
    "blocks.{i}.norm2": "h.{i}.ln_2",
    "blocks.{i}.attention.query": Source("h.{i}.attn.c_attn", SplitQkv(0)),
    "blocks.{i}.attention.key": Source("h.{i}.attn.c_attn", SplitQkv(1)),
    "blocks.{i}.attention.value": Source("h.{i}.attn.c_attn", SplitQkv(2)),
    "blocks.{i}.attention.out": Source("h.{i}.attn.c_proj", SAME),
    "blocks.{i}.feed_forward.up": Source("h.{i}.mlp.c_fc", SAME),
    "blocks.{i}.feed_forward.down": Source("h.{i}.mlp.c_proj", SAME),
    "norm": "ln_f",
    "head": "lm_head",
}


def table(config: ModelConfig) -> Table:
    """Our names → GPT-2's."""
    return expand(config, TENSORS)


GPT2 = Family(
    name="gpt2",
    read_config=read_config,
    table=table,
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    prefix="transformer.",
    dropped=(re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),),  # causal masks that old versions stored
    head="lm_head.weight",
)
