"""A small hot model of every family in transformers, and how ours is compared with it."""

from __future__ import annotations

import torch
import transformers

# model_type → (config class, model class, a small base config).
_WIDE = {
    "vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GPT = {
    "vocab_size": 131, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_FULL = {key: value for key, value in _WIDE.items() if key != "num_key_value_heads"}
_HEAD = {"head_dim": 16}
BASES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("GPT2", _GPT),
    "gpt_bigcode": ("GPTBigCode", _GPT),
    "gpt_neox": ("GPTNeoX", _FULL),
    "gptj": ("GPTJ", _GPT | {"rotary_dim": 8}),
    "opt": ("OPT", {key: value for key, value in _FULL.items() if key != "intermediate_size"} | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "bloom": ("Bloom", {"vocab_size": 131, "hidden_size": 64, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}),
    "falcon": ("Falcon", {k: v for k, v in _FULL.items() if k != "intermediate_size"} | {"ffn_hidden_size": 96}),
    "llama": ("Llama", _WIDE),
    "mistral": ("Mistral", _WIDE),
    "qwen2": ("Qwen2", _WIDE),
    "qwen3": ("Qwen3", _WIDE | _HEAD),
    "gemma": ("Gemma", _WIDE | _HEAD),
    "gemma2": ("Gemma2", _WIDE | _HEAD | {"query_pre_attn_scalar": 24, "sliding_window": 16}),
    "gemma3_text": ("Gemma3", _WIDE | _HEAD | {"query_pre_attn_scalar": 24, "sliding_window": 16}),
    "phi": ("Phi", _WIDE),
    "phi3": ("Phi3", _WIDE),
    "starcoder2": ("Starcoder2", _WIDE),
    "stablelm": ("StableLm", _WIDE),
    "granite": ("Granite", _WIDE),
    "cohere": ("Cohere", _WIDE),
    "olmo2": ("Olmo2", _WIDE),
    "smollm3": ("SmolLM3", _WIDE),
}  # fmt: skip
_CONFIGS, _MODELS = {"gemma3_text": "Gemma3TextConfig"}, {"gpt2": "GPT2LMHeadModel"}


def hot_model(family: str, seed: int = 0, **changes: object) -> transformers.PreTrainedModel:
    """A model from a fresh config whose weights hide nothing: matrices N(0, 0.15), biases N(0, 0.2), norms 1 + 0.2 N(0, 1)."""
    stem, base = BASES[family]
    config_class = getattr(transformers, _CONFIGS.get(family, f"{stem}Config"))
    config = config_class(**(base | changes), attn_implementation="eager")
    model = getattr(transformers, _MODELS.get(family, f"{stem}ForCausalLM"))(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = ("norm" in name or "ln_" in name) and not name.endswith("bias")
            if is_norm:
                parameter.normal_(0.0 if family.startswith("gemma") else 1.0, 0.2, generator=generator)
            else:
                parameter.normal_(0, 0.15 if parameter.ndim > 1 else 0.2, generator=generator)
    return model


@torch.no_grad()
def logits_of(model: transformers.PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V] of one full pass, the attention mask given."""
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
