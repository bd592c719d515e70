"""int8-dynamic: rows rounded to int8 in the graph, one scale a row, and nothing of a row that depends on its neighbours."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from conftest import GPT2_LIKE, LLAMA_LIKE, hot_decoder
from onnx import numpy_helper
from test_bundle_manifest import make_manifest
from test_quantize_bundle import matrices, optimised_kinds, put

from tformer_deploy import api, cli
from tformer_deploy.backends import graph as loaded
from tformer_deploy.backends import open_backend, open_session
from tformer_deploy.backends.cpu.derived import derive, find_derived
from tformer_deploy.backends.cpu.plan import plan_for
from tformer_deploy.backends.dynamic import find_products
from tformer_deploy.backends.onnxruntime import OnnxRuntimeBackend
from tformer_deploy.backends.torch import bundle_backend
from tformer_deploy.bundle import Manifest, open_bundle
from tformer_deploy.bundle.manifest import FileRecord, TensorRecord
from tformer_deploy.bundle.manifest_io import dump_manifest, parse_manifest
from tformer_deploy.bundle.quantization import Calibration, Quantization, is_matrix, scale_name, stored_size, stored_tensors
from tformer_deploy.bundle.seal import seal
from tformer_deploy.bundle.tensor_table import ALIGNMENT
from tformer_deploy.errors import InputError, UsageError
from tformer_deploy.exporters.onnx.lint import bundle_faults
from tformer_deploy.exporters.tensorrt.preflight import make_plan as make_engine_plan
from tformer_deploy.parity import accuracy, check_bundle, products
from tformer_deploy.parity.plan import make_plan
from tformer_deploy.quantization.rows import SMALLEST, round_rows

DYNAMIC = Quantization("int8-dynamic", "int8-dynamic", None)
CONFIGS = {
    "llama": replace(LLAMA_LIKE, n_layers=2, d_model=40, d_ff=100),  # grouped heads, a tied head, widths that nothing divides
    "gpt2": replace(GPT2_LIKE, n_layers=2),  # biases
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(name)
        hot_decoder(config).save_pretrained(folder / "checkpoint")
        made[name] = api.export(folder / "checkpoint", folder / "bundle", quantize="int8-dynamic", check=False)
    return made


@pytest.fixture(params=CONFIGS)
def bundle(bundles, request) -> Path:
    return bundles[request.param]


@pytest.fixture(scope="module")
def llama(bundles) -> Path:
    return bundles["llama"]


# ---- Manifest and options.


def dynamic_manifest() -> Manifest:
    tensors, offset = {}, 0
    for name, (shape, dtype) in stored_tensors(LLAMA_LIKE, "fp32", DYNAMIC).items():
        tensors[name] = TensorRecord(offset, stored_size(shape, dtype), shape, dtype)
        offset += -(-tensors[name].size // ALIGNMENT) * ALIGNMENT
    manifest = make_manifest(LLAMA_LIKE)
    files = manifest.files | {"weights.bin": FileRecord("a" * 64, offset)}
    return replace(manifest, tensors=tensors, files=files, quantization=DYNAMIC, schema=2)


def test_manifest_when_dynamic_then_is_read_as_it_was_written_and_has_a_scale_an_output():
    manifest = dynamic_manifest()
    data = dump_manifest(manifest)
    assert parse_manifest(data) == manifest
    assert json.loads(data)["quantization"] == {
        "kind": "int8-dynamic",
        "head": "int8-dynamic",
        "block": None,
        "calibration": None,
    }
    assert manifest.tensors["blocks.0.feed_forward.down.weight"].shape == (LLAMA_LIKE.d_ff, LLAMA_LIKE.d_model)  # no padding
    assert manifest.tensors["blocks.0.feed_forward.down.scale"].shape == (1, LLAMA_LIKE.d_model)
    assert manifest.tensors["head.weight"].dtype == "int8"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (put("quantization", "block", value=32), "quantization.block is 32; expected one of None"),
        (put("quantization", "head", value="int8"), "quantization.head is 'int8'; expected one of int8-dynamic"),
        (put("quantization", "kind", value="int8"), "quantization.head is 'int8-dynamic'; expected one of int8"),
        (put("tensors", "head.weight", "dtype", value="int8-dynamic"), "head.weight.dtype is 'int8-dynamic'"),
        (put("tensors", "head.scale", "shape", value=[131, 1]), "head.scale is fp32 [131, 1], expected fp32 [1, 131]"),
    ],
)
def test_manifest_when_it_lies_about_dynamic_rows_then_is_refused_by_name(edit, words):
    raw = json.loads(dump_manifest(dynamic_manifest()))
    edit(raw)
    with pytest.raises(InputError) as e:
        parse_manifest(json.dumps(raw).encode())
    assert words in str(e.value)


@pytest.mark.parametrize("options", [{"block": 32}, {"head": "int8"}])
def test_export_when_an_option_is_for_blocks_then_is_refused(options, llama_checkpoint, tmp_path):
    with pytest.raises(UsageError, match="does not go with --quantize int8-dynamic"):
        api.export(llama_checkpoint, tmp_path / "b", quantize="int8-dynamic", check=False, **options)


# ---- Rows.


def test_rows_when_rounded_then_halves_go_to_the_even_level_and_zeros_stay_zeros():
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 126.5], [0, 0, 0, 0, 0], [-3e38, 3e38, 1e38, 0, 1]])
    values, scales = round_rows(x, 5)
    assert values[0, 0].tolist() == [127, 0, 2, -2, 126]
    assert values[1, 0].tolist() == [0] * 5
    assert values[2, 0].tolist() == [-127, 127, 42, 0, 0]
    assert scales[:, 0, 0].tolist() == [1, float(torch.tensor(SMALLEST) / 127), float(torch.tensor(3e38) / 127)]


def test_rows_when_many_are_rounded_then_each_value_has_the_bits_of_float32_operators():
    """A division of two roundings moves three of these values to another level."""
    x = np.random.default_rng(0).standard_normal((4000, 512)).astype(np.float32)
    largest = np.abs(x).max(1, keepdims=True)
    values, scales = round_rows(torch.from_numpy(x), 512)
    assert np.array_equal(values[:, 0].numpy(), np.round(x * (np.float32(127) / largest)))
    assert np.array_equal(scales[:, 0].numpy(), largest / np.float32(127))


# ---- Graphs.


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_graph_when_dynamic_then_holds_standard_operators_and_rounds_what_several_matrices_read_once(bundle, phase):
    opened = open_bundle(bundle)
    assert bundle_faults(opened) == []
    onnx.checker.check_model(str(bundle / f"{phase}.onnx"))
    proto = onnx.load(bundle / f"{phase}.onnx", load_external_data=False)
    assert {o.domain for o in proto.opset_import} == {""}
    kinds = Counter(n.op_type for n in proto.graph.node)
    assert kinds["MatMulInteger"] == len(matrices(bundle))
    assert (
        kinds["QuantizeLinear"] == kinds["ReduceMax"] == 4 * 2 + 1
    )  # attention's input and output, feed-forward's two, the head
    assert not {"MatMul", "DequantizeLinear", "DynamicQuantizeLinear", "Pad"} & set(kinds)
    found = find_products(proto.graph, opened)
    assert [p.matrix for p in found] == matrices(bundle)
    tensors = {t.name: t for t in proto.graph.initializer}
    for product in (n for n in proto.graph.node if n.op_type == "MatMulInteger"):
        assert int(numpy_helper.to_array(tensors[product.input[2]])) == 128
        assert tensors[product.input[1]].data_type == onnx.TensorProto.INT8


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_runtime_when_it_loads_a_dynamic_graph_then_fuses_products_without_a_bias_alone(bundles, phase, tmp_path):
    """The fused kernel adds a bias before it multiplies with the row's scale; see docs/log.md."""
    kinds, _ = optimised_kinds(bundles["llama"] / f"{phase}.onnx", tmp_path)
    assert kinds["MatMulIntegerToFloat"] == len(matrices(bundles["llama"]))
    kinds, _ = optimised_kinds(bundles["gpt2"] / f"{phase}.onnx", tmp_path)
    assert kinds["MatMulInteger"] == 2 * 6  # all but the head have a bias
    assert kinds["MatMulIntegerToFloat"] == 1


