"""Family ``llama`` from a GGUF file: config from its metadata, q/k rows un-permuted, tokenizer converted."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tformer_deploy.checkpoints.checkpoint import Checkpoint
from tformer_deploy.checkpoints.family import Family, Source, Table, locate
from tformer_deploy.checkpoints.gguf_file import GgufFile
from tformer_deploy.checkpoints.gguf_tokenizer import read_gguf_tokens
from tformer_deploy.checkpoints.reader import ConfigReader, head_dim
from tformer_deploy.checkpoints.transforms import SAME, TRANSPOSE, Unpermute
from tformer_deploy.config import ModelConfig, RopeConfig
from tformer_deploy.errors import InputError, escaped

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

ROPE_FACTORS = "rope_freqs.weight"
_NAMESPACES = ("general.", "tokenizer.", "quantize.", "split.")  # nothing in them changes the forward pass
# The published llama3 scalings; a file stores only the quotients that follow from them.
_LLAMA3 = [(factor, 1.0, 4.0, original) for original in (8192, 4096, 16384) for factor in (8.0, 32.0, 4.0, 16.0, 2.0, 64.0)]


def open_gguf(path: Path, max_length: int | None) -> Checkpoint:
    """The checkpoint in the GGUF file ``path``.

    Raises:
        InputError: It is damaged, or of an architecture, scaling or tokenizer that is not supported.
        StorageError: Reading failed.
    """
    file = GgufFile(path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_FAMILIES:
        raise InputError(
            f"{escaped(path.name)}: general.architecture is {architecture!r:.80}; supported are {', '.join(GGUF_FAMILIES)}.",
            "Use a model of one of these families.",
        )
    if file.metadata.get("split.count", 1) != 1:
        raise InputError(
            f"{escaped(path.name)} is one of several parts (split.count).", "Merge them with `llama-gguf-split --merge`."
        )
    family = GGUF_FAMILIES[architecture](file)
    data = {key.removeprefix(f"{architecture}."): v for key, v in file.metadata.items() if not key.startswith(_NAMESPACES)}
    reader = ConfigReader(data, f"{escaped(path.name)} ({architecture}.*)", max_length)
    config = family.read_config(reader)
    reader.finish()
    located = locate(family, config, [file], escaped(str(path)))
    return Checkpoint(path, "gguf", family.name, config, located, read_gguf_tokens(file, config.vocab_size), (path,))


def _llama(file: GgufFile) -> Family:
    return Family(
        name="llama",
        read_config=functools.partial(_read_config, file),
        table=_table,
        dropped=(re.compile(re.escape(ROPE_FACTORS)),),  # read with the config
        head="output.weight",
    )


GGUF_FAMILIES: dict[str, Callable[[GgufFile], Family]] = {"llama": _llama}


def _read_config(file: GgufFile, reader: ConfigReader) -> ModelConfig:
    """The model of the keys ``llama.*``; what a key does not say (biases, tied head) the tensors do."""
    width, heads = reader.take_size("embedding_length"), reader.take_size("attention.head_count")
    dim = reader.take_size("attention.key_length", default=None)
    if dim is None:
        dim = head_dim(reader.place, ("embedding_length", width), ("attention.head_count", heads))
    reader.require("attention.value_length", dim)
    reader.require("rope.dimension_count", dim)
    reader.require("attention.causal", True)
    for key in ("expert_count", "expert_used_count"):
        if reader.take(key, int, 0, default=0):
            raise InputError(f"{reader.place}: the model has a mixture of experts ({key}), which is not supported.")
    table = file.entries.get("token_embd.weight")
    vocab_size = reader.take_size("vocab_size", default=table.shape[0] if table else 1)
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=width,
        n_layers=reader.take_size("block_count"),
        n_heads=heads,
        n_kv_heads=reader.take_size("attention.head_count_kv", default=heads),
        head_dim=dim,
        d_ff=reader.take_size("feed_forward_length"),
        max_length=reader.take_length("context_length"),
        norm_eps=reader.take("attention.layer_norm_rms_epsilon", float, 0.0, 1.0),
        rope=_read_rope(file, reader, dim),
        qkv_bias="blk.0.attn_q.bias" in file.entries,
        out_bias="blk.0.attn_output.bias" in file.entries,
        mlp_bias="blk.0.ffn_down.bias" in file.entries,
        tied="output.weight" not in file.entries,
    )


def _read_rope(file: GgufFile, reader: ConfigReader, dim: int) -> RopeConfig:
    reader.require("rope.scaling.type", "none")
    reader.require("rope.scaling.factor", 1.0)
    reader.require("rope.scale_linear", 1.0)
    reader.ignore("rope.scaling.finetuned")
    original = reader.take("rope.scaling.original_context_length", int, 1, default=None)
    theta = reader.take("rope.freq_base", float, default=10000.0)
    plain = RopeConfig(theta=theta)
    if ROPE_FACTORS not in file.entries:
        return plain
    entry = file.entries[ROPE_FACTORS]
    if entry.shape != (dim // 2,) or entry.dtype != "fp32":
        raise InputError(f"{reader.place}: {ROPE_FACTORS} is {entry.dtype} {list(entry.shape)}; expected fp32 {[dim // 2]}.")
    stored = file.rows(ROPE_FACTORS, 0, dim // 2).double()
    known = ([(factor, 1.0, 4.0, original) for factor in (float(stored.max()),)] if original else []) + _LLAMA3
    for factor, low, high, length in known:
        if factor >= 1 and torch.allclose(stored, _factors(theta, dim, factor, low, high, length), rtol=1e-4, atol=0):
            return RopeConfig(theta, "llama3", factor, low, high, length)
    if bool((stored == 1).all()):
        return plain
    raise InputError(
        f"{reader.place}: {ROPE_FACTORS} scales the rotary frequencies in a way other than the published llama3 ones.",
        "Export from the model's Hugging Face folder.",
    )


def _factors(theta: float, dim: int, factor: float, low: float, high: float, length: int) -> Tensor:
    """By what llama3 scaling divides each frequency, [D/2] float64. Source: Llama 3.1's published code."""
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    smooth = ((length / wavelengths - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _table(config: ModelConfig) -> Table:
    """Our names → GGUF's."""
    sources: Table = {"embedding.weight": Source("token_embd.weight"), "norm.weight": Source("output_norm.weight")}
    unpermute = Unpermute(config.head_dim)
    for i in range(config.n_layers):
        block, stored = f"blocks.{i}", f"blk.{i}"
        sources[f"{block}.norm1.weight"] = Source(f"{stored}.attn_norm.weight")
        sources[f"{block}.norm2.weight"] = Source(f"{stored}.ffn_norm.weight")
        for ours, theirs in _PROJECTIONS.items():
            turned = ours in ("attention.query", "attention.key")
            sources[f"{block}.{ours}.weight"] = Source(f"{stored}.{theirs}.weight", unpermute if turned else TRANSPOSE)
            sources[f"{block}.{ours}.bias"] = Source(f"{stored}.{theirs}.bias", unpermute if turned else SAME)
    sources["head.weight"] = Source("output.weight", TRANSPOSE)
    return sources


_PROJECTIONS = {
    "attention.query": "attn_q",
    "attention.key": "attn_k",
    "attention.value": "attn_v",
    "attention.out": "attn_output",
    "feed_forward.gate": "ffn_gate",
    "feed_forward.up": "ffn_up",
    "feed_forward.down": "ffn_down",
}
