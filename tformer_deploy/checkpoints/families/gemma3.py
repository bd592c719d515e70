"""Family ``gemma3_text``: Gemma 2 with norms on queries and keys instead of soft caps, and two rotary bases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.gemma2 import GEMMA2_TENSORS, softcap
from tformer_deploy.checkpoints.families.llama import FREQUENCIES
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table, expand
from tformer_deploy.checkpoints.rope import read_ropes_by_layer
from tformer_deploy.checkpoints.transforms import PlusOne
from tformer_deploy.checkpoints.windows import read_windows
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Gemma 3 text ``config.json``."""
    sizes = read_sizes(reader, dim=256, kv_heads=4)
    rope, window_rope, max_length = read_ropes_by_layer(
        reader, sizes.head_dim, reader.take_length("max_position_embeddings"), theta=1e6, window_theta=1e4
    )
    every = reader.take("sliding_window_pattern", int, 1, default=None)
    every = reader.take("_sliding_window_pattern", int, 1, default=every) if every is None else every
    windows = read_windows(reader, sizes.n_layers, lambda layer: bool((layer + 1) % (every or 6)), default=4096)
    bias = reader.take("attention_bias", bool, default=False)
    reader.require("use_bidirectional_attention", False)
    reader.require("attn_logit_softcapping")  # no published model has one, and transformers reads it without using it
    reader.ignore("cache_implementation", "hidden_act", "_sliding_window_pattern")  # hidden_activation decides
    return ModelConfig(
        **sizes._asdict(),
        **windows._asdict(),
        max_length=max_length,
        norm_eps=reader.take("rms_norm_eps", float, 0.0, 1.0, default=1e-6),
        post_norm=True,
        qk_norm="head",
        activation=reader.take_choice("hidden_activation", ACTIVATIONS, default="gelu_pytorch_tanh"),
        rope=rope,
        window_rope=window_rope if windows.window_layers and window_rope != rope else None,
        attention_scale=reader.take("query_pre_attn_scalar", float, 1e-6, default=256.0) ** -0.5,
        embedding_scale=sizes.d_model**0.5,
        logit_softcap=softcap(reader, "final_logit_softcapping", None),
        qkv_bias=bias,
        out_bias=bias,
        tied=reader.take("tie_word_embeddings", bool, default=True),
    )


_TENSORS: dict[str, str | Source] = GEMMA2_TENSORS | {
    "blocks.{i}.attention.query_norm": Source("layers.{i}.self_attn.q_norm", PlusOne()),
    "blocks.{i}.attention.key_norm": Source("layers.{i}.self_attn.k_norm", PlusOne()),
}


def table(config: ModelConfig) -> Table:
    """Our names → Gemma 3's (without ``model.``)."""
    return expand(config, _TENSORS)


GEMMA3 = Family(
    name="gemma3_text",
    read_config=read_config,
    table=table,
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
