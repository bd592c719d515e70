"""Writes a transformers model as llama.cpp's converter does: names from the gguf package, values turned as that converter turns them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import MODEL_ARCH

Keys = Callable[[gguf.GGUFWriter], None]
ARCHITECTURES = {
    "gpt2": MODEL_ARCH.GPT2, "gpt_bigcode": MODEL_ARCH.STARCODER, "gpt_neox": MODEL_ARCH.GPTNEOX, "gptj": MODEL_ARCH.GPTJ,
    "bloom": MODEL_ARCH.BLOOM, "falcon": MODEL_ARCH.FALCON, "llama": MODEL_ARCH.LLAMA, "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3, "gemma": MODEL_ARCH.GEMMA, "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3, "phi": MODEL_ARCH.PHI2, "phi3": MODEL_ARCH.PHI3, "starcoder2": MODEL_ARCH.STARCODER2,
    "stablelm": MODEL_ARCH.STABLELM, "granite": MODEL_ARCH.GRANITE, "cohere": MODEL_ARCH.COMMAND_R, "olmo2": MODEL_ARCH.OLMO2,
    "olmo3": MODEL_ARCH.OLMO2, "smollm3": MODEL_ARCH.SMOLLM3,
}  # fmt: skip
_PERMUTED = ("llama", "mistral", "granite", "smollm3")
_LAYER_NORM = ("gpt2", "gpt_bigcode", "gpt_neox", "gptj", "bloom", "falcon", "phi", "starcoder2", "stablelm", "cohere")


def write_gguf(
    path: Path, model: transformers.PreTrainedModel, kind: str = "F32", keys: Keys | None = None, without: str = ""
) -> Path:
    """The model in one file, its matrices quantised as ``kind``; ``keys`` adds to its metadata, ``without`` is a tensor left out."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_keys(writer, config)
    if keys is not None:
        keys(writer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, data in _tensors(model):
        if config.model_type == "bloom":
            name = name.removeprefix("transformer.")
        stored = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        assert stored != name or name.startswith("rope_"), f"the gguf package has no name for {name}"
        if stored == without:
            continue
        quantised = gguf.GGMLQuantizationType[kind if data.ndim > 1 and "norm" not in stored else "F32"]
        writer.add_tensor(stored, gguf.quants.quantize(np.ascontiguousarray(data), quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def round_weights(model: transformers.PreTrainedModel, kind: str) -> None:
    """The model's matrices become what a file of that kind holds: blocks lie along a row, as it is stored."""
    quantised = gguf.GGMLQuantizationType[kind]
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            turned = model.config.model_type == "gpt2" and any(part in name for part in ("c_attn", "c_proj", "c_fc"))
            rows = np.ascontiguousarray(parameter.detach().numpy().T if turned else parameter.detach().numpy())
            values = gguf.quants.dequantize(gguf.quants.quantize(rows, quantised), quantised).astype(np.float32)
            parameter.data = torch.from_numpy(np.ascontiguousarray(values.T if turned else values))


def _write_keys(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig) -> None:
    family, heads, width = config.model_type, config.num_attention_heads, config.hidden_size
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(getattr(config, "max_position_embeddings", 128))
    writer.add_embedding_length(width)
    inner = [getattr(config, key, None) for key in ("intermediate_size", "ffn_hidden_size", "n_inner")]
    writer.add_feed_forward_length(next((size for size in inner if size), 4 * width))
    writer.add_head_count(heads)
    if family not in ("gpt2", "gpt_neox", "gptj"):
        writer.add_head_count_kv(_kv_heads(config))
    eps = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "rms_norm_eps")
    value = next(getattr(config, key) for key in eps if hasattr(config, key))
    (writer.add_layer_norm_eps if family in _LAYER_NORM else writer.add_layer_norm_rms_eps)(value)
    if getattr(config, "head_dim", None) and family != "gptj" and not family.startswith("falcon"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    _write_rope(writer, config)
    if family in ("gpt_neox", "stablelm"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if family == "falcon":
        writer.add_tensor_data_layout("jploski")
    _write_windows(writer, config)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if family.startswith("gemma2") or getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "cohere":
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if family == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family in _PERMUTED:
        writer.add_vocab_size(config.vocab_size)


def _write_windows(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig) -> None:
    if config.model_type in ("gemma2", "gemma3_text", "phi3", "olmo3"):
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "olmo3":
        windowed = [kind == "sliding_attention" for kind in config.layer_types]
        if windowed != [layer % 4 != 3 for layer in range(len(windowed))]:  # files of OLMo 2 that had windows lack the pattern
            writer.add_sliding_window_pattern(windowed)


def _write_rope(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig) -> None:
    if config.model_type == "gptj":
        writer.add_rope_dimension_count(config.rotary_dim)
    ropes = getattr(config, "rope_parameters", None) or {}
    rope = ropes.get("full_attention", ropes)
    if not rope:
        return
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = rope.get("partial_rotary_factor", 1.0)
    if share != 1 or config.model_type in (*_PERMUTED, "phi3"):
        writer.add_rope_dimension_count(int(share * dim))
    if config.model_type not in ("gpt_neox", "phi", "stablelm"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if original:
        writer.add_rope_scaling_orig_ctx_len(original)
    if kind == "yarn":
        for key, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor), ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):  # fmt: skip
            if rope.get(key) is not None:
                add(rope[key])
    if kind == "longrope":
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0)


def _kv_heads(config: transformers.PreTrainedConfig) -> int:
    if config.model_type == "gpt_bigcode":
        return 1
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return 1 if config.multi_query else config.num_attention_heads
    return getattr(config, "num_kv_heads", None) or getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _tensors(model: transformers.PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """Names of transformers (with those of norms that are stacked, without the head's number) and values as they are stored."""
    config, family = model.config, model.config.model_type
    heads, kv_heads = config.num_attention_heads, _kv_heads(config)
    stacked: dict[str, list[np.ndarray]] = {}
    for name, parameter in model.named_parameters():
        data = parameter.detach().numpy()
        if family == "gpt2" and data.ndim > 1 and any(part in name for part in ("c_attn", "c_proj", "c_fc")):
            data = data.T
        if family in _PERMUTED and ("q_proj" in name or "k_proj" in name):
            data = permuted(data, heads if "q_proj" in name else kv_heads)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        if family in ("bloom", "gpt_neox") and "query_key_value" in name:
            data = data.reshape(heads, 3, -1, *data.shape[1:]).swapaxes(0, 1).reshape(data.shape)
        if family == "falcon" and "query_key_value" in name:
            groups = data.reshape(kv_heads, heads // kv_heads + 2, -1, *data.shape[1:])
            parts = groups[:, :-2], groups[:, -2], groups[:, -1]
            data = np.concatenate([part.reshape(-1, *data.shape[1:]) for part in parts])
        if ".norms." in name:
            stacked.setdefault(name.split(".norms.")[0] + ".weight", []).append(data)
            continue
        yield name, data
    for name, rows in stacked.items():
        yield name, np.stack(rows)
    yield from _rope_tensors(model)


def _rope_tensors(model: transformers.PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32)
    if rope.get("rope_type") == "llama3":
        dim = config.hidden_size // config.num_attention_heads
        plain = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
        yield "rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of query and key with the two halves of a head interleaved."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
