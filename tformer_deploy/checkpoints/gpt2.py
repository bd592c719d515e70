"""Family ``gpt2``: learned positions, LayerNorm, biases everywhere; Conv1D weights are stored [in, out] like ours."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table
from tformer_deploy.checkpoints.reader import head_dim
from tformer_deploy.checkpoints.transforms import TRANSPOSE, SplitQkv
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a GPT-2 ``config.json``."""
    width, heads = reader.take_size("n_embd"), reader.take_size("n_head")
    reader.require("scale_attn_weights", True)
    reader.require("scale_attn_by_inverse_layer_idx", False)
    # reorder_and_upcast_attn changes the order of operations, not their meaning; n_ctx is an old name of n_positions.
    reader.ignore("reorder_and_upcast_attn", "n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop")
    reader.ignore("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj")
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
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=reader.take("tie_word_embeddings", bool, default=True),
    )


def table(config: ModelConfig) -> Table:
    """Our names → GPT-2's (without ``transformer.``)."""
    sources = {"embedding.weight": Source("wte.weight"), "positions.weight": Source("wpe.weight")}
    for i in range(config.n_layers):
        block, stored = f"blocks.{i}", f"h.{i}"
        for kind in ("weight", "bias"):
            sources[f"{block}.norm1.{kind}"] = Source(f"{stored}.ln_1.{kind}")
            sources[f"{block}.norm2.{kind}"] = Source(f"{stored}.ln_2.{kind}")
            for part, name in enumerate(("query", "key", "value")):
                sources[f"{block}.attention.{name}.{kind}"] = Source(f"{stored}.attn.c_attn.{kind}", SplitQkv(part))
            sources[f"{block}.attention.out.{kind}"] = Source(f"{stored}.attn.c_proj.{kind}")
            sources[f"{block}.feed_forward.up.{kind}"] = Source(f"{stored}.mlp.c_fc.{kind}")
            sources[f"{block}.feed_forward.down.{kind}"] = Source(f"{stored}.mlp.c_proj.{kind}")
    sources |= {f"norm.{kind}": Source(f"ln_f.{kind}") for kind in ("weight", "bias")}
    sources["head.weight"] = Source("lm_head.weight", TRANSPOSE)
    return sources


GPT2 = Family(
    name="gpt2",
    read_config=read_config,
    table=table,
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    prefix="transformer.",
    dropped=(re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),),  # causal masks that old versions stored
    head="lm_head.weight",
)
