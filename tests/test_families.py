"""Every family against transformers (fp32, hot weights): the reference in every form, the graphs in at least one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
from families import BASES, hot_model, logits_of  # noqa: E402

import tformer_deploy  # noqa: E402
from tformer_deploy.backends import open_session  # noqa: E402
from tformer_deploy.bundle import open_bundle  # noqa: E402
from tformer_deploy.checkpoints import open_checkpoint  # noqa: E402
from tformer_deploy.checkpoints.families import FAMILIES  # noqa: E402
from tformer_deploy.errors import InputError  # noqa: E402
from tformer_deploy.reference import Decoder  # noqa: E402

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [2 + 0.3 * i for i in range(8)],
    "rope_theta": 10000.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def rope(kind: str = "default", theta: float = 10000.0, **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


FORMS: list[tuple[str, dict[str, object]]] = [
    *((family, {}) for family in BASES),
    *((family, {"vocab_size": 97}) for family in BASES),
    ("gpt2", {"scale_attn_weights": False, "tie_word_embeddings": False}),
    ("gpt2", {"n_inner": 100, "layer_norm_epsilon": 1e-3, "activation_function": "gelu"}),
    ("gpt2", {"activation_function": "gelu_fast"}),
    ("gpt2", {"activation_function": "relu", "n_head": 1}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_bigcode", {"tie_word_embeddings": False, "scale_attn_weights": False, "n_head": 8}),
    ("gpt_bigcode", {"n_head": 1}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {"attention_bias": False, **rope("linear", 5000.0, factor=2.0, partial_rotary_factor=0.5)}),
    ("gpt_neox", rope(partial_rotary_factor=1.0)),
    ("gpt_neox", rope(partial_rotary_factor=0.3)),
    ("gptj", {"rotary_dim": 16}),
    ("gptj", {"rotary_dim": 4, "n_inner": 70, "tie_word_embeddings": True}),
    ("opt", {"enable_bias": False, "tie_word_embeddings": False}),
    ("opt", {"activation_function": "gelu", "num_attention_heads": 1}),
    ("bloom", {"n_head": 6, "hidden_size": 96}),
    ("bloom", {"n_head": 1}),
    ("bloom", {"n_head": 16, "tie_word_embeddings": False}),
    ("falcon", {"multi_query": False}),
    ("falcon", {"alibi": True}),
    ("falcon", {"alibi": True, "multi_query": False, "num_attention_heads": 6, "hidden_size": 96, "parallel_attn": False, "bias": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4, "num_attention_heads": 8, "tie_word_embeddings": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True}),
    ("falcon", {"parallel_attn": False, "activation": "gelu_pytorch_tanh"}),
    ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96}),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "hidden_act": "gelu"}),
    ("llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 8, "num_key_value_heads": 4, "hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"head_dim": 256, "num_hidden_layers": 1}),
    ("llama", {"head_dim": 10, **rope(theta=500000.0)}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": YARN | {"truncate": False}}),
    ("llama", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "beta_fast": 16, "beta_slow": 2}}),
    ("llama", rope("linear", factor=4.0)),
    ("llama", rope("dynamic", factor=6.0)),
    ("mistral", {"sliding_window": 16}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 1, "head_dim": 8}),
    ("mistral", {"sliding_window": 1000}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32, "attention_bias": True}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "tie_word_embeddings": True}),
    ("gemma", {"hidden_act": "gelu"}),
    ("gemma", {"hidden_activation": "gelu", "head_dim": 24}),
    ("gemma", {"attention_bias": True, "tie_word_embeddings": False, "head_dim": 256, "num_key_value_heads": 1}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "hidden_activation": "gelu"}),
    ("gemma2", {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 5}),
    ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 8}),
    ("gemma3_text", {"sliding_window": 8, "final_logit_softcapping": 4.0, "layer_types": ["full_attention", "sliding_attention", "full_attention"], "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}),
    ("gemma3_text", {"layer_types": ["full_attention"] * 3}),
    ("phi", {"qk_layernorm": True}),
    ("phi", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("phi3", {"sliding_window": 8}),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    ("phi3", rope(partial_rotary_factor=0.5)),
    ("starcoder2", {"use_bias": False, "sliding_window": 8, "tie_word_embeddings": False}),
    ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, **rope(partial_rotary_factor=1.0)}),
    ("granite", {"embedding_multiplier": 12.0, "attention_multiplier": 0.0078, "residual_multiplier": 0.22, "logits_scaling": 8.0}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "attention_multiplier": 0.3}),
    ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    ("cohere", {"logit_scale": 1.0, "tie_word_embeddings": False, "num_key_value_heads": 1}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    ("smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 8}),
    ("smollm3", {"num_hidden_layers": 5, "mlp_bias": True, "attention_bias": True}),
]  # fmt: skip


def form_id(form: tuple[str, dict[str, object]]) -> str:
    return f"{form[0]} {json.dumps(form[1])}"[:120]


def oracle(family: str, changes: dict[str, object], seed: int = 0) -> torch.nn.Module:
    model = hot_model(family, seed, **changes)
    if changes.get("alibi"):
        # Eager Falcon adds ALiBi in the mask and to the scores; its sdpa adds it once, as the models were trained.
        model.config._attn_implementation = "sdpa"
    return model


@pytest.mark.parametrize("form", FORMS, ids=form_id)
@torch.no_grad()
def test_reference_when_a_transformers_model_is_opened_then_has_its_logits(form, tmp_path: Path):
    family, changes = form
    for seed, shape in ((0, (2, 48)), (1, (1, 1)), (2, (3, 17))):
        model = oracle(family, changes, seed)
        model.save_pretrained(tmp_path / str(seed))
        ids = torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
        decoder = Decoder.from_pretrained(tmp_path / str(seed))
        assert float((decoder(ids) - logits_of(model, ids)).abs().max()) < 1e-4


def test_families_when_listed_then_each_is_compared():
    assert set(FAMILIES) == {*BASES, "tformer"}
    assert all(family.name == name for name, family in FAMILIES.items())


# One form a family whose features a graph must hold, and those that change the graph.
GRAPHS: list[tuple[str, dict[str, object]]] = [
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt_bigcode", {}),
    ("gpt_neox", {}),
    ("gptj", {}),
    ("opt", {}),
    ("bloom", {"n_head": 6, "hidden_size": 96}),
    ("falcon", {"alibi": True, "multi_query": False}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("llama", {"rope_parameters": YARN, "num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96}),
    ("mistral", {"sliding_window": 16}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 32}),
    ("gemma", {"head_dim": 256, "num_key_value_heads": 1}),
    ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 8}),
    ("phi", {"qk_layernorm": True}),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    ("starcoder2", {"sliding_window": 8}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    (
        "granite",
        {"embedding_multiplier": 12.0, "attention_multiplier": 0.0078, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    ),
    ("cohere", {"use_qk_norm": True}),
    ("olmo2", {}),
    ("smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 8}),
]
LENGTHS, STEPS = (9, 3, 17, 33), 8


@pytest.mark.parametrize("form", GRAPHS, ids=form_id)
@torch.no_grad()
def test_graphs_when_run_on_ragged_rows_then_have_the_logits_of_transformers(form, tmp_path: Path):
    model = oracle(*form)
    model.save_pretrained(tmp_path / "model")
    path = tformer_deploy.export(tmp_path / "model", tmp_path / "bundle", check=False)
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randint(0, 131, (n + STEPS,), generator=generator) for n in LENGTHS]
    wanted = [logits_of(model, row[None])[0].numpy() for row in rows]
    session = open_session(open_bundle(path))
    found = [session.prefill([row[:n].tolist() for row, n in zip(rows, LENGTHS, strict=True)], capacity=max(LENGTHS) + STEPS)]
    for step in range(STEPS):
        found.append(session.decode([int(row[n + step]) for row, n in zip(rows, LENGTHS, strict=True)]))
    for i, n in enumerate(LENGTHS):
        worst = max(float(np.abs(logits[i] - wanted[i][n - 1 + step]).max()) for step, logits in enumerate(found))
        assert worst < 1e-4, (n, worst)


def edited(path: Path, **changes: object) -> Path:
    config = json.loads((path / "config.json").read_text("utf-8"))
    for key, value in changes.items():
        config.pop(key, None) if value is KeyError else config.update({key: value})
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return path


_OLD_YARN = {key: value for key, value in YARN.items() if key not in ("rope_theta", "rope_type")} | {"type": "yarn"}
_OLD_LONGROPE = {key: LONGROPE[key] for key in ("short_factor", "long_factor")}
# Family, its config in the new spelling, and the same in the old one.
OLD: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {
    "neox": ("gpt_neox", rope(theta=5000.0, partial_rotary_factor=0.5), {"rotary_pct": 0.5, "rotary_emb_base": 5000}),
    "neox, nothing said": ("gpt_neox", {}, {}),
    "phi": ("phi", rope(theta=5000.0, partial_rotary_factor=0.25), {"partial_rotary_factor": 0.25, "rope_theta": 5000.0, "rope_scaling": None}),
    "phi, nothing said": ("phi", {}, {}),
    "stablelm": ("stablelm", rope(theta=5000.0, partial_rotary_factor=0.5), {"partial_rotary_factor": 0.5, "rope_theta": 5000.0}),
    "stablelm, nothing said": ("stablelm", {}, {}),
    "llama yarn": ("llama", {"rope_parameters": YARN}, {"rope_theta": 10000.0, "rope_scaling": _OLD_YARN}),
    "llama linear": ("llama", rope("linear", factor=2.0), {"rope_scaling": {"type": "linear", "factor": 2}}),
    "llama dynamic": ("llama", rope("dynamic", factor=2.0), {"rope_scaling": {"rope_type": "dynamic", "type": "dynamic", "factor": 2.0}}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}, {"rope_theta": 10000.0, "rope_scaling": _OLD_YARN}),
    "phi3 longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, {"rope_scaling": _OLD_LONGROPE | {"type": "longrope"}}),
    "phi3 su": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, {"rope_scaling": _OLD_LONGROPE | {"type": "su"}}),
    "cohere, nothing said": ("cohere", {}, {}),
    "smollm3, nothing said": ("smollm3", {}, {"no_rope_layers": KeyError, "layer_types": KeyError}),
    "gemma2 without layer types": ("gemma2", {}, {"layer_types": KeyError}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}}, {"layer_types": KeyError, "_sliding_window_pattern": KeyError, "sliding_window_pattern": 3, "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "gemma3, nothing said": ("gemma3_text", {"num_hidden_layers": 7}, {"layer_types": KeyError, "_sliding_window_pattern": KeyError}),
    "qwen2 without layer types": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, {"layer_types": KeyError}),
    "falcon, old names": ("falcon", {}, {"num_attention_heads": KeyError, "num_hidden_layers": KeyError, "n_head": 4, "n_layer": 3, "num_kv_heads": KeyError}),
    "bloom, other names": ("bloom", {}, {"hidden_size": KeyError, "n_embed": 64, "n_head": KeyError, "num_attention_heads": 4, "seq_length": 2048}),
}  # fmt: skip


@pytest.mark.parametrize("case", OLD)
@torch.no_grad()
def test_config_when_spelled_the_old_way_then_is_the_same_model(case: str, tmp_path: Path):
    family, new, old = OLD[case]
    model = hot_model(family, **new)
    model.save_pretrained(tmp_path)
    edited(tmp_path, rope_parameters=KeyError, **old)
    ids = torch.randint(0, 131, (2, 48), generator=torch.Generator().manual_seed(3))
    assert float((Decoder.from_pretrained(tmp_path)(ids) - logits_of(model, ids)).abs().max()) < 1e-4


BOUNDED = {
    "longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, 64),
    "dynamic": ("llama", rope("dynamic", factor=2.0), 128),
}


@pytest.mark.parametrize("case", BOUNDED)
def test_length_when_positions_change_with_it_then_is_bounded_and_said(case: str, tmp_path: Path):
    family, changes, bound = BOUNDED[case]
    hot_model(family, **changes).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.max_length == bound
    assert any("exact up to 64 tokens" in w for w in checkpoint.warnings) == (bound < 128)


def test_length_when_bloom_has_none_then_is_2048_or_what_is_given(tmp_path: Path):
    hot_model("bloom").save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).config.max_length == 2048
    assert any("--max-length" in w for w in open_checkpoint(tmp_path).warnings)
    assert open_checkpoint(tmp_path, 4096).config.max_length == 4096


REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "window of nothing": ("mistral", {"sliding_window": 0}, "sliding_window is 0; expected a whole number from 1"),
    "window below nothing": ("gemma2", {"sliding_window": -1}, "sliding_window is -1"),
    "window in some layers": ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "every layer or in none"),
    "too few layer types": ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 items; expected 3"),
    "unknown layer type": ("gemma3_text", {"layer_types": ["full_attention", "chunked_attention", []]}, "layer_types has 'chunked_attention'"),
    "window missing": ("gemma2", {"sliding_window": None}, "sliding_window is not set"),
    "odd share": ("gpt_neox", rope(partial_rotary_factor=0.2), "rotates 3 dims; expected an even number"),
    "no share": ("phi", rope(partial_rotary_factor=0.0), "rotates 0 dims"),
    "more than a head": ("stablelm", rope(partial_rotary_factor=1.5), "partial_rotary_factor is 1.5; expected a number from 0.0 to 1.0"),
    "odd rotary dim": ("gptj", {"rotary_dim": 5}, "rotary_dim is 5; expected an even number"),
    "rotary dim of another head": ("gptj", {"rotary_dim": 64}, "rotary_dim is 64; expected a whole number from 2 to 16"),
    "yarn without original": ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "lacks original_max_position_embeddings"),
    "yarn without factor": ("llama", {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 32}}, "lacks factor"),
    "linear with nothing": ("llama", rope("linear"), "lacks factor"),
    "linear with zero": ("llama", rope("linear", factor=0), "factor is 0"),
    "dynamic below zero": ("llama", rope("dynamic", factor=-1.0), "factor is -1"),
    "longrope of another width": ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE | {"short_factor": [1.0] * 7}}, "short_factor has 7 items; expected 8"),
    "longrope of zero": ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE | {"long_factor": [0.0] * 8}}, "long_factor has 8 items; expected 8 numbers above 0"),
    "longrope without long": ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": {k: v for k, v in LONGROPE.items() if k != "long_factor"}}, "lacks long_factor"),
    "post-norm": ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is false; only true is supported"),
    "projected embedding": ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim is 32; only 64 is supported"),
    "residual after the norm": ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is true"),
    "soft cap that is read and not used": ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; only null"),
    "both directions": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    "nope of another length": ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 items; expected 3"),
    "nope of something else": ("smollm3", {"no_rope_layers": [1, 0, 2]}, "of 0 or 1"),
    "logits by nothing": ("granite", {"logits_scaling": 0}, "logits_scaling is 0; expected a number above 0"),
    "kv heads of multi-query": ("gpt_bigcode", {"num_key_value_heads": 2}, "num_key_value_heads is 2; only 1 is supported"),
    "falcon norms": ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2"),
    "rope of a third kind": ("gemma3_text", {"rope_parameters": {"chunked_attention": {}}}, "rope_parameters has 'chunked_attention'"),
    "vision": ("gemma3_text", {"model_type": "gemma3"}, "model_type is 'gemma3'; supported are"),
    "experts": ("qwen3", {"num_experts": 8}, "a mixture of experts (num_experts)"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_config_when_it_cannot_be_exact_then_is_refused_by_name(case: str, tmp_path: Path):
    family, changes, message = REFUSED[case]
    hot_model(family).save_pretrained(tmp_path)
    with pytest.raises(InputError) as error:
        open_checkpoint(edited(tmp_path, **changes))
    assert message in str(error.value)


@pytest.mark.parametrize("family", ["gemma", "gptj", "cohere", "falcon", "opt"])
def test_tensors_when_stored_in_bf16_then_are_turned_in_float32_and_rounded_once(family: str, tmp_path: Path):
    model = hot_model(family).bfloat16()
    model.save_pretrained(tmp_path / "low")
    model.float().save_pretrained(tmp_path / "high")
    low, high = open_checkpoint(tmp_path / "low"), open_checkpoint(tmp_path / "high")
    for name in low.tensors:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(low.read(name, dtype), high.read(name, torch.float32).to(dtype)), (name, dtype)
