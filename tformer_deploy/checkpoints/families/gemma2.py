"""Family ``gemma2``: Gemma with norms after attention and feed-forward too, soft caps, and a window in every other layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.families.gemma import GEMMA_TENSORS
from tformer_deploy.checkpoints.families.llama import FREQUENCIES
from tformer_deploy.checkpoints.families.sizes import read_sizes
from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table, expand
from tformer_deploy.checkpoints.rope import read_rope
from tformer_deploy.checkpoints.transforms import PlusOne
from tformer_deploy.checkpoints.windows import read_windows
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.reader import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Gemma 2 ``config.json``."""
    sizes = read_sizes(reader, dim=256, kv_heads=4)
    rope, max_length = read_rope(reader, sizes.head_dim, reader.take_length("max_position_embeddings"))
    bias = reader.take("attention_bias", bool, default=False)
    reader.require("use_bidirectional_attention", False)
    reader.ignore("cache_implementation", "hidden_act")  # hidden_activation decides
    return ModelConfig(
        **sizes._asdict(),
        **read_windows(reader, sizes.n_layers, lambda layer: layer % 2 == 0, default=4096)._asdict(),
        max_length=max_length,
        norm_eps=reader.take("rms_norm_eps", float, 0.0, 1.0, default=1e-6),
        post_norm=True,
        activation=reader.take_choice("hidden_activation", ACTIVATIONS, default="gelu_pytorch_tanh"),
        rope=rope,
        attention_scale=reader.take("query_pre_attn_scalar", float, 1e-6, default=256.0) ** -0.5,
        attention_softcap=softcap(reader, "attn_logit_softcapping", 50.0),
        embedding_scale=sizes.d_model**0.5,
        logit_softcap=softcap(reader, "final_logit_softcapping", 30.0),
        qkv_bias=bias,
        out_bias=bias,
        tied=reader.take("tie_word_embeddings", bool, default=True),
    )


def softcap(reader: ConfigReader, key: str, default: float | None) -> float | None:
    """Null is none; a key that is absent has the family's default."""
    value: float | None = reader.take(key, float, default=None if key in reader.data else default)
    return value


GEMMA2_TENSORS: dict[str, str | Source] = GEMMA_TENSORS | {
    "blocks.{i}.post_norm1": Source("layers.{i}.post_attention_layernorm", PlusOne()),
    "blocks.{i}.norm2": Source("layers.{i}.pre_feedforward_layernorm", PlusOne()),
    "blocks.{i}.post_norm2": Source("layers.{i}.post_feedforward_layernorm", PlusOne()),
}


def table(config: ModelConfig) -> Table:
    """Our names → Gemma 2's (without ``model.``)."""
    return expand(config, GEMMA2_TENSORS)


GEMMA2 = Family(
    name="gemma2",
    read_config=read_config,
    table=table,
    architectures=("Gemma2ForCausalLM", "Gemma2Model"),
    prefix="model.",
    dropped=(FREQUENCIES,),
    head="lm_head.weight",
)
