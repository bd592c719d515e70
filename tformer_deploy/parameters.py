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
    if config.embedding_norm:
        shapes |= _norm("embedding_norm", config, d)
    for layer in range(config.n_layers):
        shapes |= _block(f"blocks.{layer}", config)
    shapes |= _norm("norm", config, d)
    if not config.tied:
        shapes["head.weight"] = (d, config.vocab_size)
    if config.head_bias:
        shapes["head.bias"] = (config.vocab_size,)
    return shapes


def constant_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Name → shape of what follows from the config alone, and is held in float32: rotary frequencies, ALiBi slopes."""
    ropes = {"rope.frequencies": config.rope, "window_rope.frequencies": config.window_rope}
    shapes: dict[str, Shape] = {n: (rope.rotated(config.head_dim) // 2,) for n, rope in ropes.items() if rope is not None}
    return shapes | ({"alibi.slopes": (config.n_heads,)} if config.positions == "alibi" else {})


def _block(name: str, config: ModelConfig) -> dict[str, Shape]:
    d = config.d_model
    shapes: dict[str, Shape] = {}
    if config.pre_norm:
        shapes |= _norm(f"{name}.norm1", config, d)
        if config.residual != "parallel_shared":
            shapes |= _norm(f"{name}.norm2", config, d)
    shapes |= _attention(f"{name}.attention", config) | _feed_forward(f"{name}.feed_forward", config)
    if config.post_norm:
        shapes |= _norm(f"{name}.post_norm1", config, d) | _norm(f"{name}.post_norm2", config, d)
    return shapes


def _linear(name: str, n_in: int, n_out: int, bias: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (n_in, n_out)}
    return weight | {f"{name}.bias": (n_out,)} if bias else weight


def _norm(name: str, config: ModelConfig, width: int) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (width,)}
    return weight | {f"{name}.bias": (width,)} if config.norm == "layernorm" and config.norm_bias else weight


def _attention(name: str, config: ModelConfig) -> dict[str, Shape]:
    d, query, key = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes = _linear(f"{name}.query", d, query, config.qkv_bias)
    for part in ("key", "value"):
        shapes |= _linear(f"{name}.{part}", d, key, config.qkv_bias)
    shapes |= _linear(f"{name}.out", query, d, config.out_bias)
    for part, heads in (("query_norm", config.n_heads), ("key_norm", config.n_kv_heads)):
        if config.qk_norm == "each_head":
            shapes[f"{name}.{part}.weight"] = (heads, config.head_dim)
        elif config.qk_norm != "none":
            shapes |= _norm(f"{name}.{part}", config, config.head_dim if config.qk_norm == "head" else heads * config.head_dim)
    return shapes


def _feed_forward(name: str, config: ModelConfig) -> dict[str, Shape]:
    d, inner = config.d_model, config.d_ff
    shapes = _linear(f"{name}.gate", d, inner, config.mlp_bias) if config.gated else {}
    return shapes | _linear(f"{name}.up", d, inner, config.mlp_bias) | _linear(f"{name}.down", inner, d, config.mlp_bias)
