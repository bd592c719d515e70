"""Bad checkpoints end in exit code 3, a last line on stderr that says what, where and what next, and nothing written.

| row | fault | tested |
|---|---|---|
| B1 | config.json missing, empty, another value, no JSON, cut | here; tests/test_strict_json.py |
| B2 | duplicate keys, NaN, 1e999, deep nesting, huge numbers | here; tests/test_strict_json.py |
| B3 | sizes of another type or out of range, in every family | here |
| B4 | unknown model_type or architectures | here; test_checkpoints_folder.py (CONFIGS) |
| B5 | keys that name code | here |
| B6–B8 | heads that do not divide, odd rotary widths | here |
| B9, B10 | layers or tensors missing or left over | here |
| B11 | an extra tensor; a tied model's own head | here; test_checkpoints_folder.py (TENSORS, test_head_…) |
| B12 | a tensor of another shape; a square one transposed | here |
| B13 | shards and index that disagree; paths elsewhere | here; test_checkpoints_folder.py (test_index_…) |
| B14 | damaged safetensors; memory | here; test_checkpoints_safetensors.py |
| B15 | the same name twice | test_checkpoints_safetensors.py (BAD, "same name twice") |
| B16 | hostile tensor names | here |
| B17 | NaN and infinity counted; all-zero tensors | here; test_checkpoints_folder.py |
| B18 | dtypes | here; test_checkpoints_families.py (test_tensors_when_stored_in_16_bits_…) |
| B19 | pickles | here |
| B20, B21 | pointers, links, FIFOs, devices, folders | here |
| B22 | a vocabulary of another size | here; tests/test_faults_text.py for rows |
| B23 | untied without a head | here |
| B24–B26 | rotary scalings, their spellings, windows | here; test_checkpoints_families.py (test_rope_…), test_families.py |
| B27 | features that no family has | here; test_checkpoints_folder.py (CONFIGS) |
| B28 | lengths missing or absurd | here |
| B29 | quantised weights | here |

The sweeps damage every byte. A flipped bit may leave another valid file (a digit of an epsilon, a letter of a name that nobody
reads), and no reader can know: so the rule is a named refusal, or a checkpoint whose config is valid and whose tensors all fit it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import random
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_files import (
    CONFIG,
    QUERY,
    Console,
    console,
    cuts,
    flips,
    little_memory,
    llama_tensors,
    sweep,
    tokenizer_json,
    write_config,
    write_llama,
    write_shards,
)
from safetensors.torch import load_file, save, save_file

from tformer_deploy.checkpoints import Checkpoint, open_checkpoint
from tformer_deploy.checkpoints.families import FAMILIES
from tformer_deploy.checkpoints.files import opened, read_small
from tformer_deploy.checkpoints.model_config import read_model
from tformer_deploy.checkpoints.reader import ConfigReader
from tformer_deploy.checkpoints.safetensors_file import write_safetensors
from tformer_deploy.config import ModelConfig
from tformer_deploy.errors import InputError, TformerError
from tformer_deploy.parameters import parameter_shapes

__all__ = ["console"]
pytestmark = pytest.mark.timeout(60)

INDEX = "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21461\nsize 1234567890\n"
TEXT = json.dumps(CONFIG).encode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete tiny checkpoint to spoil."""
    return write_llama(tmp_path / "checkpoint")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """The same in two files."""
    return write_shards(tmp_path / "shards")


def test_checkpoint_when_whole_then_opens(folder: Path, shards: Path):
    """What every other test here spoils."""
    for path in (folder, shards):
        assert open_checkpoint(path).warnings == ()
        assert set(open_checkpoint(path).tensors) == set(parameter_shapes(open_checkpoint(path).config))


# B1, B2: the text of config.json