@pytest.mark.parametrize(
    "options", [{"dequantised": True}, {"dequantised": True, "optimised": False}], ids=["fused", "node by node"]
)
def test_graphs_when_run_without_rounding_then_equal_the_dequantised_reference(bundle, options):
    opened = open_bundle(bundle)
    backends = (OnnxRuntimeBackend(opened, **options), bundle_backend(opened))
    random = np.random.default_rng(3)
    ids, everywhere = random.integers(0, 131, (3, 9)), np.tile(np.arange(9), (3, 1))
    caches = [b.allocate(3, 16) for b in backends]
    found, wanted = (b.prefill(ids, everywhere, c) for b, c in zip(backends, caches, strict=True))
    assert np.abs(found - wanted).max() < 1e-4
    new, lengths, first = random.integers(0, 131, (3, 1)), np.array([9, 4, 1]), np.zeros((3, 1), np.int64)
    found, wanted = (b.decode(new, lengths, first, c) for b, c in zip(backends, caches, strict=True))
    assert np.abs(found - wanted).max() < 1e-4


@pytest.mark.parametrize("profile", ["portable", "cpu"])
def test_row_when_others_padding_capacity_and_threads_differ_then_has_the_same_bits(bundle, profile):
    opened, random = open_bundle(bundle), np.random.default_rng(1)
    rows = [random.integers(0, 131, n).tolist() for n in (5, 1, 40, 9, 9, 30, 2, 17)]
    together = open_session(opened, profile=profile, threads=2)
    wanted = [together.prefill(rows, capacity=128), together.decode([3] * 8), together.decode([4] * 8)]
    for i, row in enumerate(rows):
        alone = open_session(opened, profile=profile, threads=1)
        found = [alone.prefill([row]), alone.decode([3]), alone.decode([4])]
        assert all(np.array_equal(a[i], b[0]) for a, b in zip(wanted, found, strict=True)), i


