"""Engines from quantised bundles: whole numbers stay whole numbers, everything else goes to fp16, and it is checked."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import LLAMA_LIKE, hot_decoder

import tformer_deploy
from tformer_deploy import api
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.engines import GRAPH
from tformer_deploy.bundle.quantization import is_matrix
from tformer_deploy.errors import InputError

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

from tformer_deploy.exporters.tensorrt import worker
from tformer_deploy.exporters.tensorrt.derive import BundleSource, derive_bundle
from tformer_deploy.exporters.tensorrt.graph import fixed_graph


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """Blocks of 32 and 64; the width of down is padded."""
    folder = tmp_path_factory.mktemp("quantised")
    hot_decoder(replace(LLAMA_LIKE, n_layers=2, d_ff=100)).save_pretrained(folder / "checkpoint")
    return api.export(folder / "checkpoint", folder / "bundle", quantize="int4", block=64, head="int8", check=False)


def test_engine_when_the_bundle_is_quantised_then_attention_is_fused_and_the_weights_are_the_same(bundle, tmp_path):
    path = shutil.copytree(bundle, tmp_path / "b")
    built = tformer_deploy.build_engine(path, dtype="fp16", capacity=64, prompt_buckets=(16,), max_batch=2, targets=("8.9",))
    assert [p.plan_kernels for p in built.record.profiles] == [{"_gemv_mha_v1": 2}, {"_gemm_mha_v2": 2}]
    assert built.record.graph is not None
    derived = open_bundle(built.path / GRAPH)
    source = open_bundle(path)
    assert derived.manifest.dtype == "fp16"
    assert derived.manifest.quantization == source.manifest.quantization
    for name, record in derived.manifest.tensors.items():
        found, wanted = derived.tensor(name), source.tensor(name)
        if is_matrix(name):
            assert record.dtype == source.manifest.tensors[name].dtype
            assert np.array_equal(found, wanted)
        elif not name.startswith("rope"):
            assert np.array_equal(found, wanted.astype(np.float16))
    graph = onnx.load(derived.decode_path, load_external_data=False).graph
    kinds = [n.op_type for n in graph.node]
    assert kinds.count("DequantizeLinear") == 2 * 7 + 1
    scales = {t.name: t.data_type for t in graph.initializer if t.name.endswith(".scale")}
    assert set(scales.values()) == {onnx.TensorProto.FLOAT16}


def test_derived_graph_when_bf16_is_asked_for_then_is_refused(bundle, tmp_path):
    with pytest.raises(InputError, match="can be fp16, not bf16"):
        derive_bundle(open_bundle(bundle), "bf16", tmp_path / "d", lambda _: None)


def test_derived_graph_when_a_scale_is_lost_in_fp16_then_is_refused(bundle, monkeypatch):
    opened = open_bundle(bundle)
    source = BundleSource(opened)
    real = type(opened).tensor
    monkeypatch.setattr(
        type(opened), "tensor", lambda self, name: real(self, name) * np.float32(1e-9 if name.endswith("up.scale") else 1)
    )
    with pytest.raises(InputError, match=r"feed_forward\.up\.scale is too small for fp16"):
        list(source.stored("fp16"))


def test_derived_graph_when_it_computes_something_else_then_is_refused(bundle, tmp_path, monkeypatch):
    """The comparison with the bundle itself, its weights dequantised, sees a scale that is off by a twentieth."""
    real = BundleSource.stored

    def off(self, dtype):
        for stored in real(self, dtype):
            yield stored._replace(tensor=stored.tensor * 1.05) if stored.name == "blocks.1.attention.out.scale" else stored

    monkeypatch.setattr(BundleSource, "stored", off)
    with pytest.raises(InputError, match="differs too much"):
        derive_bundle(open_bundle(bundle), "fp16", tmp_path / "d", lambda _: None)


def test_engine_when_int4_in_blocks_then_is_multiplied_as_stored_and_int8_in_blocks_is_not(tmp_path):
    """No kernel of this TensorRT multiplies int8 in blocks, or int4 with one scale an output."""
    hot_decoder(replace(LLAMA_LIKE, n_layers=2)).save_pretrained(tmp_path / "checkpoint")
    path, notes = api.export(tmp_path / "checkpoint", tmp_path / "b", quantize="int4", head="int8", check=False), list[str]()
    built = tformer_deploy.build_engine(
        path, dtype="fp16", capacity=64, prompt_buckets=(16,), max_batch=2, targets=("8.9",), on_note=notes.append
    )
    assert built.record.matrices == "int4"
    assert [p.unpacked for p in built.record.profiles] == [("head",), ("head",)]
    assert any(note.startswith("WARNING: the int8 head in blocks of 32 will be UNPACKED") for note in notes)
    assert "UNPACKED to fp16 at each step: 1 in decode, 1 in prefill-16" in built.record.summary


@pytest.fixture(scope="module")
def one_block(tmp_path_factory) -> Path:
    """Every product of the model's width has one block: gate and up, query, key and value could be merged."""
    folder = tmp_path_factory.mktemp("one_block")
    hot_decoder(replace(LLAMA_LIKE, n_layers=1)).save_pretrained(folder / "checkpoint")
    return api.export(folder / "checkpoint", folder / "bundle", quantize="int8", block=64, check=False)


@pytest.mark.parametrize("layout", ["shared", "split"])
def test_engine_when_int8_is_one_block_and_there_is_one_row_then_is_built_and_fused(one_block, tmp_path, layout):
    path = shutil.copytree(one_block, tmp_path / "b")
    built = tformer_deploy.build_engine(path, dtype="fp16", capacity=64, max_batch=1, layout=layout, targets=("8.9",))
    assert {sum(p.plan_kernels.values()) for p in built.record.profiles} == {1}


def test_graph_when_a_matrix_is_one_block_of_int8_then_its_scales_are_by_column_and_it_computes_the_same(one_block, tmp_path):
    """Matrices of two blocks stay as they are, and the logits have the same bits."""
    opened = open_bundle(one_block)
    changed = onnx.load_from_string(fixed_graph(opened.prefill_path, 64))
    dims = {tensor.name: list(tensor.dims) for tensor in changed.graph.initializer}
    assert dims["blocks.0.feed_forward.up.scale"] == [LLAMA_LIKE.d_ff]
    assert dims["blocks.0.feed_forward.down.scale"] == [2, LLAMA_LIKE.d_model]
    folder = shutil.copytree(one_block, tmp_path / "b")
    (folder / "changed.onnx").write_bytes(changed.SerializeToString())
    found, wanted = first_logits(folder / "changed.onnx"), first_logits(opened.prefill_path)
    assert np.abs(wanted).max() > 1
    assert np.array_equal(found, wanted)


def first_logits(path: Path) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options)
    feed = {"input_ids": np.arange(18).reshape(2, 9), "logit_positions": np.tile(np.arange(9), (2, 1))}
    for value in session.get_inputs():
        if value.name not in feed:
            feed[value.name] = np.zeros([2, *(64 if d == "capacity" else d for d in value.shape[1:])], np.float32)
    return session.run(None, feed)[0]


def test_error_when_the_compiler_fails_a_check_of_its_own_then_the_hint_says_what_to_change():
    """Seen with int8 in one block before its scales went by column."""
    error = "Error Code 1: Myelin ([myelin_graph.h:1295: …] MyelinCheckException: operand.h:534: CHECK(is_value()) failed."
    assert "--max-batch" in worker._cure(error)
