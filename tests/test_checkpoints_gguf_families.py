"""Every architecture that GGUF carries: hot models of transformers, written as llama.cpp's converter writes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from families import BASES, hot_model, logits_of
from gguf_files import ARCHITECTURES, round_weights, write_gguf

from tformer_deploy.checkpoints import open_checkpoint
from tformer_deploy.errors import InputError
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
        "rope_parameters": YARN | {
            "rope_theta": 1e4, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 4.0, "original_max_position_embeddings": 4096,
        },
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
    "phi3 longrope": ("phi3", {"rope_parameters": LONGROPE | {"rope_theta": 10000.0}, "original_max_position_embeddings": 64}),
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
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    scaled = {"rope_parameters": {"full_attention": YARN | {"rope_theta": 10000.0}, "sliding_attention": plain}}
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    for changes, layers in (({}, (0, 1, 2, 4)), (scaled | {"layer_types": kinds}, (1, 2, 4))):
        model = hot_model("olmo3", num_hidden_layers=5, sliding_window=16, **changes)
        path = write_gguf(tmp_path / "model.gguf", model)
        assert open_checkpoint(path).config.window_layers == layers
        assert error(path, model) < 1e-4


# Sizes at which transformers' own loader, which has fewer keys than the files, falls back on defaults that fit.
LOADED: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
    "gpt2": {"vocab_size": 50257, "n_positions": 1024},
    "bloom": {},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": 7},
    "phi3": {"vocab_size": 32064},
    "starcoder2": {"vocab_size": 49152},
    "stablelm": {},
}


@pytest.mark.parametrize("family", LOADED)
def test_logits_when_transformers_reads_the_same_file_then_are_equal(family: str, tmp_path: Path):
    def sizes(writer: gguf.GGUFWriter) -> None:
        if family not in ("llama", "mistral"):
            writer.add_vocab_size(model.config.vocab_size)

    model = hot_model(family, **LOADED[family])
    path = write_gguf(tmp_path / "model.gguf", model, keys=sizes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, attn_implementation="eager", dtype=torch.float32
    ).eval()
    assert error(path, theirs) < 1e-4


FAMILIES = [family for family in ARCHITECTURES if family != "olmo3"]
SMALL: dict[str, dict[str, object]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": None},
    "phi": {"num_key_value_heads": 4},
}


def small_model(family: str) -> transformers.PreTrainedModel:
    return hot_model(family, **SMALL.get(family, {}))


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_when_the_file_is_quantised_then_equal_those_of_its_values(family: str, kind: str, tmp_path: Path):
    model = small_model(family)
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    assert error(path, model) > 1e-4
    round_weights(model, kind)
    assert error(path, model) < 1e-4
    dtypes = {spec.dtype for name, spec in open_checkpoint(path).tensors.items() if name.endswith("up.weight")}
    assert dtypes == {"fp16" if kind == "F16" else "fp32"}


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_when_cut_anywhere_then_is_refused(family: str, tmp_path: Path):
    content = write_gguf(tmp_path / "model.gguf", small_model(family)).read_bytes()
    header = content.rindex(b".weight")
    for end in (0, 4, 20, header // 3, header // 2, header, header + 30, len(content) // 2, len(content) - 32):
        (tmp_path / "model.gguf").write_bytes(content[:end])
        with pytest.raises(InputError):
            open_checkpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_when_a_tensor_of_a_block_is_left_out_then_is_refused_by_name(family: str, tmp_path: Path):
    model = small_model(family)
    reader = gguf.GGUFReader(write_gguf(tmp_path / "model.gguf", model))
    names = [tensor.name for tensor in reader.tensors if tensor.name.startswith("blk.1.") or "norm" in tensor.name]
    assert len(names) > 8
    for name in names:
        if not name.startswith(("blk.0.", "blk.2.")):
            with pytest.raises(InputError, match=f"missing: {name}"):
                open_checkpoint(write_gguf(tmp_path / "part.gguf", model, without=name))


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_when_it_has_a_key_or_experts_that_nothing_reads_then_is_refused_by_name(family: str, tmp_path: Path):
    model, name = small_model(family), gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]]
    for add, message in (
        (lambda writer: writer.add_float32(f"{name}.attention.clamp_kqv", 8.0), r"attention\.clamp_kqv = 8\.0"),
        (lambda writer: writer.add_expert_count(8), r"a mixture of experts \(expert_count\)"),
    ):
        with pytest.raises(InputError, match=message):
            open_checkpoint(write_gguf(tmp_path / "model.gguf", model, keys=add))


def test_config_when_read_from_a_gguf_then_is_that_of_the_folder(tmp_path: Path):
    for family in ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2", "phi", "granite", "cohere", "bloom"):
        model = small_model(family)
        model.save_pretrained(tmp_path / family)
        folder = open_checkpoint(tmp_path / family, 128).config
        file = open_checkpoint(write_gguf(tmp_path / f"{family}.gguf", model), 128).config
        if family in ("gemma2", "gemma3_text"):  # the folder says the width of a head, the file leaves it to the default
            assert folder.attention_scale == folder.head_dim**-0.5
            folder = dataclasses.replace(folder, attention_scale=None)
        assert file == folder, family


def test_rows_when_a_window_or_long_divisors_cannot_be_had_then_are_bounded_with_a_warning(tmp_path: Path):
    model = hot_model("starcoder2", max_position_embeddings=8192)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", model))
    assert checkpoint.config.max_length == 4096
    assert any("lacks the window of 4096 tokens" in warning for warning in checkpoint.warnings)
    model = hot_model("phi3", **CASES["phi3 longrope"][1])
    assert model.model.rotary_emb.attention_scaling > 1.05
    checkpoint = open_checkpoint(write_gguf(tmp_path / "model.gguf", model))
    assert checkpoint.config.max_length == 64
    assert any("exact up to 64 tokens" in warning for warning in checkpoint.warnings)


def test_keys_when_early_converters_left_them_then_change_nothing(tmp_path: Path):
    for family, add in (
        ("qwen2", lambda writer: writer.add_parallel_residual(True)),
        ("llama", lambda writer: writer.add_tensor_data_layout("Meta AI original pth")),
    ):
        model = small_model(family)
        assert error(write_gguf(tmp_path / "m.gguf", model, keys=add), model) < 1e-4


def test_granite_when_its_rotary_positions_are_switched_off_then_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"rope\.scaling\.finetuned is false"):
        open_checkpoint(
            write_gguf(tmp_path / "m.gguf", hot_model("granite"), keys=lambda writer: writer.add_rope_scaling_finetuned(False))
        )


def test_windows_when_the_file_has_a_pattern_then_it_decides(tmp_path: Path):
    model = hot_model("gemma2", **SMALL["gemma2"])
    for pattern, layers in (([True, True, False], (0, 1)), (3, (0, 1)), (1, ())):
        path = write_gguf(tmp_path / "m.gguf", model, keys=lambda writer, p=pattern: writer.add_sliding_window_pattern(p))
        assert open_checkpoint(path).config.window_layers == layers
    with pytest.raises(InputError, match=r"sliding_window_pattern has 2 items; expected 3"):
        open_checkpoint(
            write_gguf(tmp_path / "m.gguf", model, keys=lambda writer: writer.add_sliding_window_pattern([True, False]))
        )
