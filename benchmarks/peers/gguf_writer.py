"""A float32 GGUF file from a Hugging Face checkpoint of family llama or gpt2 (llama-cpp-python ships no converter)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

_LLAMA = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_GPT2 = {
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}  # fmt: skip


def write_gguf(checkpoint: Path, path: Path) -> None:
    """Writes all tensors as float32 and no vocabulary: prompts are token ids.

    Raises:
        ValueError: The checkpoint's family is another one.
    """
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    family = config["model_type"]
    if family not in ("llama", "gpt2"):
        raise ValueError(f"model_type {family!r}: only llama and gpt2 are written as GGUF")
    writer = gguf.GGUFWriter(str(path), family, use_temp_file=False)
    (_llama_fields if family == "llama" else _gpt2_fields)(writer, config)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    for name, array in (_llama_tensors if family == "llama" else _gpt2_tensors)(checkpoint, config):
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama_fields(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _gpt2_fields(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _llama_tensors(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, array in _stored(checkpoint):
        stem, kind = name.rsplit(".", 1)
        if stem == "lm_head" and config["tie_word_embeddings"]:
            continue
        if stem in whole:
            yield f"{whole[stem]}.{kind}", array
            continue
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        target = _LLAMA[part]
        if target in heads:
            # GGUF's llama holds the two halves of each rotated pair side by side.
            shape = (heads[target], 2, array.shape[0] // heads[target] // 2, *array.shape[1:])
            array = array.reshape(shape).swapaxes(1, 2).reshape(array.shape)
        yield f"blk.{layer}.{target}.{kind}", array


def _gpt2_tensors(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    whole = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
    for name, array in _stored(checkpoint):
        stem, kind = name.removeprefix("transformer.").rsplit(".", 1)
        if stem in whole:
            yield f"{whole[stem]}.{kind}", array
        elif stem.startswith("h."):
            _, layer, part = stem.split(".", 2)
            # Conv1D stores [in, out].
            yield f"blk.{layer}.{_GPT2[part]}.{kind}", array.T if array.ndim == 2 else array


def _stored(checkpoint: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    import numpy as np
    from safetensors import safe_open

    with safe_open(str(checkpoint / "model.safetensors"), "np") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, np.ascontiguousarray(file.get_tensor(name), dtype=np.float32)
