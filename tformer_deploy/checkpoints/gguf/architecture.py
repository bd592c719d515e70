"""What an architecture is: one table from our names to GGUF's, most of which every architecture shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tformer_deploy.checkpoints.family import Source, Table, expand
from tformer_deploy.checkpoints.gguf.keys import GgufReader
from tformer_deploy.checkpoints.transforms import Rows, Unpermute
from tformer_deploy.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAMES: dict[str, str | Source] = {
    "embedding": "token_embd",
    "positions": "position_embd",
    "embedding_norm": "token_embd_norm",
    "blocks.{i}.norm1": "blk.{i}.attn_norm",
    "blocks.{i}.attention.query": "blk.{i}.attn_q",
    "blocks.{i}.attention.key": "blk.{i}.attn_k",
    "blocks.{i}.attention.value": "blk.{i}.attn_v",
    "blocks.{i}.attention.out": "blk.{i}.attn_output",
    "blocks.{i}.attention.query_norm": "blk.{i}.attn_q_norm",
    "blocks.{i}.attention.key_norm": "blk.{i}.attn_k_norm",
    "blocks.{i}.post_norm1": "blk.{i}.post_attention_norm",
    "blocks.{i}.norm2": "blk.{i}.ffn_norm",
    "blocks.{i}.feed_forward.gate": "blk.{i}.ffn_gate",
    "blocks.{i}.feed_forward.up": "blk.{i}.ffn_up",
    "blocks.{i}.feed_forward.down": "blk.{i}.ffn_down",
    "blocks.{i}.post_norm2": "blk.{i}.post_ffw_norm",
    "norm": "output_norm",
    "head": "output",
}


@dataclass(frozen=True)
class Architecture:
    """One value of ``general.architecture``.

    Attributes:
        family: The ``model_type`` of the same model in a Hugging Face folder.
        read_config: Takes every key that matters; what no key says, tensors do.
        names: Our module name → GGUF's where it is not the common one, for this model and file.
    """

    family: str
    read_config: Callable[[GgufReader], ModelConfig]
    names: Callable[[ModelConfig, GgufReader], Mapping[str, str | Source]]

    def table(self, config: ModelConfig, reader: GgufReader) -> Table:
        """Our parameter name → source."""
        return expand(config, {**_NAMES, **self.names(config, reader)})


def split_or_fused(config: ModelConfig, reader: GgufReader) -> dict[str, str | Source]:
    """Queries, keys and values in three tensors, or in one: all queries, then all keys, then all values."""
    if not reader.has("blk.0.attn_qkv.weight"):
        return {}
    query, key = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    parts = (("query", 0, query), ("key", query, key), ("value", query + key, key))
    return {
        f"blocks.{{i}}.attention.{ours}": Source("blk.{i}.attn_qkv", Rows(query + 2 * key, start, count))
        for ours, start, count in parts
    }


def interleaved(config: ModelConfig, reader: GgufReader) -> dict[str, str | Source]:
    """Queries and keys whose rotated pairs lie side by side, as llama.cpp rotates the architectures of Llama's kind."""
    del reader
    halves = Unpermute(config.head_dim, config.rope.dim if config.rope else None)
    return {
        "blocks.{i}.attention.query": Source("blk.{i}.attn_q", halves),
        "blocks.{i}.attention.key": Source("blk.{i}.attn_k", halves),
    }
