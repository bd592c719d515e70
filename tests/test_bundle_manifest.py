"""``manifest.json`` is read strictly: every way to lie in it is refused by name."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import pytest
from conftest import GPT2_LIKE, LLAMA_LIKE
from hypothesis import given
from hypothesis import strategies as st

from tformer_deploy.bundle.manifest import FileRecord, Manifest, Source, TensorRecord
from tformer_deploy.bundle.manifest_io import dump_manifest, parse_manifest
from tformer_deploy.bundle.tensor_table import ALIGNMENT, expected_tensors
from tformer_deploy.config import ModelConfig
from tformer_deploy.errors import InputError
from tformer_deploy.reference import Decoder


def make_manifest(config: ModelConfig = LLAMA_LIKE, **changes) -> Manifest:
    tensors, offset = {}, 0
    for name, shape in expected_tensors(config).items():
        size = 4
        for dim in shape:
            size *= dim
        tensors[name] = TensorRecord(offset, size, shape, "fp32")
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    manifest = Manifest(
        config=config,
        dtype="fp32",
        max_length=config.max_length,
        eos_token_ids=(2,),
        bos_token_id=1,
        source=Source("m", "safetensors", "tformer", "0" * 64),
        versions={"tformer-deploy": "0.1.0"},
        files={
            n: FileRecord("a" * 64, offset if n == "weights.bin" else 10) for n in ("decode.onnx", "prefill.onnx", "weights.bin")
        },
        tensors=tensors,
    )
    return replace(manifest, **changes)


def edited(edit, config: ModelConfig = LLAMA_LIKE) -> bytes:
    raw = json.loads(dump_manifest(make_manifest(config)))
    edit(raw)
    return json.dumps(raw).encode()


@pytest.mark.parametrize("config", [LLAMA_LIKE, GPT2_LIKE, replace(LLAMA_LIKE, tied=False)], ids=["llama", "gpt2", "untied"])
def test_manifest_when_written_and_read_then_is_the_same(config):
    manifest = make_manifest(config)
    assert parse_manifest(dump_manifest(manifest)) == manifest
    assert dump_manifest(parse_manifest(dump_manifest(manifest))) == dump_manifest(manifest)


@pytest.mark.parametrize("config", [LLAMA_LIKE, GPT2_LIKE], ids=["llama", "gpt2"])
def test_expected_tensors_when_compared_with_the_decoder_then_are_its_parameters_in_order(config):
    decoder = Decoder(config)
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    expected = expected_tensors(config)
    expected.pop("rope.frequencies", None)
    assert list(expected.items()) == list(shapes.items())


def set_at(*path):
    *parents, last, value = path

    def edit(raw):
        for key in parents:
            raw = raw[key]
        raw[last] = value

    return edit


def delete(*path):
    *parents, last = path

    def edit(raw):
        for key in parents:
            raw = raw[key]
        del raw[last]

    return edit


WEIGHT = "blocks.0.attention.query.weight"
LIES = {
    "a field too many": (set_at("extra", 1), "extra"),
    "a field missing": (delete("dtype"), "dtype"),
    "an older schema": (set_at("schema", 0), "schema"),
    "a schema of another type": (set_at("schema", True), "schema"),
    "dtype": (set_at("dtype", "int4"), "dtype"),
    "eos above the vocabulary": (set_at("eos_token_ids", [131]), "eos_token_ids"),
    "eos no list": (set_at("eos_token_ids", 2), "eos_token_ids"),
    "eos a truth value": (set_at("eos_token_ids", [True]), "eos_token_ids"),
    "bos negative": (set_at("bos_token_id", -1), "bos_token_id"),
    "max_length above the model's": (set_at("max_length", 257), "max_length"),
    "max_length no whole number": (set_at("max_length", 1e2), "max_length"),
    "a config field too many": (set_at("config", "extra", 1), "extra"),
    "a config that does not divide": (set_at("config", "n_heads", 3), "n_heads"),
    "a path up": (set_at("files", "../x", {"sha256": "a" * 64, "size": 1}), "../x"),
    "an absolute path": (set_at("files", "/etc/passwd", {"sha256": "a" * 64, "size": 1}), "/etc/passwd"),
    "a drive letter": (set_at("files", "C:x", {"sha256": "a" * 64, "size": 1}), "C:x"),
    "a hidden file": (set_at("files", ".x", {"sha256": "a" * 64, "size": 1}), ".x"),
    "itself": (set_at("files", "manifest.json", {"sha256": "a" * 64, "size": 1}), "manifest.json"),
    "no weights": (delete("files", "weights.bin"), "weights.bin"),
    "no decode graph": (delete("files", "decode.onnx"), "decode.onnx"),
    "a short hash": (set_at("files", "decode.onnx", "sha256", "ab"), "sha256"),
    "a negative size": (set_at("files", "decode.onnx", "size", -1), "size"),
    "a size of 2^63": (set_at("files", "decode.onnx", "size", 2**63), "size"),
    "weights shorter than the table": (set_at("files", "weights.bin", "size", 4096), "weights.bin"),
    "a tensor missing": (delete("tensors", WEIGHT), WEIGHT),
    "a tensor of another model": (set_at("tensors", "x", {"offset": 0, "size": 4, "shape": [1], "dtype": "fp32"}), "x is not"),
    "a tensor of another shape": (set_at("tensors", WEIGHT, "shape", [32, 128]), WEIGHT),
    "a tensor of another size": (set_at("tensors", WEIGHT, "size", 8), WEIGHT),
    "a tensor of another dtype": (
        set_at("tensors", "rope.frequencies", {"offset": 0, "size": 16, "shape": [8], "dtype": "fp16"}),
        "rope",
    ),
    "a tensor inside another": (set_at("tensors", WEIGHT, "offset", 4096), WEIGHT),
    "a tensor off its page": (set_at("tensors", "embedding.weight", "offset", 4), "embedding.weight"),
    "a negative offset": (set_at("tensors", WEIGHT, "offset", -4096), WEIGHT),
    "a dim of 10^12": (set_at("tensors", WEIGHT, "shape", [10**12]), WEIGHT),
    "two thousand million layers": (set_at("config", "n_layers", 2**31 - 1), "layers"),
    "a source without a hash": (set_at("source", "sha256", "?"), "source.sha256"),
    "versions of another type": (set_at("versions", "torch", 2), "versions.torch"),
}


@pytest.mark.parametrize(("edit", "named"), LIES.values(), ids=LIES)
def test_manifest_when_it_lies_then_is_refused_by_name(edit, named):
    parse_manifest(edited(lambda raw: None))
    with pytest.raises(InputError) as e:
        parse_manifest(edited(edit))
    assert named in e.value.message


@pytest.mark.parametrize(
    ("versions", "hint"),
    [
        ({"tformer-deploy": "9.1.0"}, "tformer-deploy >= 9.1.0"),
        ({"tformer-deploy": "\x1b[31m"}, "newer tformer-deploy"),
        (None, "newer"),
    ],
)
def test_manifest_when_its_schema_is_newer_then_says_what_to_install(versions, hint):
    with pytest.raises(InputError) as e:
        parse_manifest(json.dumps({"schema": 3, "versions": versions, "unknown": 1}).encode())
    assert hint in str(e.value.hint)
    assert "\x1b" not in str(e.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"{", b'{"schema": 1, "schema": 1}', b'{"schema": NaN}', b"\xff\xfe", b'{"schema": 1}', b"[" * 10000],
    ids=["empty", "list", "null", "cut", "key twice", "NaN", "UTF-16", "alone", "deep"],
)
def test_manifest_when_no_manifest_then_is_refused(data):
    with pytest.raises(InputError):
        parse_manifest(data)


@given(cut=st.integers(0, 2000), byte=st.integers(0, 255))
def test_manifest_when_any_byte_is_changed_then_is_read_or_refused_and_never_crashes(cut, byte):
    data = bytearray(dump_manifest(make_manifest()))
    data[cut % len(data)] = byte
    with contextlib.suppress(InputError):
        parse_manifest(bytes(data))
