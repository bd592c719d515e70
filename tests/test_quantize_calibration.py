"""Calibration: rows from texts and prompts, and matrices rounded for what really reaches them, one block at a time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from conftest import GPT2_LIKE, LLAMA_LIKE, hot_decoder

from tformer_deploy.bundle.quantization import Calibration, Quantization, is_matrix, stored_tensors, untied
from tformer_deploy.checkpoints import open_checkpoint
from tformer_deploy.config import ModelConfig, RopeConfig
from tformer_deploy.errors import InputError
from tformer_deploy.quantization import calibration as calibration_module
from tformer_deploy.quantization import calibration_rows, dump_rows, quantized_tensors, read_rows
from tformer_deploy.quantization.gptq import quantize_with
from tformer_deploy.quantization.rounding import Quantized
from tformer_deploy.reference import Decoder

SMALL = replace(LLAMA_LIKE, n_layers=2, d_model=48, d_ff=80)


def encode(text: str) -> list[int]:
    return [ord(c) % 131 for c in text]


def rows_of(tmp_path, name: str, content: str | bytes, **changes) -> tuple[tuple[int, ...], ...]:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    arguments = {"encode": encode, "config": LLAMA_LIKE, "max_length": 256} | changes
    return calibration_rows(path, **arguments)


def test_rows_when_a_text_is_given_then_are_neighbouring_pieces_of_all_of_it(tmp_path):
    text = "".join(chr(32 + i % 90) for i in range(600))
    assert rows_of(tmp_path, "t.txt", text) == (
        tuple(encode(text[:256])),
        tuple(encode(text[256:512])),
        tuple(encode(text[512:])),
    )
    assert [len(row) for row in rows_of(tmp_path, "t.txt", text, max_length=100)] == [100] * 6


def test_rows_when_a_text_is_long_then_come_evenly_from_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration_module, "TOKENS", 1024)
    text = "".join(chr(32 + (i // 256) % 90) * 1 for i in range(256 * 40))
    rows = rows_of(tmp_path, "t.txt", text)
    assert len(rows) == 4
    assert [row[0] - 32 for row in rows] == [0, 10, 20, 30]


def test_rows_when_prompts_are_given_then_every_kind_of_line_counts(tmp_path):
    lines = [{"prompt": "abc"}, {"text": "defg"}, {"turns": ["hij", "later"]}, {"input_ids": [1, 2, 3]}, {"prompt": "x"}]
    content = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    assert rows_of(tmp_path, "p.jsonl", content) == (tuple(encode("abc")), tuple(encode("defg")), tuple(encode("hij")), (1, 2, 3))


@pytest.mark.parametrize(
    ("name", "content", "changes", "words"),
    [
        ("t.txt", "", {}, ("no row",)),
        ("t.txt", "a", {}, ("no row",)),
        ("t.txt", b"\xff\xfe", {}, ("not UTF-8", "byte 0")),
        ("t.txt", "abc", {"encode": None}, ("no tokenizer.json",)),
        ("t.txt", "abc", {"config": replace(LLAMA_LIKE, vocab_size=98)}, ("the id 98", "0 to 97")),
        ("p.jsonl", "{", {}, ("p.jsonl, line 1",)),
        ("p.jsonl", '{"prompt": "ok"}\n{"prompt": 3}', {}, ("line 2", "prompt, text, turns, input_ids")),
        ("p.jsonl", '{"prompt": "a", "text": "b"}', {}, ("line 1",)),
        ("p.jsonl", '{"turns": []}', {}, ("line 1",)),
        ("p.jsonl", '{"input_ids": [1, true]}', {}, ("line 1",)),
        ("p.jsonl", '{"input_ids": [1, -2]}', {}, ("the id -2",)),
        ("p.jsonl", "[]", {}, ("line 1",)),
        ("p.jsonl", '{"prompt": "abc"}', {"encode": None}, ("no tokenizer.json",)),
    ],
)
def test_rows_when_the_file_is_bad_then_it_is_refused_by_name(tmp_path, name, content, changes, words):
    with pytest.raises(InputError) as e:
        rows_of(tmp_path, name, content, **changes)
    assert all(word in str(e.value) for word in words)


def test_rows_when_the_path_is_a_folder_or_absent_then_it_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match="no file"):
            calibration_rows(path, encode, LLAMA_LIKE, 256)


def test_rows_when_written_and_read_then_are_the_same():
    rows = ((1, 2, 3), (4, 5))
    assert read_rows(dump_rows(rows), Calibration("t", 2, 5), LLAMA_LIKE) == rows


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", ("calibration.json",)),
        (b'{"rows": [[1, 2]], "more": 1}', ("no list of rows",)),
        (b'{"rows": [[1, "2"]]}', ("no list of rows",)),
        (b'{"rows": [[1]]}', ("no list of rows",)),
        (b'{"rows": [[1, 2]]}', ("1 rows of 2 ids", "2 of 5")),
        (b'{"rows": [[1, 2, 3], [4, 131]]}', ("the id 131",)),
        (b'{"rows": [[1, 2], [3, 4, 5]]}', None),
    ],
)
def test_rows_of_a_bundle_when_damaged_then_are_refused(data, words):
    if words is None:
        assert read_rows(data, Calibration("t", 2, 5), LLAMA_LIKE)
        return
    with pytest.raises(InputError) as e:
        read_rows(data, Calibration("t", 2, 5), LLAMA_LIKE)
    assert all(word in str(e.value) for word in words)


def checkpoint_of(config: ModelConfig, tmp_path):
    hot_decoder(config).save_pretrained(tmp_path / "checkpoint")
    return open_checkpoint(tmp_path / "checkpoint")


ROWS = tuple(
    tuple(int(i) for i in torch.randint(0, 131, (n,), generator=torch.Generator().manual_seed(n))) for n in (40, 40, 9, 64, 2)
)


@pytest.mark.parametrize("rows", [None, ROWS], ids=["nearest", "calibrated"])
@pytest.mark.parametrize("config", [SMALL, replace(SMALL, tied=False, head_bias=True), replace(GPT2_LIKE, n_layers=2)])
def test_tensors_when_listed_then_are_those_of_the_table_in_its_order(config, rows, tmp_path):
    quantization = Quantization("int4", "int8", 64)
    stored = stored_tensors(config, "fp32", quantization)
    found = list(quantized_tensors(checkpoint_of(config, tmp_path), quantization, rows))
    names = [name for name in stored if not name.startswith(("rope", "alibi"))]
    assert [t.name for t in found] == names
    kinds = {torch.float32: "fp32", torch.float16: "fp16"}
    for tensor in found:
        assert stored[tensor.name] == (tuple(tensor.tensor.shape), tensor.dtype)
        assert tensor.tensor.is_contiguous()
        assert kinds.get(tensor.tensor.dtype, tensor.dtype) == tensor.dtype
    assert {t.dtype for t in found if is_matrix(t.name)} == {"int4", "int8"}


class _Inputs:
    """Mean of x xᵀ at a matrix of a whole model, which reads what the blocks before it make."""

    def __init__(self, decoder: Decoder, name: str) -> None:
        seen: list[torch.Tensor] = []
        module = decoder.get_submodule(name.removesuffix(".weight"))
        handle = module.register_forward_pre_hook(
            lambda _, arguments: seen.append(arguments[0].reshape(-1, arguments[0].shape[-1]))
        )
        with torch.inference_mode():
            for row in ROWS:
                decoder(torch.tensor([row]))
        handle.remove()
        x = torch.cat(seen)
        self.moments = x.T @ x / len(x)


@pytest.mark.parametrize("config", [SMALL, replace(GPT2_LIKE, n_layers=2)], ids=["llama", "gpt2"])
def test_matrices_when_calibrated_then_are_rounded_for_what_the_rounded_blocks_before_them_make(config, tmp_path):
    """The streamed result against a whole model in float64 into which each rounded block is put."""
    checkpoint = checkpoint_of(config, tmp_path)
    found = {t.name: t.tensor for t in quantized_tensors(checkpoint, Quantization("int4", "int4", 32), ROWS)}
    decoder = Decoder(untied(config)).double().eval()
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            if name == "head.weight":
                parameter.copy_(checkpoint.read("embedding.weight").T)
            else:
                parameter.copy_(checkpoint.read(name, torch.float16 if name == "embedding.weight" else torch.float32))
    parts = ["blocks.0.", "blocks.1.", "head."]
    compared = 0
    for part in parts:
        names = [name for name in parameters if name.startswith(part) and is_matrix(name)]
        rounded = {}
        for name in names:
            weight = parameters[name].detach().float()
            rounded[name] = quantize_with(weight, "int4", 32, _Inputs(decoder, name).moments)
            same = (rounded[name].values == found[name]).float().mean()
            assert same > 0.999, name  # sums are taken in another order here
            compared += 1
        with torch.no_grad():
            for name in names:
                scale = found[name.replace(".weight", ".scale")]
                parameters[name].copy_(Quantized(found[name], scale).dequantized()[: len(parameters[name])])
    assert compared == len([n for n in found if is_matrix(n)])


LAYOUTS: dict[str, ModelConfig] = {
    "parallel, one norm, partial rotary": replace(SMALL, residual="parallel_shared", norm="layernorm", rope=RopeConfig(dim=8)),
    "parallel, two norms": replace(SMALL, residual="parallel", qkv_bias=True),
    "norms behind only": replace(SMALL, pre_norm=False, post_norm=True, qk_norm="width"),
    "norms on both sides, soft caps": replace(
        SMALL, post_norm=True, attention_softcap=20.0, logit_softcap=30.0, embedding_scale=7.0
    ),
    "windows": replace(SMALL, window=8, window_layers=(0,), window_rope=RopeConfig(theta=500.0), qk_norm="head"),
    "alibi": replace(SMALL, positions="alibi", rope=None, gated=False, activation="gelu", embedding_norm=True),
    "one kv head, untied": replace(SMALL, n_kv_heads=1, tied=False, logit_scale=0.5, nope_layers=(1,)),
}


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_calibration_when_blocks_are_laid_out_otherwise_then_outputs_are_closer_than_to_the_nearest(layout, tmp_path):
    """Of the whole model: the streamed blocks are those that the decoder runs."""
    config = LAYOUTS[layout]
    checkpoint = checkpoint_of(config, tmp_path)
    exact = Decoder.from_pretrained(checkpoint.path).double()
    generator = torch.Generator().manual_seed(1)
    rows = tuple(tuple(int(i) for i in torch.randint(0, 131, (48,), generator=generator)) for _ in range(24))
    errors = []
    for known in (rows, None):
        found = {t.name: t.tensor for t in quantized_tensors(checkpoint, Quantization("int8", "int8", 32), known)}
        decoder = Decoder(untied(config)).double().eval()
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if is_matrix(name):
                    scales = found[name.replace(".weight", ".scale")]
                    parameter.copy_(Quantized(found[name], scales).dequantized()[: len(parameter)])
                else:
                    parameter.copy_(found[name])
        with torch.inference_mode():
            ids = torch.tensor(rows[:8])
            errors.append(float((decoder(ids) - exact(ids)).square().mean()))
    assert errors[0] < 0.8 * errors[1], errors


def test_rows_when_a_prompt_holds_a_line_separator_of_unicode_then_it_is_no_end_of_a_line(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\u2028b\x85c"}\r\n{"prompt": "de"}\n', "utf-8")
    rows = calibration_rows(tmp_path / "p.jsonl", lambda text: [ord(c) % 100 for c in text], LLAMA_LIKE, 64)
    assert [len(row) for row in rows] == [5, 2]
