"""Hugging Face folders: every fault is refused by name before a weight is used, and what is harmless is accepted."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BASES, hot_model
from safetensors.torch import load_file, save_file
from test_checkpoints_families import LLAMA3, difference, edit_config

from tformer_deploy.checkpoints import open_checkpoint
from tformer_deploy.checkpoints.families.tformer import write_checkpoint
from tformer_deploy.errors import InputError, TformerError
from tformer_deploy.parameters import parameter_shapes
from tformer_deploy.reference import Decoder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved hot models by name."""
    root = tmp_path_factory.mktemp("models")
    hot_model("llama").save_pretrained(root / "llama")
    hot_model("llama", tie_word_embeddings=True).save_pretrained(root / "tied")
    hot_model("llama").save_pretrained(root / "shards", max_shard_size="150KB")
    hot_model("gpt2").save_pretrained(root / "gpt2")
    return {path.name: path for path in root.iterdir()}


def copied(models: dict[str, Path], name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models[name], tmp_path / name))


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        open_checkpoint(path)
    assert str(caught.value).isprintable()
    return str(caught.value)


Q = "model.layers.1.self_attn.q_proj.weight"
ANY: Any = None
CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "string": ("llama", {"hidden_size": "64"}, "hidden_size is '64'; expected a whole number from 1 to 2147483647"),
    "float": ("llama", {"hidden_size": 64.0}, "hidden_size is 64.0; expected a whole number"),
    "truth": ("llama", {"hidden_size": True}, "hidden_size is true; expected a whole number"),
    "negative": ("llama", {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    "zero": ("gpt2", {"n_head": 0}, "n_head is 0"),
    "beyond 32 bits": ("llama", {"vocab_size": 2**63}, "vocab_size is 9223372036854775808"),
    "missing": ("llama", {"intermediate_size": KeyError}, "lacks intermediate_size"),
    "heads": ("llama", {"head_dim": KeyError, "num_attention_heads": 5}, "hidden_size is 64 and num_attention_heads 5"),
    "gpt2 heads": ("gpt2", {"n_head": 5}, "n_embd is 64 and n_head 5"),
    "kv heads": ("llama", {"num_key_value_heads": 3}, "n_heads is 4 and n_kv_heads 3"),
    "no kv heads": ("llama", {"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    "more kv heads": ("llama", {"num_key_value_heads": 8}, "n_heads is 4 and n_kv_heads 8"),
    "odd head": ("llama", {"head_dim": 15}, "of head_dim 15 rotates 15 dims; expected an even number"),
    "model type": ("llama", {"model_type": "mamba"}, "model_type is 'mamba'; supported are tformer, gpt2, "),
    "model type missing": ("llama", {"model_type": KeyError}, "model_type is None; supported are"),
    "model type of another kind": ("llama", {"model_type": ["llama"]}, "supported are tformer, gpt2, "),
    "architecture": ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "llama may have LlamaForCausalLM"),
    "own code": ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "code of its own (auto_map), which is never executed"),
    "remote code": ("llama", {"trust_remote_code": True}, "never executed"),
    "experts": ("llama", {"num_local_experts": 8}, "a mixture of experts (num_local_experts)"),
    "vision": ("llama", {"vision_config": {"a": 1}}, "a vision tower"),
    "latent attention": ("llama", {"kv_lora_rank": 512}, "multi-head latent attention"),
    "cross-attention": ("gpt2", {"add_cross_attention": True}, "cross-attention (add_cross_attention)"),
    "quantised": ("llama", {"quantization_config": {"quant_method": "gptq"}}, "the weights are quantised (gptq)"),
    "window": ("llama", {"sliding_window": 16}, "nothing here reads, so the model could mean something else: sliding_window = 16"),
    "window of nothing": ("llama", {"sliding_window": 0}, "sliding_window = 0"),
    "mixed layers": ("llama", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
    "unknown keys": ("llama", {"logit_softcap": 30.0, "embedding_multiplier": 12}, "embedding_multiplier = 12, logit_softcap = 30.0"),
    "activation": ("llama", {"hidden_act": "mish"}, "hidden_act is 'mish'; supported are silu"),
    "gpt2 activation": ("gpt2", {"activation_function": "tanh"}, "activation_function is 'tanh'"),
    "scale": ("gpt2", {"scale_attn_weights": 0}, "scale_attn_weights is 0; expected true or false"),
    "scale by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
    "length missing": ("llama", {"max_position_embeddings": KeyError}, "Give --max-length"),
    "length absurd": ("llama", {"max_position_embeddings": 10**9}, "max_position_embeddings 1000000000, above 16777216"),
    "length zero": ("gpt2", {"n_positions": 0}, "n_positions is 0; expected a whole number of at least 1"),
    "eps": ("llama", {"rms_norm_eps": 0}, "norm_eps is 0.0"),
    "rope kind": ("llama", {"rope_parameters": {"rope_type": "xpos", "rope_theta": 1e4}}, "rope_type is 'xpos'; supported are default, linear, dynamic, llama3, yarn"),
    "rope kind, old": ("llama", {"rope_parameters": KeyError, "rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope_type is 'mrope'; supported are default"),
    "rope by layer kind": ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    "rope factor missing": ("llama", {"rope_parameters": {k: v for k, v in LLAMA3.items() if k != "factor"}}, "lacks factor"),
    "rope factor zero": ("llama", {"rope_parameters": LLAMA3 | {"factor": 0}}, "rope.factor is 0.0"),
    "rope factor negative": ("llama", {"rope_parameters": LLAMA3 | {"factor": -8.0}}, "rope.factor is -8.0"),
    "rope factor text": ("llama", {"rope_parameters": LLAMA3 | {"factor": "8"}}, "factor is '8'; expected a number"),
    "rope original": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32.5}}, "is 32.5; expected a whole number"),
    "rope order": ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 0.5}}, "the high one must be above the low one"),
    "rope unknown": ("llama", {"rope_parameters": LLAMA3 | {"beta_fast": 32}}, "beta_fast"),
    "rope contradiction": ("llama", {"rope_theta": 500000.0}, "rope_theta is 500000.0 in one place and 10000.0 in rope_parameters"),
    "rope contradicting kinds": ("llama", {"rope_scaling": {"type": "default", "rope_type": "llama3"}}, "type 'default' and rope_type 'llama3'"),
    "rope contradicting spellings": ("llama", {"rope_scaling": LLAMA3}, "rope_type is 'llama3' in one place and 'default'"),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0 is supported"),
    "layers more": ("llama", {"num_hidden_layers": 4}, "missing: model.layers.3.input_layernorm.weight"),
    "layers fewer": ("llama", {"num_hidden_layers": 2}, "unused: model.layers.2.input_layernorm.weight"),
    "layers without end": ("llama", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647; expected a whole number from 1 to 10000"),
    "layers beyond the tensors": ("llama", {"num_hidden_layers": 9999}, "9999 layers, the weights hold 30 tensors"),
    "eos of another kind": ("llama", {"eos_token_id": "2"}, "eos_token_id is '2'"),
    "eos truth": ("llama", {"eos_token_id": [True]}, "eos_token_id is [True]"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_config_when_it_means_another_model_then_is_refused_by_name(case: str, models: dict[str, Path], tmp_path: Path):
    name, changes, message = CONFIGS[case]
    path = copied(models, name, tmp_path)
    edit_config(path, **changes)
    assert message in refusal(path)


HARMLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "null features": ("llama", {"quantization_config": None, "auto_map": None, "sliding_window": None, "num_local_experts": 0}),
    "old generation settings": ("gpt2", {"max_length": 20, "do_sample": True, "task_specific_params": {"a": {}}}),
    "reorder": ("gpt2", {"reorder_and_upcast_attn": True, "n_ctx": 128}),
    "full layers": ("llama", {"layer_types": ["full_attention"] * 3, "rope_interleaved": False, "pretraining_tp": 2}),
    "rope whole": ("llama", {"partial_rotary_factor": 1.0, "rope_theta": 10000}),
    "gelu": ("gpt2", {"activation_function": "gelu_pytorch_tanh"}),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_config_when_a_key_changes_nothing_then_is_the_same_model(case: str, models: dict[str, Path], tmp_path: Path):
    name, changes = HARMLESS[case]
    path = copied(models, name, tmp_path)
    edit_config(path, **changes)
    assert open_checkpoint(path).config == open_checkpoint(models[name]).config


OPTIONAL = {
    "llama": (
        [
            "rms_norm_eps",
            "hidden_act",
            "attention_bias",
            "mlp_bias",
            "tie_word_embeddings",
            "head_dim",
            "num_key_value_heads",
            "rope_parameters",
        ],
        {"num_key_value_heads": 4},
    ),
    "gpt2": (
        [
            "layer_norm_epsilon",
            "activation_function",
            "tie_word_embeddings",
            "n_inner",
            "scale_attn_weights",
            "reorder_and_upcast_attn",
        ],
        {},
    ),
}


@pytest.mark.parametrize("kind", OPTIONAL)
def test_config_when_optional_keys_are_absent_then_has_the_defaults_of_transformers(kind: str, tmp_path: Path):
    keys, changes = OPTIONAL[kind]
    hot_model(kind, **changes).save_pretrained(tmp_path)  # writes the defaults out
    expected = open_checkpoint(tmp_path).config
    edit_config(tmp_path, **dict.fromkeys(keys, KeyError))
    assert not set(keys) & set(json.loads((tmp_path / "config.json").read_text("utf-8")))
    assert open_checkpoint(tmp_path).config == expected


def test_length_when_the_config_has_none_then_max_length_stands_in(models: dict[str, Path], tmp_path: Path):
    path = copied(models, "llama", tmp_path)
    edit_config(path, max_position_embeddings=KeyError)
    assert open_checkpoint(path, max_length=64).config.max_length == 64
    assert open_checkpoint(models["llama"], max_length=64).config.max_length == 128


TENSORS: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], Any], tuple[str, ...]]] = {
    "one missing": ("llama", lambda t: t.pop(Q), ("1 missing: model.layers.1.self_attn.q_proj.weight",)),
    "no head": ("llama", lambda t: t.pop("lm_head.weight"), ("Add lm_head.weight to the weights", "set tie_word_embeddings to true")),
    "extra": ("llama", lambda t: t.update(extra=torch.zeros(2)), ("1 unused: extra (in model.safetensors)",)),
    "bias unread": ("llama", lambda t: t.update({Q.replace("weight", "bias"): torch.zeros(64)}), ("unused", "q_proj.bias")),
    "shape": ("llama", lambda t: t.update({Q: torch.zeros(32, 64)}), (f"{Q} (in model.safetensors) has [32, 64], expected [64, 64]",)),
    "dtype": ("llama", lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), (f"{Q} (in model.safetensors) is F8_E4M3, expected F32, F16 or BF16",)),
    "double": ("llama", lambda t: t.update({Q: t[Q].double()}), ("is F64",)),
    "several at once": (
        "llama", lambda t: (t.pop(Q), t.update({"../../x\n": torch.zeros(1), "model.norm.weight": torch.zeros(65)})),
        ("1 missing", "1 unused: ../../x\\n", "1 mis-shaped: model.norm.weight"),
    ),
    "twice under two names": ("llama", lambda t: t.update({Q.removeprefix("model."): t[Q].clone()}), ("1 stored twice",)),
    "tied head differs": ("tied", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}), ("lm_head.weight differs from model.embed_tokens.weight",)),
    "tied head of another shape": ("tied", lambda t: t.update({"lm_head.weight": torch.zeros(3, 64)}), ("lm_head.weight differs",)),
    "gpt2 untransposed": ("gpt2", lambda t: t.update({"transformer.h.0.mlp.c_fc.weight": torch.zeros(256, 64)}), ("has [256, 64], expected [64, 256]",)),
    "gpt2 position table": ("gpt2", lambda t: t.update({"transformer.wpe.weight": torch.zeros(64, 64)}), ("has [64, 64], expected [128, 64]",)),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_when_they_do_not_fit_the_config_then_all_are_listed(case: str, models: dict[str, Path], tmp_path: Path):
    name, edit, messages = TENSORS[case]
    path = copied(models, name, tmp_path)
    edit_tensors(path, edit)
    text = refusal(path)
    assert all(message in text for message in messages), text


