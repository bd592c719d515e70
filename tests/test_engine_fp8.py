"""FP8 engines: what is rounded and under which scales, that the outcome is compared, and that products stay in FP8."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import GPT2_LIKE, LLAMA_LIKE, hot_decoder
from onnx import numpy_helper

from tformer_deploy import api, cli
from tformer_deploy.backends.graph import import_runtime
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.engine_record import GRAPH
from tformer_deploy.bundle.quantization import HEAD, is_matrix
from tformer_deploy.bundle.signature import cache_names
from tformer_deploy.errors import CapabilityError, InputError
from tformer_deploy.exporters.tensorrt.preflight import fp8_file

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

from tformer_deploy.exporters.tensorrt import fp8

CONFIGS = {"llama": replace(LLAMA_LIKE, n_layers=2), "gpt2": replace(GPT2_LIKE, n_layers=2)}
OPTIONS = {"capacity": 64, "prompt_buckets": (16,), "max_batch": 2, "targets": ("8.9",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    for name, config in CONFIGS.items():
        hot_decoder(config).save_pretrained(folder / name)
        api.export(folder / name, folder / f"{name}.bundle", check=False)
    random = np.random.default_rng(3)
    rows = [{"input_ids": random.integers(0, 131, 40).tolist()} for _ in range(8)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def built(folder, request):
    path = shutil.copytree(folder / f"{request.param}.bundle", folder / f"{request.param}.built")
    notes: list[str] = []
    layout = "split" if request.param == "llama" else "shared"
    return api.build_engine(path, dtype="fp16", layout=layout, fp8=folder / "rows.jsonl", on_note=notes.append, **OPTIONS)


def rows_of(folder: Path) -> list[tuple[int, ...]]:
    return [tuple(json.loads(line)["input_ids"]) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_engine_when_fp8_then_every_product_of_a_block_is_read_as_stored_and_attention_is_fused(built):
    record = built.record
    assert record.matrices == "fp8"
    assert record.name.endswith(("-fp16-fp8-c64", "-fp16-fp8-c64-split"))
    assert record.unpacked == {}
    assert record.unfused == {}
    assert "fp8 matrices multiplied as stored" in record.summary
    assert all(sum(p.plan_kernels.values()) == 2 for p in record.profiles)


def test_graph_when_fp8_then_matrices_and_rows_are_rounded_and_weights_and_head_are_not_touched(built):
    derived = open_bundle(built.path / GRAPH, verify="full")
    weights = {name for name in derived.manifest.tensors if is_matrix(name) and name != HEAD}
    for phase in ("prefill", "decode"):
        proto = onnx.load(derived.path / fp8_file(phase), load_external_data=False)
        onnx.checker.check_model(str(derived.path / fp8_file(phase)))
        makers = {name: node for node in proto.graph.node for name in node.output}
        values = {t.name: t for t in proto.graph.initializer}
        assert {values[name].data_type for name in weights} == {onnx.TensorProto.FLOAT16}
        kinds = Counter(node.op_type for node in proto.graph.node)
        assert kinds["QuantizeLinear"] == kinds["DequantizeLinear"]
        rounded = [n for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] in weights]
        assert {n.input[0] for n in rounded} == weights
        for node in proto.graph.node:
            if node.op_type == "MatMul" and makers.get(node.input[1], node).op_type == "DequantizeLinear":
                assert makers[node.input[0]].op_type == "DequantizeLinear"
        for node in rounded:
            steps = numpy_helper.to_array(values[node.input[1]]).astype(np.float32)
            largest = np.abs(derived.tensor(node.input[0]).astype(np.float32)).max(0)
            assert np.allclose(steps * fp8.LARGEST, largest, rtol=1e-2)
        # query, key and value read one rounded row
        assert len([n for n in proto.graph.node if n.op_type == "QuantizeLinear"]) - len(rounded) == 2 * 4


def test_record_when_fp8_then_says_what_was_compared_and_that_no_gpu_did(built):
    graph = built.record.graph
    assert graph is not None
    value, line = graph.figures["fp8 against the bundle, prompts: mean KL"]
    assert 0 < value <= line
    (note,) = [n for n in graph.notes if n.startswith("FP8")]
    assert "fit 240 tokens" in note
    assert "80 positions" in note
    assert "no GPU did" in note


def test_decode_graph_when_fp8_then_continues_what_the_prefill_graph_began(built, folder):
    """The last of n tokens by a step, and with the others at once: the same but for rounding."""
    derived, row = open_bundle(built.path / GRAPH), rows_of(folder)[0][:12]
    config, runtime = derived.manifest.config, import_runtime()
    options = runtime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    sessions = {
        p: runtime.InferenceSession(str(derived.path / fp8_file(p)), options, providers=["CPUExecutionProvider"])
        for p in ("prefill", "decode")
    }
    shape = (1, config.n_kv_heads, 64, config.head_dim)
    names = cache_names(config.n_layers, "past_key_values")

    def prefill(ids, last):
        caches = {n: np.zeros(shape, np.float16) for n in names}
        inputs = {"input_ids": np.array([ids]), "logit_positions": np.array([[last]]), **caches}
        return sessions["prefill"].run(None, inputs)

    whole = prefill(row, 11)[0][0, 0]
    _, *caches = prefill(row[:-1], 10)
    inputs = {"input_ids": np.array([row[-1:]]), "past_lengths": np.array([11]), "logit_positions": np.array([[0]])}
    step = sessions["decode"].run(None, inputs | dict(zip(names, caches, strict=True)))[0][0, 0]
    other = prefill((*row[:-1], row[-1] ^ 1), 11)[0][0, 0]
    assert np.abs(step - whole).max() < 0.2 * np.abs(other - whole).max()


def test_rows_when_measured_then_scales_hold_the_largest_value_of_each_input(folder):
    bundle, rows = open_bundle(folder / "llama.bundle"), rows_of(folder)
    some, all_rows = fp8.measure_rows(bundle, rows[:1]), fp8.measure_rows(bundle, rows)
    assert set(some) == {n for n in bundle.manifest.tensors if is_matrix(n) and n != HEAD}
    assert all(0 < some[name] <= all_rows[name] for name in some)
    assert some["blocks.0.attention.query.weight"] == some["blocks.0.attention.value.weight"]
    assert any(some[name] < all_rows[name] for name in some)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_rows_when_split_then_none_is_both_measured_and_compared_but_a_single_one(count: int):
    rows = [(i, i) for i in range(count)]
    prompts = fp8.split_rows(rows)
    assert prompts.measured
    assert prompts.compared
    if count > 1:
        assert sorted((*prompts.measured, *prompts.compared)) == rows


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_engine_when_a_scale_is_wrong_then_nothing_is_built(folder, tmp_path, monkeypatch, dtype):
    """The graphs get a scale 30 times too small for one input; the comparison sees values that are cut off."""
    real = fp8.write_fp8_graphs
    name = "blocks.1.feed_forward.down.weight"
    monkeypatch.setattr(fp8, "write_fp8_graphs", lambda bundle, largest: real(bundle, largest | {name: largest[name] / 30}))
    path = shutil.copytree(folder / "llama.bundle", tmp_path / "b")
    with pytest.raises(InputError, match="further from the bundle than rounding explains"):
        api.build_engine(path, dtype=dtype, fp8=folder / "rows.jsonl", **OPTIONS)
    assert list((path / "engines").iterdir()) == []


def test_engine_when_a_gpu_does_not_multiply_in_fp8_then_is_refused_at_once(folder):
    with pytest.raises(CapabilityError, match=r"8\.0, 8\.6 do not multiply in FP8"):
        api.build_engine(folder / "llama.bundle", dtype="fp16", fp8=folder / "rows.jsonl", **(OPTIONS | {"targets": ()}))
    assert cli.run(["build-engine", str(folder / "llama.bundle"), "--dtype", "fp16", "--fp8", str(folder / "rows.jsonl")]) == 4
    assert not (folder / "llama.bundle/engines").exists()


def test_engine_when_a_gpu_has_no_bf16_then_is_refused_at_once(folder):
    with pytest.raises(CapabilityError, match=r"7\.5 do not multiply in bf16"):
        api.build_engine(folder / "llama.bundle", dtype="bf16", **(OPTIONS | {"targets": ("7.5", "8.9")}))


def test_engine_when_the_bundle_or_the_engine_has_no_fp8_form_then_is_refused(folder, tmp_path, capsys):
    rows = ["--fp8", str(folder / "rows.jsonl"), "--target", "8.9"]
    assert cli.run(["build-engine", str(folder / "llama.bundle"), "--layout", "decode", *rows]) == 3
    assert "this bundle is fp32, the engine fp32" in capsys.readouterr().err
    api.export(folder / "llama", tmp_path / "int8", quantize="int8", check=False)
    assert cli.run(["build-engine", str(tmp_path / "int8"), "--dtype", "fp16", *rows]) == 3
    assert "this bundle is int8, the engine fp16" in capsys.readouterr().err
