"""Engines from quantised bundles: whole numbers stay whole numbers, everything else goes to fp16, and it is checked."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import LLAMA_LIKE, hot_decoder

import tformer_deploy
from tformer_deploy import api
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.engines import GRAPH
from tformer_deploy.bundle.quantization import is_matrix
from tformer_deploy.errors import InputError

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

from tformer_deploy.exporters.tensorrt.derive import BundleSource, derive_bundle


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