def test_head_when_tied_and_equal_then_is_accepted(models: dict[str, Path], tmp_path: Path):
    path = copied(models, "tied", tmp_path)
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert difference(hot_model("llama", tie_word_embeddings=True), path) < 1e-4


def test_buffers_when_old_versions_stored_them_then_are_dropped(models: dict[str, Path], tmp_path: Path):
    gpt2, llama = copied(models, "gpt2", tmp_path), copied(models, "llama", tmp_path)
    mask = torch.ones(1, 1, 128, 128, dtype=torch.uint8)
    edit_tensors(
        gpt2, lambda t: t.update({"transformer.h.0.attn.bias": mask, "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)})
    )
    edit_tensors(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert difference(hot_model("gpt2"), gpt2) < 1e-4
    assert difference(hot_model("llama"), llama) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensor_when_not_finite_then_is_refused_with_counts_when_read(
    dtype: torch.dtype, models: dict[str, Path], tmp_path: Path
):
    path = copied(models, "llama", tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q] = tensors[Q].to(dtype)
        tensors[Q][0, :3] = torch.nan
        tensors[Q][1, 0] = -torch.inf

    edit_tensors(path, spoil)
    checkpoint = open_checkpoint(path)
    checkpoint.read("blocks.0.attention.query.weight")
    with pytest.raises(
        InputError, match=r"blocks\.1\.attention\.query\.weight \(model\..*q_proj.*\) has 3 NaN and 1 infinite values"
    ):
        checkpoint.read("blocks.1.attention.query.weight")


def test_tensor_when_all_zero_then_is_warned_of_once_read(models: dict[str, Path], tmp_path: Path):
    path = copied(models, "llama", tmp_path)
    edit_tensors(path, lambda t: t[Q].zero_())
    checkpoint = open_checkpoint(path)
    for name in [*checkpoint.tensors, "blocks.1.attention.query.weight"]:
        checkpoint.read(name)
    assert checkpoint.warnings == ("Tensor blocks.1.attention.query.weight is all zero.",)


def test_tensor_when_beyond_fp16_then_is_refused_with_its_value(models: dict[str, Path], tmp_path: Path):
    path = copied(models, "llama", tmp_path)
    edit_tensors(path, lambda t: t[Q].view(-1)[7].fill_(-70000.0))
    with pytest.raises(InputError, match="has the value -70000; fp16 ends at ±65504"):
        open_checkpoint(path).read("blocks.1.attention.query.weight", torch.float16)
    edit_tensors(path, lambda t: t[Q].view(-1)[7].fill_(65519.0))
    assert float(open_checkpoint(path).read("blocks.1.attention.query.weight", torch.float16).max()) == 65504


# The shape of the folder


def shard_names(path: Path) -> list[str]:
    return sorted(p.name for p in path.glob("*.safetensors"))


def test_shard_when_absent_then_is_listed(models: dict[str, Path], tmp_path: Path):
    path = copied(models, "shards", tmp_path)
    gone = shard_names(path)[1]
    (path / gone).unlink()
    assert f"names files that are absent: {gone}" in refusal(path)


def test_index_when_absent_then_is_asked_for(models: dict[str, Path], tmp_path: Path):
    path = copied(models, "shards", tmp_path)
    (path / "model.safetensors.index.json").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(path)


def edit_index(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text("utf-8"))
    edit(index["weight_map"])
    (path / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "..",
        "x.bin",
        7,
        ["x.safetensors"],
        "a\0.safetensors",
        ".x.safetensors",
    ],
)
def test_index_when_it_names_a_path_elsewhere_then_is_refused_before_opening(name: Any, models: dict[str, Path], tmp_path: Path):
    path = copied(models, "shards", tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"")
    edit_index(path, lambda m: m.update({Q: name}))
    assert "expected the plain name of a .safetensors file" in refusal(path)


def test_index_when_it_disagrees_with_the_shards_then_is_refused(models: dict[str, Path], tmp_path: Path):
    path = copied(models, "shards", tmp_path)
    edit_index(path, lambda m: m.pop(Q))
    assert f"the shards disagree: {Q}" in refusal(path)


def test_file_when_stray_beside_an_index_then_is_warned_of(models: dict[str, Path], tmp_path: Path):
    path = copied(models, "shards", tmp_path)
    shutil.copy(models["gpt2"] / "model.safetensors", path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    assert checkpoint.warnings == ("model.safetensors is not among the checkpoint's weights and is ignored.",)
    assert checkpoint.sha256() == open_checkpoint(models["shards"]).sha256()


class Canary:
    """Makes a folder when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_pickle_when_alone_or_beside_then_is_never_opened(models: dict[str, Path], tmp_path: Path):
    path = copied(models, "llama", tmp_path)
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    assert "never opened" in open_checkpoint(path).warnings[0]
    (path / "model.safetensors").unlink()
    text = refusal(path)
    assert "pytorch_model.bin" in text
    assert "Convert it to safetensors" in text
    assert not (tmp_path / "canary").exists()


def test_files_when_linked_as_in_a_cache_then_are_read(models: dict[str, Path], tmp_path: Path):
    (tmp_path / "snapshot").mkdir()
    for file in models["llama"].iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert open_checkpoint(tmp_path / "snapshot").sha256() == open_checkpoint(models["llama"]).sha256()


@pytest.mark.timeout(10)
def test_path_when_not_a_checkpoint_then_says_what_it_is(models: dict[str, Path], tmp_path: Path):
    assert "does not exist" in refusal(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "config.json does not exist" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "m.gguf").write_bytes(b"GGUF")
    assert "Name the GGUF file itself" in refusal(tmp_path / "empty")
    assert "neither a folder nor a GGUF file" in refusal(models["llama"] / "model.safetensors")
    assert "FIFO, socket or device" in refusal(Path("/dev/zero"))
    path = copied(models, "llama", tmp_path)
    (path / "model.safetensors").unlink()
    assert "has no weights" in refusal(path)
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")
    assert "FIFO, socket or device" in refusal(path)


def test_config_when_cut_or_flipped_anywhere_then_is_refused_or_the_same(models: dict[str, Path], tmp_path: Path):
    path = copied(models, "llama", tmp_path)
    edit_config(path, transformers_version=KeyError, architectures=KeyError)
    content = (path / "config.json").read_bytes()
    expected = open_checkpoint(path).config
    for end in range(0, len(content) - 1, 5):
        (path / "config.json").write_bytes(content[:end])
        assert "config.json" in refusal(path)
    for byte in range(len(content)):
        damaged = bytearray(content)
        damaged[byte] ^= 1 << byte % 8
        (path / "config.json").write_bytes(damaged)
        try:
            config = open_checkpoint(path).config
        except TformerError:
            continue
        # a digit of a number that no tensor shows, or a harmless key
        assert parameter_shapes(config) == parameter_shapes(expected)


# Our own family, and the table that every family fills


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2"])
def test_tensors_when_opened_then_are_the_decoders_parameters_in_order(name: str, models: dict[str, Path]):
    checkpoint = open_checkpoint(models[name])
    with torch.device("meta"):
        parameters = {n: tuple(p.shape) for n, p in Decoder(checkpoint.config).named_parameters()}
    assert list(parameters.items()) == [(n, spec.shape) for n, spec in checkpoint.tensors.items()]
    assert all(checkpoint.read(n).is_contiguous() and tuple(checkpoint.read(n).shape) == s for n, s in parameters.items())


def test_decoder_when_saved_and_opened_then_is_the_same(llama_checkpoint: Path, gpt2_checkpoint: Path, tmp_path: Path):
    for path in (llama_checkpoint, gpt2_checkpoint):
        decoder = Decoder.from_pretrained(path)
        decoder.save_pretrained(tmp_path / "again")
        again = Decoder.from_pretrained(tmp_path / "again")
        assert again.config == decoder.config
        assert all(torch.equal(a, b) for a, b in zip(decoder.state_dict().values(), again.state_dict().values(), strict=True))
        assert (tmp_path / "again" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
        assert open_checkpoint(path).family == "tformer"


def test_own_checkpoint_when_the_config_is_strange_then_is_refused(llama_checkpoint: Path, tmp_path: Path):
    path = Path(shutil.copytree(llama_checkpoint, tmp_path / "own"))
    edit_config(path, surprise=1)
    assert "unknown fields ['surprise']" in refusal(path)
    edit_config(path, surprise=KeyError, n_layers="3")
    assert "config.n_layers is '3'" in refusal(path)


def test_own_checkpoint_when_tensors_do_not_fit_then_nothing_is_written(llama_checkpoint: Path, tmp_path: Path):
    decoder = Decoder.from_pretrained(llama_checkpoint)
    state = decoder.state_dict()
    state["norm.weight"] = state["norm.weight"][:3]
    with pytest.raises(InputError, match=r"mis-shaped for the config: norm\.weight"):
        write_checkpoint(tmp_path / "out", decoder.config, state)
    state.pop("norm.weight")
    with pytest.raises(InputError, match=r"norm\.weight"):
        write_checkpoint(tmp_path / "out", decoder.config, state)
    assert not (tmp_path / "out").exists()


# Token ids and the tokenizer's files


TOKENIZER = {
    "model": {"type": "BPE", "vocab": {chr(97 + i): i for i in range(20)}, "merges": []},
    "added_tokens": [{"id": 130, "content": "<end>"}],
}


def with_tokens(models: dict[str, Path], tmp_path: Path, **files: Any) -> Path:
    path = copied(models, "llama", tmp_path)
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value), "utf-8")
    return path


def test_eos_when_named_in_three_places_then_is_their_union(models: dict[str, Path], tmp_path: Path):
    path = with_tokens(
        models, tmp_path, generation_config={"eos_token_id": [3, 5]}, tokenizer=TOKENIZER,
        tokenizer_config={"eos_token": {"content": "<end>"}, "bos_token": "b", "chat_template": "{{ messages }}"},
    )  # fmt: skip
    checkpoint = open_checkpoint(path)
    assert checkpoint.eos_token_ids == (2, 3, 5, 130)
    assert checkpoint.bos_token_id == 1
    assert checkpoint.warnings == ()
    assert set(checkpoint.assets()) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
    }
    assert checkpoint.assets()["chat_template.jinja"] == b"{{ messages }}"


def test_ids_when_outside_the_vocabulary_or_unknown_then_are_warned_of(models: dict[str, Path], tmp_path: Path):
    path = with_tokens(
        models, tmp_path, generation_config={"eos_token_id": [131, -1]}, tokenizer=TOKENIZER, tokenizer_config={"eos_token": "?"}
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.eos_token_ids == (2,)
    assert "[131, -1] is outside the vocabulary of 131" in checkpoint.warnings[0]
    assert "eos_token '?' is not a token of tokenizer.json" in checkpoint.warnings[1]


@pytest.mark.parametrize(("last", "words"), [(131, "a prompt with a higher one is refused"), (100, "would decode to nothing")])
def test_vocabulary_when_of_another_size_than_the_models_then_is_warned_of(
    last: int, words: str, models: dict[str, Path], tmp_path: Path
):
    path = with_tokens(models, tmp_path, tokenizer=TOKENIZER | {"added_tokens": [{"id": last, "content": "x"}]})
    assert words in open_checkpoint(path).warnings[0]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"model": {"vocab": 3}}',
        '{"model": {"vocab": {"a": 0, "a": 1}}}',
        "[1",
        '{"model": {"vocab": {}}, "added_tokens": [1]}',
    ],
)
def test_tokenizer_when_damaged_then_is_refused(content: str, models: dict[str, Path], tmp_path: Path):
    path = copied(models, "llama", tmp_path)
    (path / "tokenizer.json").write_text(content, "utf-8")
    assert "tokenizer.json" in refusal(path)


def test_base_configs_when_read_by_transformers_then_match_this_file():
    """The hot models really have the sizes that the cases above name."""
    assert hot_model("llama").config.hidden_size == BASES["llama"][1]["hidden_size"]
    assert hot_model("gpt2").config.n_embd == BASES["gpt2"][1]["n_embd"]