def test_prefill_when_a_neighbour_is_huge_then_a_row_keeps_its_bits(llama, tmp_path):
    """With DynamicQuantizeLinear, a neighbour that is twenty times larger takes most levels from a row."""
    path = shutil.copytree(llama, tmp_path / "b")
    record = open_bundle(path).manifest.tensors["embedding.weight"]
    with (path / "weights.bin").open("r+b") as file:  # token 7 is huge
        file.seek(record.offset + 7 * 40 * 2)
        file.write((np.ones(40, np.float16) * np.float16(6e4)).tobytes())
    seal(path)
    backend = open_backend(open_bundle(path), profile="portable")
    ids = np.array([[5, 9, 3], [7, 7, 7]])
    everywhere = np.tile(np.arange(3), (2, 1))
    both = backend.prefill(ids, everywhere, backend.allocate(2, 8))
    assert np.array_equal(both[:1], backend.prefill(ids[:1], everywhere[:1], backend.allocate(1, 8)))
    assert np.isfinite(both).all()


def test_derived_graphs_when_dynamic_then_hold_the_weights_once(bundle):
    opened = open_bundle(bundle)
    plan = plan_for(opened.manifest.config, opened.manifest.dtype)
    derived = find_derived(opened, plan) or derive(opened, plan)
    assert [p.name for p in derived.path.glob("*.bin")] == ["step.bin"]
    for name in plan.graphs:
        kinds = Counter(n.op_type for n in onnx.load(derived.graph(name), load_external_data=False).graph.node)
        assert kinds["MatMulInteger"] + kinds["MatMulIntegerToFloat"] == len(matrices(bundle))
        assert kinds["GroupQueryAttention"] or kinds["Attention"]


@pytest.mark.parametrize(("machine", "flags", "entry"), [
    ("x86_64", "flags : avx2 avx512f", "1"), ("x86_64", "flags : avx2 avx512_vnni", None), ("AMD64", None, "1"), ("aarch64", None, None),
])  # fmt: skip
def test_session_when_the_cpu_would_overflow_then_asks_for_exact_products(machine, flags, entry, monkeypatch):
    def read(*_):
        if flags is None:
            raise FileNotFoundError
        return flags

    monkeypatch.setattr(loaded.platform, "machine", lambda: machine)
    monkeypatch.setattr(loaded.Path, "read_text", read)
    assert loaded.product_entries().get("session.x64quantprecision") == entry


# ---- Parity.


def red(report) -> set[tuple[str, str]]:
    return {(c.group, c.metric) for c in report.checks if c.verdict == "red"}


@pytest.mark.parametrize(("suite", "profile"), [("quick", "portable"), ("full", "cpu")])
def test_check_when_dynamic_is_right_then_is_green_and_every_product_was_compared(bundle, suite, profile):
    report = check_bundle(bundle, bundle.parent / "checkpoint", suite, profile=profile)
    assert report.passed, red(report)
    found = {(c.group, c.metric): c for c in report.checks}
    for phase in ("prefill", "decode"):
        group = f"int8 products, {phase}"
        assert found[group, "products compared"].value == len(matrices(bundle))
        assert 0 < found[group, "largest relative error"].value < products.LINE == 5e-7
    assert found["prefill, ragged batch", "mean KL"].gate == 1e-7  # everything around the products, exactly
    assert found["deployed, each row alone", "prefill: mean KL"].value < 1e-12
    assert found["deployed against the unquantised model, its own text", "prefill: mean KL"].gate == 1e-3
    assert any("Matrices in int8-dynamic, one scale an output, and one a row" in note for note in report.notes)


