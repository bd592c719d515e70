"""Family ``llama``: rotary positions, RMSNorm, SwiGLU, grouped queries; Linear weights are stored [out, in]."""

from __future__ import annotations

import re
from typing import Any

from tformer_deploy.checkpoints.family import ACTIVATIONS, Family, Source, Table
from tformer_deploy.checkpoints.reader import ConfigReader, head_dim
from tformer_deploy.checkpoints.transforms import TRANSPOSE
from tformer_deploy.config import ModelConfig, RopeConfig
from tformer_deploy.errors import InputError

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(reader: ConfigReader) -> ModelConfig:
    """The model of a Llama ``config.json``."""
    width, heads = reader.take_size("hidden_size"), reader.take_size("num_attention_heads")
    dim = reader.take_size("head_dim", default=None)
    if dim is None:
        dim = head_dim(reader.place, ("hidden_size", width), ("num_attention_heads", heads))
    bias = reader.take("attention_bias", bool, default=False)
    reader.require("rope_interleaved", False)
    if set(map(str, reader.data.get("layer_types") or ())) <= {"full_attention"}:
        reader.ignore("layer_types")
    reader.ignore("pretraining_tp")  # splits products without changing them
    return ModelConfig(
        vocab_size=reader.take_size("vocab_size"),
        d_model=width,
        n_layers=reader.take_size("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=reader.take_size("num_key_value_heads", default=heads),
        head_dim=dim,
        d_ff=reader.take_size("intermediate_size"),
        max_length=reader.take_length("max_position_embeddings"),
        norm="rmsnorm",
        norm_eps=reader.take("rms_norm_eps", float, 0.0, 1.0, default=1e-6),
        activation=reader.take_choice("hidden_act", ACTIVATIONS, default="silu"),
        gated=True,
        positions="rotary",
        rope=read_rope(reader),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=reader.take("mlp_bias", bool, default=False),
        tied=reader.take("tie_word_embeddings", bool, default=False),
    )


def read_rope(reader: ConfigReader) -> RopeConfig:
    """Rotary positions from the old spelling (``rope_theta``, ``rope_scaling``), the new (``rope_parameters``), or both.

    Raises:
        InputError: The spellings contradict one another, or the kind is not supported.
    """
    values: dict[str, Any] = {}
    theta, partial = reader.take("rope_theta", float, default=None), reader.take("partial_rotary_factor", float, default=None)
    for key, value in (("rope_theta", theta), ("partial_rotary_factor", partial)):
        if value is not None:
            values[key] = value
    given = [key for key in ("rope_scaling", "rope_parameters") if reader.data.get(key) is not None]
    for key in given:
        for name, value in _spelled(reader.take(key, dict), f"{reader.place}: {key}").items():
            if name in values and values[name] != value:
                raise InputError(
                    f"{reader.place}: {name} is {values[name]!r} in one place and {value!r} in {key}.",
                    "Keep the one that the model was trained with.",
                )
            values[name] = value
    reader.ignore("rope_scaling", "rope_parameters")
    return _rope(ConfigReader(values, f"{reader.place}: {' and '.join(given) or 'rope'}"))


def _spelled(data: dict[str, Any], place: str) -> dict[str, Any]:
    """One spelling in the words of the other: ``type`` is ``rope_type``; null counts as absent."""
    values = {name: float(value) if type(value) is int else value for name, value in data.items() if value is not None}
    old = values.pop("type", None)
    if old is not None and values.setdefault("rope_type", old) != old:
        raise InputError(f"{place} has type {old!r} and rope_type {values['rope_type']!r}.", "Keep the right one.")
    return values


def _rope(reader: ConfigReader) -> RopeConfig:
    kind = reader.take_choice("rope_type", {"default": "default", "llama3": "llama3"}, default="default")
    theta = reader.take("rope_theta", float, default=10000.0)
    reader.require("partial_rotary_factor", 1.0)
    if kind == "default":
        reader.ignore(*_LLAMA3)
        reader.finish()
        return RopeConfig(theta=theta)
    factor, low, high, original = (reader.take(key, float) for key in _LLAMA3)
    reader.finish()
    if not original.is_integer():
        raise InputError(f"{reader.place}: original_max_position_embeddings is {original}; expected a whole number.")
    return RopeConfig(theta, "llama3", factor, low, high, int(original))


def table(config: ModelConfig) -> Table:
    """Our names → Llama's (without ``model.``)."""
    sources = {"embedding.weight": Source("embed_tokens.weight"), "norm.weight": Source("norm.weight")}
    for i in range(config.n_layers):
        block, stored = f"blocks.{i}", f"layers.{i}"
        sources[f"{block}.norm1.weight"] = Source(f"{stored}.input_layernorm.weight")
        sources[f"{block}.norm2.weight"] = Source(f"{stored}.post_attention_layernorm.weight")
        for ours, theirs in _PROJECTIONS.items():
            sources[f"{block}.{ours}.weight"] = Source(f"{stored}.{theirs}.weight", TRANSPOSE)
            sources[f"{block}.{ours}.bias"] = Source(f"{stored}.{theirs}.bias")
    sources["head.weight"] = Source("lm_head.weight", TRANSPOSE)
    return sources


_PROJECTIONS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}

LLAMA = Family(
    name="llama",
    read_config=read_config,
    table=table,
    architectures=("LlamaForCausalLM", "LlamaModel"),
    prefix="model.",
    dropped=(re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),),  # frequencies that follow from the config
    head="lm_head.weight",
)
