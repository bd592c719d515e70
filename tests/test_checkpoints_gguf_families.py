"""Every architecture that GGUF carries: hot models of transformers, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import BASES, hot_model, logits_of
from gguf_files import ARCHITECTURES, write_gguf

from tformer_deploy.checkpoints import open_checkpoint
from tformer_deploy.reference import Decoder

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2 untied, eps": ("gpt2", {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox sequential, all dims": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0}),
    "gptj": ("gptj", {}),
    "bloom": ("bloom", {}),
    "bloom six heads": ("bloom", {"n_head": 6, "hidden_size": 96}),
    "falcon one norm": ("falcon", {}),
    "falcon two norms": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon grouped, one norm": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "llama": ("llama", {}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 20000.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN | {"rope_theta": 1e6}}),
    "qwen2 yarn attention factor": ("qwen2", {
        "rope_parameters": YARN | {"rope_theta": 1e4, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    }),
    "qwen3": ("qwen3", {}),
    "qwen3 one kv head, wide heads": ("qwen3", {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 16, "num_hidden_layers": 7}),
    "gemma3 linear, capped": ("gemma3_text", {
        "query_pre_attn_scalar": 16, "num_hidden_layers": 7, "final_logit_softcapping": 20.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {}),
    "phi3 window": ("phi3", {"sliding_window": 16}),
    "phi3 longrope": ("phi3", {"rope_parameters": LONGROPE | {"rope_theta": 10000.0}}),
    "phi3 partial": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2 without biases": ("starcoder2", {"use_bias": False}),
    "stablelm": ("stablelm", {}),
    "stablelm parallel, head norms, biases": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    "granite": ("granite", {
        "attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 5.0,
    }),
    "cohere": ("cohere", {}),
    "cohere head norms": ("cohere", {"use_qk_norm": True}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
}  # fmt: skip


def ids(length: int = 48) -> torch.Tensor:
    return torch.randint(3, 131, (2, length), generator=torch.Generator().manual_seed(1))


def error(path: Path, model: torch.nn.Module) -> float:
    """Largest difference of logits over two full sequences, by the Decoder of the file and a model in memory."""
    expected = logits_of(model, ids())
    assert float(expected.abs().max()) > 0.3
    with torch.no_grad():
        return float((Decoder.from_pretrained(path)(ids()) - expected).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_logits_when_a_gguf_is_opened_then_equal_transformers(case: str, tmp_path: Path):
    family, changes = CASES[case]
    model = hot_model(family, **changes)
    assert error(write_gguf(tmp_path / "model.gguf", model), model) < 1e-4


def test_olmo3_when_stored_as_olmo2_with_windows_then_equals_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(BASES, "olmo3", ("Olmo3", BASES["olmo2"][1]))
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    for parameters in (None, {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}):
        more = {"rope_parameters": parameters} if parameters else {}
        model = hot_model("olmo3", num_hidden_layers=5, sliding_window=16, **more)
        path = write_gguf(tmp_path / "model.gguf", model)
        assert open_checkpoint(path).config.window_layers == (0, 1, 2, 4)
        assert error(path, model) < 1e-4