def test_check_when_a_model_misses_the_lines_of_int8_then_is_red_and_export_says_what_to_do(llama, monkeypatch):
    monkeypatch.setattr(accuracy, "MEAN_KL", 1e-5)
    own = "deployed against the unquantised model, its own text"
    assert red(check_bundle(llama, llama.parent / "checkpoint")) == {(own, "prefill: mean KL"), (own, "decode: mean KL")}
    hint = api._cure(DYNAMIC)
    assert hint.startswith("Try --calibration with a text that the model is meant for, --quantize int8; or leave --quantize out")


def _reader(graph, kind: str, name: str):
    return next(n for n in graph.node if n.op_type == kind and name in n.input)


def _swap_scales(graph) -> None:
    """Keys with the scales of values."""
    _reader(graph, "Mul", "blocks.1.attention.key.scale").input[1] = "blocks.1.attention.value.scale"


def _another_row_scale(graph) -> None:
    """The output projection with the scales of the rows that query, key and value read."""
    query, out = (_reader(graph, "Mul", f"blocks.0.attention.{n}.scale") for n in ("query", "out"))
    out.input[0] = query.input[0]


def _constant(graph, node, place: int, value) -> None:
    graph.initializer.append(numpy_helper.from_array(value, f"fault.{node.name}"))
    node.input[place] = f"fault.{node.name}"


def _zero_point_of_product(graph) -> None:
    _constant(graph, _reader(graph, "MatMulInteger", "blocks.1.feed_forward.up.weight"), 2, np.array(127, np.uint8))


def _zero_point_of_rows(graph) -> None:
    _constant(graph, next(n for n in graph.node if n.op_type == "QuantizeLinear"), 2, np.array(129, np.uint8))


def _axis(graph) -> None:
    """A scale over the tokens of each input, so that one looks at its neighbours; of one token that is another fault."""
    _constant(graph, [n for n in graph.node if n.op_type == "ReduceMax"][1], 1, np.array([1]))


def _all_rows_together(graph) -> None:
    _constant(graph, [n for n in graph.node if n.op_type == "ReduceMax"][-1], 1, np.array([0, 1, 2]))


def _levels(graph) -> None:
    """Rows on twice as few levels than their scale says."""
    node = [n for n in graph.node if n.op_type == "Div"][1]
    assert node.name.endswith(".inverse")
    _constant(graph, node, 0, np.array(63, np.float32))


def _clamp(graph) -> None:
    """The largest value of a row is cut off: as many levels as say, of a scale that is too small."""
    for node in [n for n in graph.node if n.op_type == "Div"][:2]:
        _constant(graph, node, int(node.name.endswith(".scale")), np.array(160, np.float32))


FAULTS = [
    _swap_scales,
    _another_row_scale,
    _zero_point_of_product,
    _zero_point_of_rows,
    _axis,
    _all_rows_together,
    _levels,
    _clamp,
]


def faulty(bundle: Path, path: Path, phase: str, fault) -> Path:
    shutil.copytree(bundle, path)
    proto = onnx.load(path / f"{phase}.onnx", load_external_data=False)
    fault(proto.graph)
    (path / f"{phase}.onnx").write_bytes(proto.SerializeToString())
    seal(path)
    return path


@pytest.mark.parametrize(
    ("phase", "fault"),
    [(phase, fault) for phase in ("prefill", "decode") for fault in FAULTS if (phase, fault) != ("decode", _axis)],
    ids=lambda p: p if isinstance(p, str) else p.__name__.strip("_"),
)
def test_products_when_a_graph_rounds_otherwise_then_are_red(llama, tmp_path, phase, fault):
    path = faulty(llama, tmp_path / "b", phase, fault)
    opened = open_bundle(path)
    manifest = opened.manifest
    checks = products.compare_products(opened, make_plan(manifest.config, manifest.max_length, "quick"))
    wrong = [c for c in checks if c.verdict == "red"]
    assert {c.group for c in wrong} == {f"int8 products, {phase}"}
    # At least a thousand times the line: none of these hides near it.
    assert all(not c.value < 1000 * products.LINE for c in wrong if c.metric == "largest relative error")


def test_check_when_a_row_is_not_rounded_as_exported_then_the_matrix_is_named(llama, tmp_path):
    def cut_off(graph) -> None:
        """Cast to uint8 drops the fraction."""
        node = next(n for n in graph.node if n.op_type == "QuantizeLinear")
        node.op_type = "Cast"
        del node.input[1:]
        node.attribute.append(onnx.helper.make_attribute("to", onnx.TensorProto.UINT8))

    report = check_bundle(faulty(llama, tmp_path / "b", "decode", cut_off), llama.parent / "checkpoint")
    assert ("int8 products, decode", "ran to the end") in red(report)
    check = next(c for c in report.checks if c.group == "int8 products, decode")
    assert "blocks.0.attention.key.weight is not multiplied as exported" in check.detail


