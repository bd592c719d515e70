"""Names, dims and dtypes of the two graphs' inputs and outputs: written once, read by exporter, backends and C++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tformer_deploy.config import DType, ModelConfig

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")
OPSET = 24
INPUT_IDS, PAST_LENGTHS, LOGIT_POSITIONS, LOGITS = "input_ids", "past_lengths", "logit_positions", "logits"
# Values inside a graph that have fixed names, so that a check can look at them; an edited graph may have lost them.
BLOCKS_INPUT, ATTENTION_OUTPUT, BLOCK_OUTPUT = "blocks.input", "blocks.{layer}.attention.output", "blocks.{layer}.output"
ONNX_DTYPES: dict[str, str] = {"fp32": "FLOAT", "fp16": "FLOAT16", "bf16": "BFLOAT16", "int64": "INT64"}


@dataclass(frozen=True)
class TensorSignature:
    """One input or output; a dim is a name (symbolic) or a number. ``dtype`` is int64, fp32, fp16 or bf16."""

    name: str
    dtype: str
    dims: tuple[str | int, ...]


def cache_names(n_layers: int, prefix: Literal["past_key_values", "present"]) -> list[str]:
    """``prefix.0.key``, ``prefix.0.value``, ``prefix.1.key`` and so on."""
    return [f"{prefix}.{i}.{kind}" for i in range(n_layers) for kind in ("key", "value")]


def graph_inputs(config: ModelConfig, dtype: DType, phase: Phase) -> list[TensorSignature]:
    """The graph's inputs in order; ``prefill`` has no ``past_lengths`` (it writes from slot 0)."""
    inputs = [TensorSignature(INPUT_IDS, "int64", ("batch", "sequence"))]
    if phase == "decode":
        inputs.append(TensorSignature(PAST_LENGTHS, "int64", ("batch",)))
    inputs.append(TensorSignature(LOGIT_POSITIONS, "int64", ("batch", "num_logits")))
    return inputs + _caches(config, dtype, "past_key_values")


def graph_outputs(config: ModelConfig, dtype: DType) -> list[TensorSignature]:
    """The graph's outputs in order; each ``present`` shares its buffer with the ``past`` of the same name."""
    return [TensorSignature(LOGITS, "fp32", ("batch", "num_logits", config.vocab_size)), *_caches(config, dtype, "present")]


def _caches(config: ModelConfig, dtype: DType, prefix: Literal["past_key_values", "present"]) -> list[TensorSignature]:
    dims = ("batch", config.n_kv_heads, "capacity", config.head_dim)
    return [TensorSignature(name, dtype, dims) for name in cache_names(config.n_layers, prefix)]


def cache_bytes_per_token(config: ModelConfig, dtype: DType) -> int:
    """Bytes that one token occupies in one row's caches, all layers, keys and values."""
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * (4 if dtype == "fp32" else 2)
