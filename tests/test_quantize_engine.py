"""Engines from quantised bundles: whole numbers and scales stay, everything else goes to fp16 or bf16, and it is checked."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from conftest import LLAMA_LIKE, hot_decoder

import tformer_deploy
from tformer_deploy import api
from tformer_deploy.backends.onnxruntime import OnnxRuntimeBackend
from tformer_deploy.backends.session import Session
from tformer_deploy.backends.torch import bundle_backend
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.engines import GRAPH
from tformer_deploy.bundle.quantization import EMBEDDING, is_matrix
from tformer_deploy.bundle.seal import seal
from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

from tformer_deploy.exporters.tensorrt import worker
from tformer_deploy.exporters.tensorrt.derive import BundleSource, derive_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """Blocks of 32 and 64; the width of down is padded."""
    folder = tmp_path_factory.mktemp("quantised")
    hot_decoder(replace(LLAMA_LIKE, n_layers=2, d_ff=100)).save_pretrained(folder / "checkpoint")
    return api.export(folder / "checkpoint", folder / "bundle", quantize="int4", block=64, head="int8", check=False)


STORED = {"fp16": (np.float16, onnx.TensorProto.FLOAT16), "bf16": (ml_dtypes.bfloat16, onnx.TensorProto.BFLOAT16)}


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("layout", ["shared", "split"])
def test_engine_when_the_bundle_is_quantised_then_attention_is_fused_and_the_weights_are_the_same(
    bundle, tmp_path, dtype, layout
):
    path = shutil.copytree(bundle, tmp_path / "b")
    built = tformer_deploy.build_engine(
        path, layout=layout, dtype=dtype, capacity=64, prompt_buckets=(16,), max_batch=2, targets=("8.9",)
    )
    one, several = {"_gemv_mha_v1": 2}, {"_gemm_mha_v2": 2}
    found = {profile.name: profile.plan_kernels for profile in built.record.profiles}
    assert found == {"decode": one, "prefill-16": several} | ({"extend-64": several} if layout == "split" else {})
    assert built.record.graph is not None
    derived, source = open_bundle(built.path / GRAPH), open_bundle(path)
    assert derived.manifest.dtype == dtype
    assert derived.manifest.quantization == source.manifest.quantization
    stored, onnx_dtype = STORED[dtype]
    for name, record in derived.manifest.tensors.items():
        have, wanted = derived.tensor(name), source.tensor(name)
        if is_matrix(name) or name == EMBEDDING:
            assert record.dtype == source.manifest.tensors[name].dtype
            assert np.array_equal(have, wanted)
        elif name.endswith(".scale"):
            assert have.dtype == stored
            assert have.astype(np.float32).tobytes() == wanted.tobytes()
        elif not name.startswith("rope"):
            assert np.array_equal(have, wanted.astype(stored))
    for phase in (derived.prefill_path, derived.decode_path):
        graph = onnx.load(phase, load_external_data=False).graph
        dtypes = {t.name: t.data_type for t in graph.initializer}
        scales = [dtypes[node.input[1]] for node in graph.node if node.op_type == "DequantizeLinear"]
        assert scales == [onnx_dtype] * (2 * 7 + 1)
        assert not [n for n in graph.node if n.op_type == "DequantizeLinear" and "output_dtype" in {a.name for a in n.attribute}]


@pytest.mark.parametrize("options", [{"quantize": "int8"}, {"quantize": "int4", "block": 32}])
def test_derived_graph_when_it_is_bf16_then_is_green_under_the_gates_of_bf16(bundle, tmp_path, options):
    path = api.export(bundle.parent / "checkpoint", tmp_path / "b", **options, check=False)
    derived, record = derive_bundle(open_bundle(path), "bf16", tmp_path / "d", lambda _: None)
    assert derived.manifest.dtype == "bf16"
    assert record.checks > 20
    value, gate = record.figures["prefill, ragged batch: max abs"]
    assert 0 < value <= gate
    assert any("cast to fp32" in note for note in record.notes)


def test_session_when_a_quantised_bundle_is_bf16_then_runs_its_weights_as_the_graph_rounds_them(bundle, tmp_path):
    """A dequantised matrix and a row of the fp16 embedding are bf16 numbers there: 8 bits, not 11 or more."""
    derived, _ = derive_bundle(open_bundle(bundle), "bf16", tmp_path / "d", lambda _: None)
    decoder = bundle_backend(derived).decoder
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
    rows = [[5, 9, 3, 77, 1], [4, 130, 8, 2, 6]]
    with torch.inference_mode():
        wanted = decoder.float()(torch.tensor(rows))[:, -1].numpy()
    for dequantised in (True, False):
        found = Session(OnnxRuntimeBackend(derived, dequantised=dequantised)).prefill(rows)
        assert np.abs(found - wanted).max() < 1e-4


def with_scale(bundle: Path, path: Path, name: str, change: Callable[[np.float32], np.float32]) -> Path:
    """A copy of the bundle, sealed, whose first scale of ``name`` is another."""
    shutil.copytree(bundle, path)
    opened = open_bundle(path)
    with (path / "weights.bin").open("r+b") as file:
        file.seek(opened.manifest.tensors[name].offset)
        file.write(change(opened.tensor(name)[0, 0]).tobytes())
    seal(path)
    return path


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_derived_graph_when_a_scale_is_no_bf16_number_then_is_refused_by_name(bundle, tmp_path, dtype):
    path = with_scale(bundle, tmp_path / "b", "blocks.1.attention.out.scale", lambda scale: np.nextafter(scale, np.float32(1)))
    with pytest.raises(InputError, match=r"blocks\.1\.attention\.out\.scale holds the scale .* more bits than bf16") as caught:
        derive_bundle(open_bundle(path), dtype, tmp_path / "d", lambda _: None)
    assert "Export the checkpoint again" in str(caught.value.hint)
    assert not (tmp_path / "d").exists()


def test_derived_graph_when_a_scale_is_too_small_for_fp16_then_is_refused_there_and_kept_in_bf16(bundle, tmp_path):
    name = "blocks.0.feed_forward.up.scale"
    small = np.float32(1.0078125 * 2.0**-18)  # fp16 holds eight bits from 2^-17 on
    path = open_bundle(with_scale(bundle, tmp_path / "b", name, lambda _: small))
    with pytest.raises(
        InputError, match=r"feed_forward\.up\.scale holds the scale 3\.84e-06, which fp16 does not hold"
    ) as caught:
        derive_bundle(path, "fp16", tmp_path / "d", lambda _: None)
    assert "--dtype bf16" in str(caught.value.hint)
    kept = {s.name: s.tensor for s in BundleSource(path).stored("bf16")}[name]
    assert float(kept.view(-1)[0]) == small


@pytest.mark.parametrize(("dtype", "factor"), [("fp16", 1.05), ("bf16", 1.25)])
def test_derived_graph_when_it_computes_something_else_then_is_refused(bundle, tmp_path, monkeypatch, dtype, factor):
    """The comparison with the bundle itself, its weights dequantised, sees scales that are off."""
    real = BundleSource.stored

    def off(self, dtype):
        for stored in real(self, dtype):
            yield stored._replace(tensor=stored.tensor * factor) if stored.name == "blocks.1.attention.out.scale" else stored

    monkeypatch.setattr(BundleSource, "stored", off)
    with pytest.raises(InputError, match="differs too much"):
        derive_bundle(open_bundle(bundle), dtype, tmp_path / "d", lambda _: None)


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


def test_engine_when_quantised_for_one_row_then_its_matrices_are_multiplied_as_stored(tmp_path):
    """With profiles of one row and no more, query, key and value would be merged, and unpacked for it."""
    hot_decoder(replace(LLAMA_LIKE, n_layers=2)).save_pretrained(tmp_path / "checkpoint")
    path = api.export(tmp_path / "checkpoint", tmp_path / "b", quantize="int4", check=False)
    record = tformer_deploy.build_engine(path, dtype="bf16", capacity=64, max_batch=1, targets=("8.9",)).record
    assert record.max_batch == 1
    assert [p.batch for p in record.profiles] == [(1, 1, 2), (1, 1, 2)]
    assert record.unpacked == {}


def test_error_when_the_compiler_fails_a_check_of_its_own_then_the_hint_says_what_to_change():
    """Seen with int8 in one block and profiles of one row."""
    error = "Error Code 1: Myelin ([myelin_graph.h:1295: …] MyelinCheckException: operand.h:534: CHECK(is_value()) failed."
    assert "--max-batch" in worker._cure(error)
