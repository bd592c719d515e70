"""Small hot models of transformers, each with what some fault needs to show."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from families import hot_model


@dataclass(frozen=True)
class Case:
    """A checkpoint.

    Attributes:
        family: Its ``model_type``.
        changes: What its config has other than the family's small base.
        edits: Keys of ``config.json`` that are then spelled otherwise; :class:`KeyError` removes one.
        embedding: The embedding is multiplied by it: where embeddings are scaled up, an epsilon shows on small ones only.
    """

    family: str
    changes: Mapping[str, object] = field(default_factory=dict)
    edits: Mapping[str, object] = field(default_factory=dict)
    embedding: float = 1.0

    def save(self, path: Path) -> transformers.PreTrainedModel:
        """Writes the checkpoint; returns the model that says what is right."""
        model = hot_model(self.family, **self.changes)
        if self.changes.get("alibi"):
            # Eager Falcon adds ALiBi in the mask and to the scores; its sdpa adds it once, as the models were trained.
            model.config._attn_implementation = "sdpa"
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(self.embedding)
        model.save_pretrained(path)
        config = json.loads((path / "config.json").read_text("utf-8"))
        for key, value in self.edits.items():
            config.pop(key, None) if value is KeyError else config.update({key: value})
        (path / "config.json").write_text(json.dumps(config), "utf-8")
        return model


def _rope(kind: str = "default", theta: float = 10000.0, **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


_SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
_LONGROPE = {
    "short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [2 + 0.3 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}  # fmt: skip
_NEVER_SAID = {"rope_parameters": KeyError}
_TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
CASES: dict[str, Case] = {
    "gpt2": Case("gpt2"),
    "gpt2 unscaled": Case("gpt2", {"scale_attn_weights": False}),
    "bigcode": Case("gpt_bigcode"),
    "bigcode heads": Case("gpt_bigcode", {"multi_query": False}),
    "neox": Case("gpt_neox"),
    "neox sequential": Case("gpt_neox", {"use_parallel_residual": False}),
    "neox old": Case(
        "gpt_neox", _rope(theta=5000.0, partial_rotary_factor=0.5), _NEVER_SAID | {"rotary_pct": 0.5, "rotary_emb_base": 5000}
    ),
    "gptj": Case("gptj"),
    "opt": Case("opt"),
    "bloom": Case("bloom"),
    "bloom six heads": Case("bloom", {"n_head": 6, "hidden_size": 96}),
    "falcon": Case("falcon"),
    "falcon heads": Case("falcon", {"multi_query": False}),
    "falcon grouped": Case("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon alibi": Case("falcon", {"alibi": True, "multi_query": False, "num_attention_heads": 12, "hidden_size": 96}),
    "llama": Case("llama"),
    "llama six heads": Case("llama", _SIX_HEADS),
    "llama eps": Case("llama", {"rms_norm_eps": 1e-3}),
    "llama says no theta": Case("llama", {}, _NEVER_SAID),
    "llama theta": Case("llama", _rope(theta=5e5)),
    "llama old theta": Case("llama", _rope(theta=5e5), _NEVER_SAID | {"rope_theta": 5e5}),
    "llama linear": Case("llama", _rope("linear", factor=4.0)),
    "llama old linear": Case("llama", _rope("linear", factor=4.0), _NEVER_SAID | {"rope_scaling": {"type": "linear", "factor": 4}}),
    "llama dynamic": Case("llama", _rope("dynamic", factor=6.0)),
    "llama llama3": Case("llama", _rope("llama3", **_LLAMA3)),
    "llama yarn": Case("llama", _rope("yarn", **_YARN)),
    "llama yarn untruncated": Case("llama", _rope("yarn", truncate=False, **_YARN)),
    "llama yarn mscale": Case("llama", _rope("yarn", mscale=0.7, mscale_all_dim=0.5, beta_fast=16, beta_slow=2, **_YARN)),
    "mistral": Case("mistral", {"sliding_window": 16}),
    "qwen2": Case("qwen2"),
    "qwen2 upper windows": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, {"layer_types": KeyError}
    ),
    "qwen2 windows off": Case(
        "qwen2", {"use_sliding_window": False}, {"layer_types": KeyError, "sliding_window": 8, "max_window_layers": 1}
    ),
    "qwen3": Case("qwen3", {"head_dim": 32}),
    "gemma": Case("gemma", {"hidden_size": 96}),
    "gemma faint": Case("gemma", embedding=0.02),
    "gemma2 faint": Case("gemma2", embedding=0.02),
    "gemma3 faint": Case("gemma3_text", embedding=0.02),
    "gemma gelu": Case("gemma", {"hidden_act": "gelu"}),
    "gemma2": Case("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma2 says no layers": Case("gemma2", {}, {"layer_types": KeyError}),
    "gemma3": Case(
        "gemma3_text",
        {
            "num_hidden_layers": 3, "sliding_window": 8, "rope_parameters": _TWO_BASES, "final_logit_softcapping": 4.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma3 says no layers": Case(
        "gemma3_text", {"num_hidden_layers": 7, "sliding_window": 8}, {"layer_types": KeyError, "_sliding_window_pattern": KeyError}
    ),
    "phi": Case("phi"),
    "phi norms": Case("phi", {"qk_layernorm": True}),
    "phi3": Case("phi3"),
    "phi3 longrope": Case("phi3", _rope("longrope", **_LONGROPE) | {"original_max_position_embeddings": 32}),
    "starcoder2": Case("starcoder2", {"sliding_window": 8}),
    "stablelm norms": Case("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    "granite": Case(
        "granite", {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 0.5}
    ),
    "cohere": Case("cohere", {"use_qk_norm": True}),
    "olmo2": Case("olmo2"),
    "smollm3": Case("smollm3", {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 8}),
    "smollm3 says no layers": Case("smollm3", {"num_hidden_layers": 5}, {"no_rope_layers": KeyError, "layer_types": KeyError}),
}  # fmt: skip


def ids(rows: int, length: int) -> torch.Tensor:
    """Token ids [rows, length], always the same."""
    return torch.randint(0, 131, (rows, length), generator=torch.Generator().manual_seed(1))