BROKEN: dict[str, tuple[bytes | None, tuple[str, ...]]] = {
    "missing": (None, ("config.json does not exist",)),
    "empty": (b"", ("config.json is empty (byte 0)",)),
    "list": (b"[]", ("config.json holds a JSON list; expected an object",)),
    "words": (b"hello", ("config.json is not JSON", "byte 0")),
    "cut": (TEXT[:40], ("config.json is not JSON", "byte 40")),
    "zeros": (bytes(100), ("config.json is not JSON", "byte 0")),
    "utf-16": (TEXT.decode().encode("utf-16"), ("config.json is not UTF-8 text: byte 0",)),
    "byte order mark": (b"\xef\xbb\xbf" + TEXT, ("config.json is not JSON", "BOM")),
    "key twice": (TEXT.replace(b"{", b'{"hidden_size": 16, ', 1), ("config.json", "'hidden_size' twice")),
    "key twice, escaped": (TEXT.replace(b"{", b'{"hidden_\\u0073ize": 16, ', 1), ("'hidden_size' twice",)),
    "NaN": (TEXT.replace(b"1e-05", b"NaN"), ("config.json: rms_norm_eps is NaN",)),
    "Infinity": (TEXT.replace(b"1e-05", b"-Infinity"), ("rms_norm_eps is -Infinity",)),
    "1e999": (TEXT.replace(b"1e-05", b"1e999"), ("rms_norm_eps is 1e999; expected a finite number",)),
    "NaN in lists": (TEXT.replace(b"{", b'{"eos_token_ids": [[1, [NaN]]], ', 1), ("eos_token_ids is NaN",)),
    "deep lists": (TEXT.replace(b"{", b'{"deep": ' + b"[" * 100_000 + b"]" * 100_000 + b", ", 1), ("config.json: deep nests", "byte 10")),
    "deep objects": (TEXT.replace(b"{", b'{"deep": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b", ", 1), ("config.json: deep nests",)),
    "as deep as the stack": (TEXT.replace(b"{", b'{"deep": ' + b"[" * 930 + b"]" * 930 + b", ", 1), ("config.json: deep nests",)),
    "5000 digits": (TEXT.replace(b'"hidden_size": 16', b'"hidden_size": ' + b"9" * 5000), ("config.json: hidden_size is 9999", "(5000 characters)")),
    "5000 digits below zero": (TEXT.replace(b'"hidden_size": 16', b'"hidden_size": -' + b"9" * 5000), ("hidden_size is -999",)),
    "values without end": (b"[" + b"{}," * 400_000 + b"{}]", ("config.json holds about", "values")),
    "too large": (b" " * (1 << 23) + b"{}", ("config.json holds 8388610 bytes; at most 8388608",)),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_export_when_config_json_is_no_strict_json_then_names_file_and_byte_or_key(case: str, console: Console, folder: Path):
    content, words = BROKEN[case]
    if content is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_bytes(content)
    console.export_refused(folder, *words)


def test_nesting_when_anywhere_near_the_stacks_end_then_is_refused_by_name(folder: Path):
    """A depth that can be parsed must not fail later, when it is shown."""
    for depth in range(80, 1000, 20):
        for opening, closing in (("[", "]"), ('{"a": ', "}")):
            deep = opening * depth + "1" + closing * depth
            (folder / "config.json").write_text(json.dumps(CONFIG)[:-1] + f', "deep": {deep}}}')
            with pytest.raises(InputError, match="deep nests" if depth >= 100 else "nothing here reads"):
                open_checkpoint(folder)


# B3: types and ranges, in every family

SIZES = (
    "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "intermediate_size", "vocab_size", "head_dim",
    "max_position_embeddings",
)  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**63, 10**30, 0.0, -0.0, -1.5, 1.5, 32.0, 1e-300, 1e300, 5e-324, "", "32",
    "x" * 2000, "\x1b[31m\n", [], [1], [None], [[]], ["x"], {}, {"a": 1}, {"rope_type": "yarn"}, {"rope_type": ["x"]}, {"type": {}},
    [True] * 3, [0] * 3, [-1, 2, 3], ["full_attention"] * 3, ["sliding_attention"] * 3, [{}] * 3,
)  # fmt: skip


@pytest.mark.parametrize("value", ["32", 32.0, True, -1, 0, 2**63, [], {}], ids=repr)
@pytest.mark.parametrize("key", SIZES)
def test_size_when_of_another_type_or_range_then_names_field_value_and_range(key: str, value: Any, folder: Path):
    write_config(folder, **{key: value})
    shown = {True: "true"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)
    with pytest.raises(InputError) as caught:
        open_checkpoint(folder)
    text = str(caught.value)
    assert f"config.json: {key} is {shown}; expected a whole number" in text or (value == 2**63 and f"has {key} {2**63}" in text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [("rms_norm_eps", v) for v in ("1e-5", True, -1, 0, 1e30, [])] + [("rope_theta", v) for v in ("1e4", True, -1, 0, [])]
    + [("tie_word_embeddings", v) for v in (0, "false", [])] + [("hidden_act", v) for v in ("mish", 1, ["silu"])],
)  # fmt: skip
def test_number_when_of_another_type_or_range_then_names_file_and_field(key: str, value: Any, folder: Path):
    write_config(folder, **{key: value})
    with pytest.raises(InputError, match=r"config\.json: ") as caught:
        open_checkpoint(folder)
    assert key in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("value", ["32", 32.0, True, -1, 0, 2**63], ids=repr)
def test_export_when_a_size_is_no_size_then_refuses(value: Any, console: Console, folder: Path):
    write_config(folder, hidden_size=value)
    console.export_refused(folder, "config.json: hidden_size is", "expected a whole number from 1 to 2147483647")


def family_configs() -> dict[str, dict[str, Any]]:
    """What transformers writes as config.json for a small model of each family."""
    transformers = pytest.importorskip("transformers")
    from families import _CONFIGS, BASES

    configs = {}
    for family, (stem, base) in BASES.items():
        config = getattr(transformers, _CONFIGS.get(family, f"{stem}Config"))(**base)
        configs[family] = json.loads(config.to_json_string(use_diff=False))
    return configs


OTHERS = (
    "layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "rope_scaling", "rope_theta", "rope_parameters",
    "partial_rotary_factor", "head_dim", "num_key_value_heads", "quantization_config", "auto_map", "rotary_pct", "no_rope_layers",
    "no_rope_layer_interval", "alibi", "multi_query", "new_decoder_architecture", "num_kv_heads", "architectures",
    "final_logit_softcapping", "attn_logit_softcapping", "attention_multiplier", "residual_multiplier", "logits_scaling",
    "embedding_multiplier", "logit_scale", "query_pre_attn_scalar", "original_max_position_embeddings", "rope_local_base_freq",
)  # fmt: skip
ROPE: dict[str, Any] = {
    "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.1, "mscale": 1.0, "mscale_all_dim": 1.0, "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8, "truncate": True, "partial_rotary_factor": 1.0,
}  # fmt: skip


def spoiled_configs(share: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(family, config) with one value replaced: one in ``share`` of all keys × hostile values, and of rotary keys."""
    chosen = random.Random(0)  # the same ones each time
    for family, config in family_configs().items():
        for key in sorted({*config, *OTHERS}):
            yield from ((family, config | {key: value}) for value in HOSTILE if not chosen.randrange(share))
        for kind in ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "xpos"):
            whole = ROPE | {"rope_type": kind}
            for key in whole:
                for value in HOSTILE:
                    if not chosen.randrange(share):
                        yield family, config | {"rope_parameters": whole | {key: value}}


def read_config(case: tuple[str, dict[str, Any]]) -> ModelConfig:
    family, data = case
    reader = ConfigReader(data, "config.json")
    reader.refuse_features()
    return read_model(FAMILIES[family].read_config, reader)


@pytest.mark.parametrize("share", [25, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_config_of_every_family_when_any_value_is_hostile_then_is_refused_by_name_or_valid(share: int):
    results = sweep(spoiled_configs(share), read_config)
    refused = [r for r in results if isinstance(r, TformerError)]
    assert len(refused) > len(results) // 4
    assert all(isinstance(r, (InputError, ModelConfig)) for r in results)
    assert all("config.json" in r.message and r.hint for r in refused)


# B4 – B8, B23, B27 – B29: models that are not supported, or contradict themselves

REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "B4 type": ({"model_type": "mamba"}, ("config.json: model_type is 'mamba'; supported are tformer, gpt2,", "llama")),
    "B4 type with escapes": ({"model_type": "\x1b[31m\n"}, (r"model_type is '\x1b[31m\n'",)),
    "B4 type without end": ({"model_type": "x" * 100_000}, ("model_type is 'xxx",)),
    "B4 architecture": ({"architectures": ["LlamaForTokenClassification"]}, ("architectures", "LlamaForCausalLM")),
    "B4 architecture of another type": ({"architectures": [["LlamaForCausalLM"]]}, ("architectures",)),
    "B5 auto_map": ({"auto_map": {"AutoModelForCausalLM": "evil--x.Y"}}, ("auto_map", "never executed")),
    "B5 custom_ops_library": ({"custom_ops_library": "x.so"}, ("custom_ops_library", "never executed")),
    "B5 trust_remote_code": ({"trust_remote_code": True}, ("trust_remote_code", "never executed")),
    "B5 custom_pipelines": ({"custom_pipelines": {"a": {}}}, ("custom_pipelines", "never executed")),
    "B6": ({"hidden_size": 32, "num_attention_heads": 5}, ("config.json: hidden_size is 32 and num_attention_heads 5",)),
    "B7 three": ({"num_key_value_heads": 3}, ("config.json", "4", "3", "num_attention_heads or num_key_value_heads")),
    "B7 none": ({"num_key_value_heads": 0}, ("num_key_value_heads is 0",)),
    "B7 more": ({"num_key_value_heads": 8}, ("config.json", "4", "8", "num_key_value_heads")),
    "B8 odd head": ({"head_dim": 5}, ("config.json", "head_dim 5", "even number")),
    "B8 odd share": ({"head_dim": 10, "partial_rotary_factor": 0.3}, ("config.json", "partial_rotary_factor is 0.3")),
    "B24 unknown": ({"rope_scaling": {"rope_type": "xpos"}}, ("rope_type is 'xpos'; supported are",)),
    "B24 llama3": ({"rope_scaling": {"rope_type": "llama3"}}, ("rope_scaling lacks factor",)),
    "B24 factor 0": ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ("factor is 0",)),
    "B24 factor negative": ({"rope_scaling": {"type": "linear", "factor": -2.0}}, ("factor is -2",)),
    "B24 factor text": ({"rope_scaling": {"type": "linear", "factor": "2"}}, ("factor is '2'",)),
    "B24 yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("lacks original_max_position_embeddings",)),
    "B24 no object": ({"rope_scaling": "linear"}, ("rope_scaling is 'linear'; expected an object",)),
    "B25 theta": ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, ("rope_theta is 500000.0", "10000.0 in rope_parameters")),
    "B25 kind": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, ("rope_type is 'linear'", "'default'")),
    "B27 experts": ({"num_local_experts": 8}, ("a mixture of experts (num_local_experts)",)),
    "B27 experts, other words": ({"moe_intermediate_size": 8}, ("a mixture of experts (moe_intermediate_size)",)),
    "B27 latent attention": ({"kv_lora_rank": 512}, ("multi-head latent attention (kv_lora_rank)",)),
    "B27 cross-attention": ({"add_cross_attention": True}, ("cross-attention",)),
    "B27 cross-attention layers": ({"cross_attention_layers": [3]}, ("cross-attention (cross_attention_layers)",)),
    "B27 vision": ({"vision_config": {"a": 1}}, ("a vision tower",)),
    "B28 zero": ({"max_position_embeddings": 0}, ("max_position_embeddings is 0",)),
    "B28 missing": ({"max_position_embeddings": KeyError}, ("max_position_embeddings", "Give --max-length")),
    "B28 absurd": ({"max_position_embeddings": 10**9}, ("max_position_embeddings 1000000000", "Give --max-length")),
    "B29 gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("quantised (gptq)",)),
    "B29 awq": ({"quantization_config": {"quant_method": "awq"}}, ("quantised (awq)",)),
    "B29 bitsandbytes": ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, ("quantised (bitsandbytes)",)),
    "B29 without a method": ({"quantization_config": {"load_in_8bit": True}}, ("quantised (unknown)",)),
    "B29 of another type": ({"quantization_config": ["\x1b"]}, ("quantization_config",)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_export_when_the_model_is_none_of_ours_then_says_which_key(case: str, console: Console, folder: Path):
    changes, words = REFUSED[case]
    write_config(folder, **changes)
    console.export_refused(folder, *words)


def test_length_when_absurd_then_max_length_stands_in_and_nothing_that_long_is_made(folder: Path):
    write_config(folder, max_position_embeddings=10**9)
    with little_memory(64):
        assert open_checkpoint(folder, max_length=48).config.max_length == 48


def test_rotary_width_when_odd_then_is_refused_with_the_numbers():
    config = family_configs()["phi"]
    parameters = config["rope_parameters"] | {"partial_rotary_factor": 0.2}
    with pytest.raises(InputError, match=r"0\.2 of head_dim 16 rotates 3 dims; expected an even number"):
        read_config(("phi", config | {"rope_parameters": parameters, "partial_rotary_factor": 0.2}))


@pytest.mark.parametrize("value", [0, -1])
def test_window_when_none_of_a_size_then_is_refused(value: int):
    config = family_configs()["mistral"]
    with pytest.raises(InputError, match=f"sliding_window is {value}; expected a whole number"):
        read_config(("mistral", config | {"sliding_window": value}))


def test_window_when_null_or_longer_than_any_row_then_is_right():
    config = family_configs()["mistral"]
    assert read_config(("mistral", config | {"sliding_window": None})).window is None
    longer = read_config(("mistral", config | {"sliding_window": 10**6}))
    assert longer.window in (None, 10**6)  # it hides nothing either way


# B5, B19: nothing that comes with a checkpoint is run, fetched or asked about


class Canary:
    """Makes a folder when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_when_named_or_beside_then_is_never_run_fetched_or_asked_about(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def forbidden(*_: object) -> None:
        raise AssertionError("a checkpoint reached for the network or for stdin")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    monkeypatch.setattr("builtins.input", forbidden)
    canary = tmp_path / "canary"
    for name in ("modeling_llama.py", "configuration_llama.py", "tokenization_llama.py"):
        (folder / name).write_text(f"import os; os.mkdir({str(canary)!r})")
    for name in ("pytorch_model.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["tokenization_llama.Evil", null]}}')
    write_config(folder, _attn_implementation_internal="evil/kernels", attn_implementation="evil/kernels:attention")
    warnings = " ".join(open_checkpoint(folder).warnings)
    for word in (
        "_attn_implementation_internal",
        "attn_implementation",
        "evil/kernels",
        "modeling_llama.py",
        "pytorch_model.bin",
        "auto_map",
    ):
        assert word in warnings
    assert not canary.exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "a.pth", "a.ckpt", "model.pkl"]
)
def test_export_when_weights_are_pickled_only_then_says_how_to_convert_them(
    name: str, console: Console, folder: Path, tmp_path: Path
):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    console.export_refused(folder, name, "pickle", "Convert it to safetensors")
    assert not (tmp_path / "canary").exists()


def test_export_when_a_pickle_has_another_name_then_is_never_opened_as_one(console: Console, folder: Path, tmp_path: Path):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    console.export_refused(folder, "model.safetensors", "header takes")
    torch.save({"a": torch.zeros(1)}, folder / "model.safetensors")
    console.export_refused(folder, "model.safetensors", "header takes")
    (tmp_path / "model.gguf").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    console.export_refused(tmp_path / "model.gguf", "model.gguf is not a GGUF file")
    assert not (tmp_path / "canary").exists()


# B9 – B12, B16, B18, B23: tensors

Edit = Callable[[dict[str, torch.Tensor]], Any]
TENSORS: dict[str, tuple[dict[str, Any], Edit, tuple[str, ...]]] = {
    "B9 more layers": ({"num_hidden_layers": 3}, lambda t: None, ("model.safetensors", "9 missing: model.layers.2.input_layernorm.weight")),
    "B9 fewer layers": ({"num_hidden_layers": 1}, lambda t: None, ("9 unused: model.layers.1.input_layernorm.weight (in model.safetensors)",)),
    "B10": ({}, lambda t: t.pop(QUERY), ("(model.safetensors)", f"1 missing: {QUERY}")),
    "B11": ({}, lambda t: t.update(evil=torch.zeros(1)), ("1 unused: evil (in model.safetensors)",)),
    "B11 tied": ({"tie_word_embeddings": True}, lambda t: None, ("lm_head.weight differs from model.embed_tokens.weight",)),
    "B12": ({}, lambda t: t.update({QUERY: torch.zeros(8, 16)}), (f"{QUERY} (in model.safetensors) has [8, 16], expected [16, 16]",)),
    "B12 flat": ({}, lambda t: t.update({QUERY: torch.zeros(256)}), ("has [256], expected [16, 16]",)),
    "B12 a number": ({}, lambda t: t.update({"model.norm.weight": torch.tensor(1.0)}), ("model.norm.weight (in model.safetensors) has [], expected [16]",)),
    "B12 nothing": ({}, lambda t: t.update({QUERY: torch.zeros(0, 16)}), ("has [0, 16], expected [16, 16]",)),
    "B16 path": ({}, lambda t: t.update({"../../etc/passwd": torch.zeros(1)}), ("1 unused: ../../etc/passwd",)),
    "B16 NUL": ({}, lambda t: t.update({"a\0b": torch.zeros(1)}), (r"1 unused: a\x00b",)),
    "B16 line": ({}, lambda t: t.update({"a\nError: b": torch.zeros(1)}), (r"1 unused: a\nError: b",)),
    "B16 terminal": ({}, lambda t: t.update({"\x1b[31m\u202e": torch.zeros(1)}), (r"1 unused: \x1b[31m\u202e",)),
    "B16 without end": ({}, lambda t: t.update({"x" * 100_000: torch.zeros(1)}), ("(100000 characters)",)),
    "B16 renamed": ({}, lambda t: t.update({"../x": t.pop(QUERY)}), (f"1 missing: {QUERY}; 1 unused: ../x",)),
    "B23": ({}, lambda t: t.pop("lm_head.weight"), ("1 missing: lm_head.weight", "Add lm_head.weight", "tie_word_embeddings to true")),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_export_when_the_tensors_do_not_fit_then_names_them_and_their_file(case: str, console: Console, folder: Path):
    changes, edit, words = TENSORS[case]
    edit(tensors := llama_tensors())
    write_llama(folder, tensors, **changes)
    console.export_refused(folder, *words)


def test_name_when_it_is_a_path_then_no_file_of_it_appears(console: Console, folder: Path, tmp_path: Path):
    write_llama(folder, llama_tensors() | {"../../canary": torch.zeros(1), "/canary": torch.zeros(1)})
    before = sorted(p.name for p in tmp_path.rglob("*"))
    console.export_refused(folder, "../../canary")
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("dtype", "code"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2"), (torch.int8, "I8"), (torch.uint8, "U8"),
    (torch.float64, "F64"), (torch.int64, "I64"), (torch.bool, "BOOL")],
)  # fmt: skip
def test_export_when_a_dtype_cannot_be_read_then_names_it(dtype: torch.dtype, code: str, console: Console, folder: Path):
    tensors = llama_tensors()
    save_file(tensors | {QUERY: tensors[QUERY].to(dtype)}, folder / "model.safetensors")
    console.export_refused(folder, f"{QUERY} (in model.safetensors) is {code}, expected F32, F16 or BF16")


def test_check_when_a_square_tensor_is_transposed_in_the_checkpoint_then_is_red(
    console: Console, llama_bundle: Path, llama_checkpoint: Path, tmp_path: Path
):
    """No shape can show it; the weights of a bundle that was made from the right one do."""
    path = Path(shutil.copytree(llama_checkpoint, tmp_path / "transposed"))
    tensors = load_file(path / "model.safetensors")
    name = "blocks.1.attention.query.weight"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, path / "model.safetensors")
    code, out, _ = console.run("check", llama_bundle, "--checkpoint", path)
    assert code == 1
    assert name in out


@pytest.mark.parametrize(
    ("value", "words"),
    [(torch.nan, "3 NaN and 0 infinite"), (torch.inf, "0 NaN and 3 infinite"), (-torch.inf, "0 NaN and 3 infinite")],
)
@pytest.mark.parametrize("tied", [False, True])
def test_export_when_a_weight_is_not_finite_then_names_the_tensor_and_counts(
    value: float, words: str, tied: bool, console: Console, folder: Path
):
    tensors = llama_tensors()
    name = "model.embed_tokens.weight" if tied else QUERY
    tensors[name].view(-1)[[0, 7, -1]] = value
    if tied:
        tensors["lm_head.weight"] = tensors[name].clone()
    write_llama(folder, tensors, tie_word_embeddings=tied)
    console.export_refused(folder, f"{name} in model.safetensors", words)


# B13: shards and index


def edit_index(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((path / INDEX).read_text("utf-8"))
    edit(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index), "utf-8")


ELSEWHERE: tuple[Any, ...] = (
    "../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x.bin", "", 7, None, ["x"], {"a": 1}, "a\0.safetensors",
    "model-00001-of-00002.safetensors/../x.safetensors", "C:\\x.safetensors", "a" * 300 + ".safetensors", "x.safetensors\n",
)  # fmt: skip


@pytest.mark.parametrize("name", ELSEWHERE, ids=lambda n: ascii(n)[:30])
def test_export_when_the_index_names_no_plain_file_then_refuses_before_opening(name: Any, console: Console, shards: Path):
    (shards.parent / "x.safetensors").write_bytes(b"not to be opened")
    edit_index(shards, lambda m: m.update({QUERY: name}))
    console.export_refused(shards, INDEX, "expected the plain name of a .safetensors file")


INDEXES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "a shard missing": (lambda p: (p / "model-00002-of-00002.safetensors").unlink(), (INDEX, "absent: model-00002-of-00002.safetensors", "Complete the download")),
    "a shard with a long name": (lambda p: edit_index(p, lambda m: m.update({QUERY: "漢" * 150 + ".safetensors"})), (INDEX, "absent")),
    "no index": (lambda p: (p / INDEX).unlink(), ("neither model.safetensors nor model.safetensors.index.json", "Add the index")),
    "index empty": (lambda p: (p / INDEX).write_bytes(b""), (f"{INDEX} is empty",)),
    "index a list": (lambda p: (p / INDEX).write_bytes(b"[]"), (f"{INDEX} holds a JSON list",)),
    "no weight_map": (lambda p: (p / INDEX).write_bytes(b"{}"), (f"{INDEX} has no weight_map",)),
    "weight_map empty": (lambda p: (p / INDEX).write_bytes(b'{"weight_map": {}}'), (f"{INDEX} has no weight_map",)),
    "a tensor twice": (lambda p: (p / INDEX).write_bytes(b'{"weight_map": {"a": "b.safetensors", "a": "b.safetensors"}}'), (INDEX, "'a' twice")),
    "a tensor not in the index": (lambda p: edit_index(p, lambda m: m.pop(QUERY)), (INDEX, QUERY, "not in the index")),
    "a tensor only in the index": (lambda p: edit_index(p, lambda m: m.update(evil="model-00001-of-00002.safetensors")), ("evil in model-00001", "only the index says so")),
    "a tensor in another shard": (lambda p: edit_index(p, lambda m: m.update({"lm_head.weight": "model-00002-of-00002.safetensors"})), ("lm_head.weight", "disagree")),
    "index a broken link": (lambda p: ((p / INDEX).unlink(), (p / INDEX).symlink_to("gone")), (INDEX, "symbolic link to a file that does not exist")),
    "index a folder": (lambda p: ((p / INDEX).unlink(), (p / INDEX).mkdir()), (INDEX, "is a folder")),
    "index a FIFO": (lambda p: ((p / INDEX).unlink(), os.mkfifo(p / INDEX)), (INDEX, "is a FIFO")),
    "a shard a broken link": (lambda p: ((p / "model-00002-of-00002.safetensors").unlink(), (p / "model-00002-of-00002.safetensors").symlink_to("gone")), ("model-00002-of-00002.safetensors is a symbolic link",)),
}  # fmt: skip


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", INDEXES)
def test_export_when_shards_and_index_disagree_then_names_both(case: str, console: Console, shards: Path):
    edit, words = INDEXES[case]
    edit(shards)
    console.export_refused(shards, *words)


def test_tensor_when_gone_from_shard_and_index_then_the_message_names_tensor_and_files(console: Console, shards: Path):
    tensors = {name: tensor for name, tensor in llama_tensors().items() if name != QUERY}
    names = sorted(tensors)
    write_safetensors(shards / "model-00001-of-00002.safetensors", {n: tensors[n] for n in names[:10]})
    write_safetensors(shards / "model-00002-of-00002.safetensors", {n: tensors[n] for n in names[10:]})
    edit_index(
        shards,
        lambda m: (m.clear(), m.update({n: f"model-0000{1 + (i >= 10)}-of-00002.safetensors" for i, n in enumerate(names)})),
    )
    console.export_refused(shards, f"1 missing: {QUERY}", "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors")


# B14, B15: damaged safetensors


def header_and_data() -> tuple[dict[str, Any], bytes]:
    content = save(llama_tensors(), {"format": "pt"})
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def moved(key: str, value: Any) -> bytes:
    header, data = header_and_data()
    header[QUERY][key] = value(header) if callable(value) else value
    return joined(header, data)


def whole_file() -> bytes:
    return joined(*header_and_data())


def many_tensors(count: int) -> bytes:
    return joined({f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}, b"")


DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "a byte short": (lambda: whole_file()[:-1], "is truncated"),
    "a byte more": (lambda: whole_file() + b"x", "extra bytes at its end"),
    "empty": (lambda: b"", "holds 0 bytes"),
    "seven bytes": (lambda: b"1234567", "holds 7 bytes"),
    "header of 100,000,001": (lambda: struct.pack("<Q", 100_000_001) + whole_file()[8:], "header takes 100000001 bytes"),
    "header of 2^64 - 1": (lambda: b"\xff" * 8 + whole_file()[8:], "header takes 18446744073709551615 bytes"),
    "header of nothing": (lambda: bytes(8) + whole_file()[8:], "is empty"),
    "hole": (lambda: moved("data_offsets", lambda h: [x + 4 for x in h[QUERY]["data_offsets"]]), "a hole before tensor"),
    "overlap": (lambda: moved("data_offsets", lambda h: [h["lm_head.weight"]["data_offsets"][0], h["lm_head.weight"]["data_offsets"][0] + 1024]), "an overlap before tensor"),
    "negative offset": (lambda: moved("data_offsets", [-4, 1020]), "bad shape or byte range"),
    "offset of 2^62": (lambda: moved("data_offsets", [2**62, 2**62 + 1024]), "a hole before tensor"),
    "shape of 2^62": (lambda: moved("shape", [2**31, 2**31]), "gives tensor"),
    "a hundred thousand dims": (lambda: moved("shape", [1] * 100_000), "100000 dimensions"),
    "dtype unknown": (lambda: moved("dtype", "x" * 1000), "in dtype xxx"),
    "deep header": (lambda: joined(b'{"a":' * 100_000, b""), "nests"),
    "header of spaces": (lambda: joined(b" " * 20_000_000, b""), "is empty"),
    "tensors without end": (lambda: many_tensors(130_000), "values; at most"),
    "lists without end": (lambda: joined(b'{"a":[' + b"[]," * 3_000_000 + b"[]]}", b""), "values; at most"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_export_when_safetensors_are_damaged_then_names_the_file(case: str, console: Console, folder: Path):
    make, words = DAMAGED[case]
    content = make()
    (folder / "model.safetensors").write_bytes(content)
    with little_memory(200 + (len(content) >> 20)):
        console.export_refused(folder, "model.safetensors", words)


@pytest.mark.parametrize(
    "case", ["header of 2^64 - 1", "header of spaces", "tensors without end", "lists without end", "most tensors"]
)
def test_memory_when_a_header_is_a_bomb_then_stays_below_the_file_and_200_mb(case: str, folder: Path, tmp_path: Path):
    """In a process of its own, all of it counted: a bad file is refused before torch is loaded."""
    content = many_tensors(79_000) if case == "most tensors" else DAMAGED[case][0]()
    (folder / "model.safetensors").write_bytes(content)
    code = (
        "import re, sys; from pathlib import Path; from tformer_deploy.cli import run; code = run(sys.argv[1:]); "
        "print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1], 'torch' in sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "export", str(folder), "-o", str(tmp_path / "b"), "--no-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    kib, torch_loaded = done.stdout.split()
    assert int(kib) * 1024 < len(content) + 200_000_000
    assert torch_loaded == "False"


# B20, B21: what stands where a file should


def fifo(path: Path) -> None:
    os.mkfifo(path)


INSTEAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pointer": (lambda p: p.write_text(POINTER), "LFS pointer"),
    "old pointer": (lambda p: p.write_text(POINTER.replace("git-lfs", "hawser")), "LFS pointer"),
    "FIFO": (fifo, "is a FIFO, socket or device"),
    "folder": (lambda p: p.mkdir(), "is a folder"),
    "broken link": (lambda p: p.symlink_to("gone"), "symbolic link to a file that does not exist"),
    "link to itself": (lambda p: p.symlink_to(p.name), "symbolic link that leads to itself"),
    "/dev/zero": (lambda p: p.symlink_to("/dev/zero"), "is a FIFO, socket or device"),
    "/dev/tty": (lambda p: p.symlink_to("/dev/tty"), "is a FIFO, socket or device"),
}  # fmt: skip
FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", INSTEAD)
@pytest.mark.parametrize("name", FILES)
def test_export_when_something_else_stands_for_a_file_then_says_what(name: str, case: str, console: Console, folder: Path):
    make, words = INSTEAD[case]
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    last = console.export_refused(folder, name, words)
    assert "pointer" not in case or "Run `git lfs pull`" in last


@pytest.mark.timeout(10)
def test_export_when_the_checkpoint_itself_is_something_else_then_says_what(console: Console, tmp_path: Path):
    for case, (make, words) in INSTEAD.items():
        path = tmp_path / case.replace("/", "_")
        make(path)
        console.export_refused(path, "config.json does not exist" if case == "folder" else words)
    console.export_refused(tmp_path / "absent", "absent does not exist")
    console.export_refused(tmp_path / ("a" * 5000), "longer than a name may be")
    (tmp_path / "pointer.gguf").write_text(POINTER)
    console.export_refused(tmp_path / "pointer.gguf", "pointer.gguf", "LFS pointer", "Run `git lfs pull`")


@pytest.mark.timeout(10)
def test_file_when_it_becomes_a_fifo_after_it_was_looked_at_then_does_not_hang(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from tformer_deploy.checkpoints import files

    path = folder / "config.json"
    monkeypatch.setattr(files, "regular_size", lambda p: (p.unlink(), fifo(p)))
    with pytest.raises(InputError, match="is a FIFO"), opened(path):
        pass


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the file is one of /proc")
@pytest.mark.timeout(10)
def test_file_when_it_says_that_it_is_empty_then_nothing_is_read_from_it(tmp_path: Path):
    """Files of /proc have no size and some of them no end."""
    (tmp_path / "link").symlink_to("/proc/self/maps")
    assert read_small(tmp_path / "link", 1 << 20) == b""


def test_files_when_linked_as_in_a_cache_then_are_read(folder: Path, tmp_path: Path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(f"../{folder.name}/{file.name}")
    assert open_checkpoint(snapshot).sha256() == open_checkpoint(folder).sha256()


# What is odd, but not refused, is said


def test_export_when_the_checkpoint_is_odd_then_every_oddity_is_a_warning(console: Console, tmp_path: Path):
    """B5, B13, B17, B18, B19 and B22 in one export."""
    path = write_shards(tmp_path / "odd")
    for number in (1, 2):
        file = path / f"model-{number:05}-of-00002.safetensors"
        tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
        if QUERY in tensors:
            tensors[QUERY].zero_()
        write_safetensors(file, tensors)
    write_config(path, _attn_implementation="evil/kernels")
    shutil.copy(file, path / "stray.safetensors")
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    larger = tokenizer_json()
    larger["added_tokens"].append(larger["added_tokens"][0] | {"id": 24, "content": "<more>"})
    (path / "tokenizer.json").write_text(json.dumps(larger))
    bundle = console.output / "b"
    code, _, err = console.run("export", path, "-o", bundle, "--no-check")
    assert code == 0, err
    for words in (
        "Warning: config.json: _attn_implementation names evil/kernels, which is ignored",
        "Warning: stray.safetensors is not among the checkpoint's weights",
        "Warning: The pickle files beside the safetensors are never opened: pytorch_model.bin",
        "Warning: Tensor blocks.1.attention.query.weight is all zero",
        "Warning: The tokenizer's ids go up to 24, the model's to 23",
        "the checkpoint stores bf16; the bundle holds every weight in fp32",
    ):
        assert words in err
    assert not (tmp_path / "canary").exists()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w3 w4"}\n{"prompt": "w3 <more> w4"}\n{"prompt": "w5"}\n')
    code, out, err = console.run("run", bundle, tmp_path / "rows.jsonl", "-o", "-", "--max-new-tokens", "2")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, [row.get("error", {}).get("code") for row in rows]) == (1, [None, "token_out_of_range", None])
    assert "24 ('<more>')" in rows[1]["error"]["message"]


def test_vocabulary_when_the_model_has_more_ids_than_the_tokenizer_then_is_warned_of(folder: Path):
    model = tokenizer_json()["model"]
    smaller = tokenizer_json(model=model | {"vocab": {token: i for token, i in model["vocab"].items() if i < 20}})
    (folder / "tokenizer.json").write_text(json.dumps(smaller))
    assert open_checkpoint(folder).warnings == (
        "The model's ids go up to 23, the tokenizer's to 19: a higher one would decode to nothing.",
    )


# Sweeps


def fits(path: Path) -> Checkpoint:
    """An opened checkpoint, its config valid and its tensors the config's."""
    checkpoint = open_checkpoint(path)
    assert {name: spec.shape for name, spec in checkpoint.tensors.items()} == parameter_shapes(checkpoint.config)
    ModelConfig.from_dict(checkpoint.config.to_dict())
    return checkpoint


def attempt_with(path: Path, name: str) -> Callable[[Any], Checkpoint]:
    def attempt(piece: Any) -> Checkpoint:
        (path / name).write_bytes(piece[1] if isinstance(piece, tuple) else piece)
        return fits(path)

    return attempt


SWEPT = ("config.json", INDEX, "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def swept_folder(path: Path) -> Path:
    """A checkpoint with every file that is read."""
    write_shards(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 3], "bos_token_id": 1}')
    model = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(6)}, "unk_token": "w0"}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json(model=model, added_tokens=[])))
    (path / "tokenizer_config.json").write_text(
        '{"eos_token": {"content": "w2"}, "bos_token": "w1", "chat_template": "{{ messages }}"}'
    )
    return path