def test_check_when_something_beside_the_products_is_wrong_then_the_exact_comparison_is_red(llama, tmp_path):
    """Each product is right, of rows that are wrong."""

    def other_norm(graph) -> None:
        node = next(n for n in graph.node if "blocks.0.norm1.weight" in n.input)
        node.input[1] = "blocks.1.norm2.weight"

    found = red(check_bundle(faulty(llama, tmp_path / "b", "prefill", other_norm), llama.parent / "checkpoint"))
    assert ("prefill, ragged batch", "mean KL") in found
    assert not [group for group, _ in found if group.startswith("int8 products")]


# ---- Calibration, engines, the command line.


def test_export_when_calibrated_then_rounds_whole_inputs_for_it_and_the_check_recomputes_them(llama, tmp_path):
    checkpoint, plain = llama.parent / "checkpoint", open_bundle(llama)
    rows = [{"input_ids": [int(i) for i in np.random.default_rng(n).integers(0, 131, 40)]} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    path = api.export(checkpoint, tmp_path / "b", quantize="int8-dynamic", calibration=tmp_path / "rows.jsonl", check=False)
    found = open_bundle(path)
    assert found.manifest.quantization == replace(DYNAMIC, calibration=Calibration("rows.jsonl", 6, 240))
    name = "blocks.1.feed_forward.down.weight"
    assert np.array_equal(found.tensor(scale_name(name)), plain.tensor(scale_name(name)))  # clipping never pays at 255 levels
    assert (found.tensor(name) != plain.tensor(name)).any()
    report = check_bundle(path, checkpoint)
    assert report.passed, red(report)


def test_engine_when_the_bundle_is_dynamic_and_its_dtype_stays_then_is_refused_before_anything_is_built(llama, capsys):
    with pytest.raises(InputError, match="MatMulInteger"):
        make_engine_plan(open_bundle(llama).manifest, "fp32", None, 8, ())
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    assert cli.run(["build-engine", str(llama)]) == 3
    err = capsys.readouterr().err
    assert "MatMulInteger" in err
    assert "Give --dtype fp16 or bf16" in err
    assert not (llama / "engines").exists()


def test_engine_when_a_dynamic_bundle_is_cast_then_multiplies_the_same_matrices_as_stored(llama, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    path = shutil.copytree(llama, tmp_path / "b")
    built = api.build_engine(path, dtype="fp16", capacity=64, prompt_buckets=(16,), max_batch=2, targets=("8.9",))
    assert built.record.matrices == "int8"
    assert built.record.unpacked == {}
    assert "int8 matrices multiplied as stored" in built.record.summary
    derived, source = open_bundle(built.path / "graph"), open_bundle(path)
    assert derived.manifest.quantization == Quantization("int8", "int8", None)
    for name in matrices(path):
        assert np.array_equal(derived.tensor(name), source.tensor(name))
    kinds = [node.op_type for node in onnx.load(derived.decode_path, load_external_data=False).graph.node]
    assert kinds.count("DequantizeLinear") == len(matrices(path))
    assert "MatMulInteger" not in kinds


def test_inspect_when_dynamic_then_says_so_and_which_engine_can_be_made(llama, capsys):
    assert cli.run(["inspect", str(llama), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quantization"]["kind"] == "int8-dynamic"
    assert found["quantization"]["block"] is None
    assert len(found["tensorrt"]["fp32"]) == 1
    assert "MatMulInteger" in found["tensorrt"]["fp32"][0]
    assert found["tensorrt"]["fp16"] == []
    assert found["cpu"]["profile"] == "cpu"


def test_weights_when_stored_then_each_output_is_within_half_a_step_of_the_checkpoint(bundle):
    from tformer_deploy.checkpoints import open_checkpoint

    opened, checkpoint = open_bundle(bundle), open_checkpoint(bundle.parent / "checkpoint")
    for name in matrices(bundle):
        weight = checkpoint.read(name).numpy() if name in checkpoint.tensors else checkpoint.read("embedding.weight").numpy().T
        values, scales = opened.tensor(name), opened.tensor(scale_name(name))
        assert np.array_equal(scales[0], (np.abs(weight).max(0) / np.float32(127)).astype(ml_dtypes.bfloat16).astype(np.float32))
        assert (np.abs(values * scales - weight) <= 0.5001 * scales).all()
        assert is_matrix(name)
