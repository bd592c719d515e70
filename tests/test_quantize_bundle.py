"""Quantised bundles: manifest, graphs, and what ONNX Runtime makes of them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import GPT2_LIKE, LLAMA_LIKE, hot_decoder
from test_bundle_manifest import make_manifest

from tformer_deploy import api, cli
from tformer_deploy.backends.graph import PROVIDER, LoadedGraph, import_runtime
from tformer_deploy.backends.onnxruntime import OnnxRuntimeBackend
from tformer_deploy.backends.torch import bundle_backend
from tformer_deploy.bundle import Manifest, open_bundle
from tformer_deploy.bundle.manifest import FileRecord, TensorRecord
from tformer_deploy.bundle.manifest_io import dump_manifest, parse_manifest
from tformer_deploy.bundle.quantization import Calibration, Quantization, is_matrix, scale_name, stored_size, stored_tensors
from tformer_deploy.bundle.seal import seal
from tformer_deploy.bundle.tensor_table import ALIGNMENT
from tformer_deploy.config import ModelConfig
from tformer_deploy.errors import InputError, UsageError
from tformer_deploy.exporters.onnx.lint import bundle_faults
from tformer_deploy.quantization.rounding import LEVELS

# Widths that 32 divides, and widths that nothing divides.
PADDED = replace(LLAMA_LIKE, n_layers=2, d_model=40, d_ff=100)


def quantised_manifest(config: ModelConfig = LLAMA_LIKE, calibrated: bool = False) -> Manifest:
    quantization = Quantization("int4", "int8", 64, Calibration("text.txt", 2, 20) if calibrated else None)
    tensors, offset = {}, 0
    for name, (shape, dtype) in stored_tensors(config, "fp32", quantization).items():
        tensors[name] = TensorRecord(offset, stored_size(shape, dtype), shape, dtype)
        offset += -(-tensors[name].size // ALIGNMENT) * ALIGNMENT
    manifest = make_manifest(config)
    files = manifest.files | {"weights.bin": FileRecord("a" * 64, offset)}
    if calibrated:
        files["calibration.json"] = FileRecord("b" * 64, 10)
    return replace(manifest, tensors=tensors, files=files, quantization=quantization, schema=2)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("config", [LLAMA_LIKE, GPT2_LIKE, PADDED, replace(LLAMA_LIKE, tied=False)])
def test_manifest_when_quantised_then_is_read_as_it_was_written(config, calibrated):
    manifest = quantised_manifest(config, calibrated)
    data = dump_manifest(manifest)
    assert parse_manifest(data) == manifest
    assert json.loads(data)["schema"] == 2


def test_manifest_when_nothing_is_quantised_then_keeps_the_first_schema_and_its_fields():
    raw = json.loads(dump_manifest(make_manifest()))
    assert raw["schema"] == 1
    assert "quantization" not in raw
    assert set(raw) == {f.name for f in dataclasses.fields(Manifest)} - {"quantization"}


def put(*path: str, value: object):
    def edit(raw):
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (put("schema", value=1), ("unknown fields ['quantization']",)),
        (lambda raw: raw.pop("quantization"), ("missing fields ['quantization']",)),
        (put("quantization", value=None), ("quantization is NoneType",)),
        (put("quantization", "kind", value="int2"), ("quantization.kind is 'int2'", "int8, int4")),
        (put("quantization", "head", value=["int8"]), ("quantization.head",)),
        (put("quantization", "block", value=48), ("quantization.block is 48", "32, 64, 128")),
        (put("quantization", "block", value=True), ("quantization.block is True",)),
        (put("quantization", "block", value=32), ("blocks.0.attention.query.scale", "expected fp32 [2, 64]")),
        (put("quantization", "kind", value="int8"), ("blocks.0.attention.query.weight is int4", "expected int8")),
        (put("quantization", "more", value=1), ("unknown fields ['more']",)),
        (put("quantization", "calibration", value={"name": "t", "rows": 1, "tokens": 2}), ("files lacks calibration.json",)),
        (put("quantization", "calibration", value={"name": "t", "rows": 0, "tokens": 2}), ("calibration.rows is 0",)),
        (put("quantization", "calibration", value={"name": 1, "rows": 1, "tokens": 2}), ("calibration.name is 1",)),
        (put("quantization", "calibration", value={"rows": 1, "tokens": 2}), ("missing fields ['name']",)),
        (put("files", "calibration.json", value={"sha256": "b" * 64, "size": 3}), ("names calibration.json",)),
        (put("tensors", "embedding.weight", "dtype", value="fp32"), ("embedding.weight", "do not agree")),
        (put("tensors", "head.weight", "dtype", value="int4"), ("head.weight", "do not agree")),
        (put("tensors", "head.weight", "dtype", value="int3"), ("int3",)),
        (lambda raw: raw["tensors"].pop("head.scale"), ("head.scale is missing",)),
        (lambda raw: raw["tensors"].pop("blocks.2.feed_forward.down.weight"), ("blocks.2.feed_forward.down.weight is missing",)),
    ],
)
def test_manifest_when_it_lies_about_quantisation_then_is_refused_by_name(edit, words):
    raw = json.loads(dump_manifest(quantised_manifest()))
    edit(raw)
    with pytest.raises(InputError) as e:
        parse_manifest(json.dumps(raw).encode())
    assert all(word in str(e.value) for word in words), e.value


def exported(folder: Path, config: ModelConfig, **options: object) -> Path:
    hot_decoder(config).save_pretrained(folder / "checkpoint")
    return api.export(folder / "checkpoint", folder / "bundle", check=False, **options)


@pytest.fixture(scope="module")
def padded_int4(tmp_path_factory) -> Path:
    """Widths 40, 64 and 100 in blocks of 64, 64 and 128; the head in int8."""
    return exported(tmp_path_factory.mktemp("padded"), PADDED, quantize="int4", block=128, head="int8")


@pytest.fixture(scope="module")
def gpt2_int8(tmp_path_factory) -> Path:
    """Biases, learned positions, no gate."""
    return exported(tmp_path_factory.mktemp("gpt2"), replace(GPT2_LIKE, n_layers=2), quantize="int8", block=64)


@pytest.fixture(params=["padded_int4", "gpt2_int8"])
def bundle(request) -> Path:
    return request.getfixturevalue(request.param)


def matrices(path: Path) -> list[str]:
    return [name for name in open_bundle(path).manifest.tensors if is_matrix(name)]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_graph_when_quantised_then_holds_standard_operators_and_whole_blocks(bundle, phase):
    opened = open_bundle(bundle)
    assert bundle_faults(opened) == []
    proto = onnx.load(bundle / f"{phase}.onnx", load_external_data=False)
    assert {o.domain for o in proto.opset_import} == {""}
    onnx.checker.check_model(str(bundle / f"{phase}.onnx"))
    tensors = {t.name: t for t in proto.graph.initializer}
    producers = {output: node for node in proto.graph.node for output in node.output}
    products = [
        n for n in proto.graph.node if n.op_type == "MatMul" and producers.get(n.input[1], n).op_type == "DequantizeLinear"
    ]
    assert sorted(producers[n.input[1]].input[0] for n in products) == sorted(matrices(bundle))
    for product in products:
        node = producers[product.input[1]]
        attributes = {a.name: a.i for a in node.attribute}
        weight, scale = (tensors[name] for name in node.input)
        assert len(node.input) == 2  # symmetric: no zero points
        assert attributes["axis"] == 0
        assert weight.dims[0] == attributes["block_size"] * scale.dims[0]
        assert weight.dims[1] == scale.dims[1]
        assert attributes["block_size"] in (32, 64, 128)
        assert attributes["block_size"] <= opened.manifest.quantization.block
    embedding = next(n for n in proto.graph.node if n.op_type == "Gather" and n.input[0] == "embedding.weight")
    assert tensors["embedding.weight"].data_type == onnx.TensorProto.FLOAT16
    assert [n.op_type for n in proto.graph.node if embedding.output[0] in n.input] == ["Cast"]
    pads = [n for n in proto.graph.node if n.op_type == "Pad"]
    assert len(pads) == (2 * 3 + 1 if "padded" in str(bundle) else 0)  # before norm1's, norm2's readers and down; the head


def optimised_kinds(path: Path, folder: Path, **entries: str) -> tuple[Counter[str], list[dict[str, int]]]:
    """Operators of the graph that ONNX Runtime really runs, and the attributes of its quantised products."""
    runtime = import_runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    for key, value in entries.items():
        options.add_session_config_entry(f"session.{key}", value)
    runtime.InferenceSession(str(path), options, providers=[PROVIDER])
    nodes = onnx.load(folder / "optimised.onnx", load_external_data=False).graph.node
    found = [{a.name: a.i for a in n.attribute} for n in nodes if n.op_type == "MatMulNBits"]
    return Counter(n.op_type for n in nodes), found


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_runtime_when_it_loads_a_quantised_graph_then_fuses_every_matrix(bundle, phase, tmp_path):
    kinds, products = optimised_kinds(bundle / f"{phase}.onnx", tmp_path)
    assert kinds["MatMulNBits"] == len(matrices(bundle))
    assert kinds["DequantizeLinear"] == 0
    assert {p["accuracy_level"] for p in products} == {4}
    assert {p["bits"] for p in products} == ({4, 8} if "padded" in str(bundle) else {8})


def test_runtime_when_weights_are_to_be_dequantised_then_none_is_left(bundle, tmp_path):
    kinds, _ = optimised_kinds(bundle / "decode.onnx", tmp_path, disable_quant_qdq="1")
    assert kinds["MatMulNBits"] == kinds["DequantizeLinear"] == 0
    assert kinds["MatMul"] >= len(matrices(bundle))


@pytest.mark.parametrize("options", [{"dequantised": True}, {"optimised": False}], ids=["dequantised", "node by node"])
def test_graphs_when_run_exactly_then_equal_the_dequantised_reference(bundle, options):
    opened = open_bundle(bundle)
    backend, reference = OnnxRuntimeBackend(opened, **options), bundle_backend(opened)
    random = np.random.default_rng(3)
    ids = random.integers(0, 131, (3, 9))
    everywhere = np.tile(np.arange(9), (3, 1))
    caches = [b.allocate(3, 16) for b in (backend, reference)]
    found, wanted = (b.prefill(ids, everywhere, c) for b, c in zip((backend, reference), caches, strict=True))
    assert np.abs(found - wanted).max() < 1e-4
    new, lengths, first = random.integers(0, 131, (3, 1)), np.array([9, 4, 1]), np.zeros((3, 1), np.int64)
    found, wanted = (b.decode(new, lengths, first, c) for b, c in zip((backend, reference), caches, strict=True))
    assert np.abs(found - wanted).max() < 1e-4


def test_reference_of_a_quantised_bundle_when_compared_with_the_checkpoint_then_is_near_and_not_equal(bundle):
    """The chain by hand: what the bundle stores is the checkpoint within half a step of each block."""
    from tformer_deploy.checkpoints import open_checkpoint

    opened, checkpoint = open_bundle(bundle), open_checkpoint(bundle.parent / "checkpoint")
    decoder = bundle_backend(opened).decoder
    for name, parameter in decoder.named_parameters():
        if not is_matrix(name):
            exact = checkpoint.read(name, torch.float32)
            assert torch.equal(parameter, exact.half().float() if name == "embedding.weight" else exact), name
            continue
        exact = (
            checkpoint.read("embedding.weight").T
            if name == "head.weight" and opened.manifest.config.tied
            else checkpoint.read(name)
        )
        scales = torch.from_numpy(opened.tensor(scale_name(name)))
        block = opened.manifest.tensors[name].shape[0] // len(scales)
        steps = scales.repeat_interleave(block, 0)[: len(exact)]
        values = torch.from_numpy(opened.tensor(name))[: len(exact)]
        low, high = LEVELS[opened.manifest.quantization.kind_of(name)]
        inside = (values > low) & (values < high)  # a value outside the levels is clipped
        assert ((parameter - exact).abs() <= 0.501 * steps)[inside].all(), name
        assert inside.float().mean() > 0.9
        assert (parameter != exact).any()


@pytest.mark.parametrize("profile", ["portable", "cpu"])
def test_session_when_quantised_then_prefill_and_decode_go_together(bundle, profile):
    session = open_bundle(bundle).session(threads=1, profile=profile)
    rows = [[5, 9, 3, 70], [8, 1], [30]]
    once = session.prefill([[*row, 11] for row in rows])
    session.prefill(rows)
    twice = session.decode([11, 11, 11])
    assert np.abs(once - twice).max() < 0.05 * np.abs(once).max()
    assert (once.argmax(1) == twice.argmax(1)).all()


def test_derived_graphs_when_quantised_then_hold_the_weights_once_and_fused(gpt2_int8, padded_int4):
    from tformer_deploy.backends.cpu.derived import derive, find_derived
    from tformer_deploy.backends.cpu.plan import plan_for

    for path in (gpt2_int8, padded_int4):
        opened = open_bundle(path)
        plan = plan_for(opened.manifest.config, opened.manifest.dtype)
        assert plan.applies
        derived = find_derived(opened, plan) or derive(opened, plan)
        for name in plan.graphs:
            kinds = Counter(n.op_type for n in onnx.load(derived.graph(name), load_external_data=False).graph.node)
            assert kinds["MatMulNBits"] == len(matrices(path))
            assert kinds["DequantizeLinear"] == 0
        assert [p.name for p in derived.path.glob("*.bin")] == ["step.bin"]


def test_command_when_quantising_then_says_how_and_inspect_too(tmp_path, capsys):
    hot_decoder(replace(PADDED, n_layers=1)).save_pretrained(tmp_path / "checkpoint")
    rows = [{"input_ids": [int(i) for i in np.random.default_rng(n).integers(0, 131, 20)]} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    arguments = ["--quantize", "int4", "--calibration", str(tmp_path / "rows.jsonl"), "--no-check"]
    code = cli.run(["export", str(tmp_path / "checkpoint"), "-o", str(tmp_path / "bundle"), *arguments])
    out = capsys.readouterr().out
    assert code == 0
    assert "Matrices in int4, blocks of 128: rounded for 80 tokens of rows.jsonl." in out
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert manifest.quantization == Quantization("int4", "int4", 128, Calibration("rows.jsonl", 4, 80))
    assert manifest.schema == 2
    assert cli.run(["inspect", str(tmp_path / "bundle"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["quantization"]["kind"], found["quantization"]["block"]) == ("int4", 128)
    assert "rows.jsonl" in found["quantization"]["sentence"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block": 32}, ("--block", "nothing is quantised")),
        ({"head": "int8"}, ("--head",)),
        ({"calibration": "t.txt"}, ("--calibration",)),
        ({"quantize": "int8", "dtype": "fp16"}, ("--quantize", "fp16")),
    ],
)
def test_export_when_options_do_not_go_together_then_they_are_refused(options, words, llama_checkpoint, tmp_path):
    with pytest.raises(UsageError) as e:
        api.export(llama_checkpoint, tmp_path / "b", check=False, **options)
    assert all(word in str(e.value) for word in words)
    assert not (tmp_path / "b").exists()


def test_export_when_calibrated_without_a_tokenizer_then_is_refused_before_anything_is_written(llama_checkpoint, tmp_path):
    (tmp_path / "t.txt").write_text("some text")
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        api.export(llama_checkpoint, tmp_path / "b", quantize="int4", calibration=tmp_path / "t.txt", check=False)
    assert list(tmp_path.iterdir()) == [tmp_path / "t.txt"]


def test_loaded_graph_when_a_block_of_int8_is_multiplied_then_rows_are_rounded_to_int8(gpt2_int8):
    """Otherwise the runtime would take its exact kernels, which for int8 are hundreds of times slower."""
    opened = open_bundle(gpt2_int8)
    graph = LoadedGraph(opened.decode_path, opened.manifest.config)
    entry = graph._session.get_session_options().get_session_config_entry("session.qdq_matmulnbits_accuracy_level")
    assert entry == "4"


@pytest.fixture(scope="module", params=["int8", "int4", "int8-dynamic"])
def shakespeare(request, tmp_path_factory) -> Path:
    """A bundle with a tokenizer, in each kind."""
    source = Path(__file__).resolve().parent.parent / "samples" / "shakespeare"
    return api.export(source, tmp_path_factory.mktemp("kinds") / "bundle", quantize=request.param, check=False)


def test_generate_and_run_when_a_bundle_is_quantised_then_complete_text(shakespeare, tmp_path, capsys):
    assert cli.run(["generate", str(shakespeare), "ROMEO:", "--max-new-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["completion_tokens"] == 4
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "ROMEO:", "max_new_tokens": 3}\n{"input_ids": [1, 2], "max_new_tokens": 2}\n')
    assert cli.run(["run", str(shakespeare), str(prompts), "-o", str(output)]) == 0
    assert [json.loads(line)["completion_tokens"] for line in output.read_text().splitlines()] == [3, 2]


@pytest.mark.parametrize("wrong", ["scale", "norm"])
def test_generate_when_a_quantised_bundle_holds_nan_then_names_the_tensor(shakespeare, wrong, tmp_path, capsys):
    path = Path(shutil.copytree(shakespeare, tmp_path / "bundle"))
    tensors = open_bundle(path).manifest.tensors
    name = next(n for n, t in tensors.items() if wrong in n and t.dtype == "fp32")
    with (path / "weights.bin").open("r+b") as file:
        file.seek(tensors[name].offset)
        file.write(np.float32(np.nan).tobytes())
    seal(path)
    assert cli.run(["generate", str(path), "ROMEO:", "--max-new-tokens", "4"]) == 3
    assert f"tensor {name} holds 1 NaN or infinite values" in capsys.readouterr().err
