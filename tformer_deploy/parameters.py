"""The parameters of ``reference.Decoder`` by name and shape, without building it (a test compares the two)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tformer_deploy.config import ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name → shape, in the order of ``Decoder.named_parameters()``."""
    d = config.d_model
    shapes: dict[str, Shape] = {"embedding.weight": (config.vocab_size, d)}
    if config.positions == "learned":
        shapes["positions.weight"] = (config.max_length, d)
    for layer in range(config.n_layers):
        block = f"blocks.{layer}"
        shapes |= _norm(f"{block}.norm1", config) | _norm(f"{block}.norm2", config)
        shapes |= _attention(f"{block}.attention", config) | _feed_forward(f"{block}.feed_forward", config)
    shapes |= _norm("norm", config)
    if not config.tied:
        shapes["head.weight"] = (d, config.vocab_size)
    return shapes


def _linear(name: str, n_in: int, n_out: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (n_in, n_out)}
    return weight | {f"{name}.bias": (n_out,)} if bias else weight


def _norm(name: str, config: ModelConfig) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (config.d_model,)}
    return weight | {f"{name}.bias": (config.d_model,)} if config.norm == "layernorm" else weight


def _attention(name: str, config: ModelConfig) -> dict[str, Shape]:
    d, query, key = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes = _linear(f"{name}.query", d, query, config.qkv_bias)
    for part in ("key", "value"):
        shapes |= _linear(f"{name}.{part}", d, key, config.qkv_bias)
    return shapes | _linear(f"{name}.out", query, d, config.out_bias)


def _feed_forward(name: str, config: ModelConfig) -> dict[str, Shape]:
    d, inner = config.d_model, config.d_ff
    shapes = _linear(f"{name}.gate", d, inner, config.mlp_bias) if config.gated else {}
    return shapes | _linear(f"{name}.up", d, inner, config.mlp_bias) | _linear(f"{name}.down", inner, d, config.mlp_bias)