@pytest.mark.parametrize("name", SWEPT)
def test_json_file_when_cut_anywhere_then_is_refused_by_name(name: str, tmp_path: Path):
    path = swept_folder(tmp_path / "c")
    content = (path / name).read_bytes()
    results = sweep(cuts(content), attempt_with(path, name))
    assert all(isinstance(r, InputError) and name in r.message for r in results), [
        r for r in results if not isinstance(r, InputError)
    ]
    assert len(results) == len(content)


@pytest.mark.parametrize("name", SWEPT)
@pytest.mark.parametrize("step", [17, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_json_file_when_a_bit_is_flipped_then_is_refused_or_still_fits(name: str, step: int, tmp_path: Path):
    path = swept_folder(tmp_path / "c")
    content = (path / name).read_bytes()
    results = sweep(flips(content, step), attempt_with(path, name))
    refused = [r for r in results if isinstance(r, TformerError)]
    assert all(isinstance(r, InputError) for r in refused)
    assert len(refused) > len(results) // 3


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_safetensors_header_when_a_bit_is_flipped_then_is_refused_or_the_same(step: int, folder: Path):
    content = (folder / "model.safetensors").read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    whole = fits(folder)
    results = sweep(flips(content, step, header), attempt_with(folder, "model.safetensors"))
    for result in results:  # F16 and BF16 differ by more than one bit, F32 and its neighbours too
        assert isinstance(result, InputError) or result.tensors == whole.tensors
    assert sum(isinstance(r, InputError) for r in results) > len(results) // 2


def test_safetensors_when_cut_anywhere_then_is_refused(folder: Path):
    content = (folder / "model.safetensors").read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    pieces = [*cuts(content[:header]), *cuts(content, 997), content[:-1]]
    results = sweep(iter(pieces), attempt_with(folder, "model.safetensors"))
    assert all(isinstance(r, InputError) and "model.safetensors" in r.message for r in results)


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A llama with a tokenizer in GGUF, and the end of its header."""
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("the package gguf is not installed")
    import gguf

    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁a"])
    writer.add_token_scores([0.0] * 4 + [-1.0, -2.0, -3.0, -4.0])
    writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template("{{ messages }}")
    shapes = {"token_embd": (8, 8), "output_norm": (8,), "output": (8, 8), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {"blk.0.attn_q": (8, 8), "blk.0.attn_k": (4, 8), "blk.0.attn_v": (4, 8), "blk.0.attn_output": (8, 8)}
    shapes |= {f"blk.0.ffn_{name}": (8, 8) for name in ("gate", "up", "down")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.ones(shape).numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    content = path.read_bytes()
    data = sum(4 * torch.Size(shape).numel() for shape in shapes.values())
    assert fits(path).eos_token_ids == (2,)
    return content, len(content) - data


def test_gguf_when_cut_anywhere_in_its_header_then_is_refused(small_gguf: tuple[bytes, int], tmp_path: Path):
    content, header = small_gguf

    def attempt(piece: bytes) -> Checkpoint:
        (tmp_path / "m.gguf").write_bytes(piece)
        return fits(tmp_path / "m.gguf")

    results = sweep(iter([*cuts(content[:header]), content[:-1]]), attempt)
    assert all(isinstance(r, InputError) and "m.gguf" in r.message for r in results)


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_gguf_header_when_a_bit_is_flipped_then_is_refused_or_still_fits(
    step: int, small_gguf: tuple[bytes, int], tmp_path: Path
):
    content, header = small_gguf

    def attempt(piece: tuple[int, bytes]) -> Checkpoint:
        (tmp_path / "m.gguf").write_bytes(piece[1])
        return fits(tmp_path / "m.gguf")

    results = sweep(flips(content, step, header), attempt)
    refused = [r for r in results if isinstance(r, TformerError)]
    assert all(isinstance(r, InputError) for r in refused)
    assert len(refused) > len(results) // 3


GGUF_BOMBS: dict[str, bytes] = {
    "tensors without end": struct.pack("<4sIQQ", b"GGUF", 3, 2**40, 0),
    "as many tensors as its bytes hold": struct.pack("<4sIQQ", b"GGUF", 3, 150_000, 0) + bytes(24 * 150_000),
    "array of 2^62": struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 0, 2**62),
    "array of 30 million bytes": struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 0, 30_000_000) + bytes(30_000_000),
    "array of 3 million strings": struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 8, 3_000_000) + bytes(24_000_000),
    "string of 2^63": struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**63),
    "array of arrays": struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 1),
}  # fmt: skip


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", GGUF_BOMBS)
def test_gguf_when_its_header_is_a_bomb_then_is_refused_within_little_memory(case: str, tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(GGUF_BOMBS[case] + bytes(64))
    (result,) = sweep(iter([tmp_path / "m.gguf"]), open_checkpoint, 200)
    assert isinstance(result, InputError)


# Sweeps through the command line: the same promise, on a sample


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_export_when_a_file_is_cut_then_keeps_its_promise(name: str, console: Console, folder: Path):
    content = (folder / name).read_bytes()
    for part in range(0, len(content), len(content) // 7):
        (folder / name).write_bytes(content[:part])
        console.export_refused(folder, name)
