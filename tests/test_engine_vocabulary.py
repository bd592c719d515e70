"""Heads that are padded for TensorRT: the same logits, a table stored once, no head unpacked for an odd vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import GPT2_LIKE, LLAMA_LIKE, hot_decoder

from tformer_deploy import api
from tformer_deploy.backends.graph import WEIGHTS_FOLDER, import_runtime
from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.bundle.signature import cache_names
from tformer_deploy.exporters.tensorrt.costs import may_be_padded
from tformer_deploy.exporters.tensorrt.graph import fixed_graph

ODD = replace(LLAMA_LIKE, n_layers=1, vocab_size=131)
CONFIGS = {
    "tied": ODD,
    "tied with bias": replace(ODD, head_bias=True),
    "soft cap of logits": replace(ODD, logit_softcap=30.0),
    "gpt2": replace(GPT2_LIKE, n_layers=1, vocab_size=131),
    "even, no multiple of 8": replace(ODD, vocab_size=130),
    "multiple of 8": replace(ODD, vocab_size=136),
    "untied": replace(ODD, tied=False),
}
CHANGED = {
    "fp32": {"tied", "tied with bias", "soft cap of logits", "gpt2", "even, no multiple of 8"},
    "int4": {"tied", "tied with bias", "soft cap of logits", "gpt2", "untied"},
}
CAPACITY = 16


def exported(config, folder: Path, kind: str) -> Bundle:
    hot_decoder(config).save_pretrained(folder / "checkpoint")
    options = {} if kind == "fp32" else {"quantize": kind}
    return open_bundle(api.export(folder / "checkpoint", folder / "bundle", check=False, **options))


def logits(graph: bytes, bundle: Bundle) -> np.ndarray:
    runtime, config = import_runtime(), bundle.manifest.config
    options = runtime.SessionOptions()
    options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle.path))
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = runtime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    caches = {
        name: np.zeros((2, config.n_kv_heads, CAPACITY, config.head_dim), np.float32)
        for name in cache_names(config.n_layers, "past_key_values")
    }
    ids = np.arange(10, dtype=np.int64).reshape(2, 5) * 7
    return session.run(["logits"], {"input_ids": ids, "logit_positions": np.array([[1, 4], [2, 3]]), **caches})[0]


@pytest.mark.parametrize("kind", CHANGED)
@pytest.mark.parametrize("name", CONFIGS)
def test_graph_when_the_head_is_padded_then_gives_the_same_logits_and_no_more(name: str, kind: str, tmp_path: Path):
    bundle = exported(CONFIGS[name], tmp_path, kind)
    graph = fixed_graph(bundle.prefill_path, CAPACITY)
    nodes = [node.name for node in onnx.load_from_string(graph).graph.node]
    assert ("head/cut" in nodes) == (name in CHANGED[kind])
    found, wanted = logits(graph, bundle), logits(bundle.prefill_path.read_bytes(), bundle)
    assert found.shape == wanted.shape == (2, 2, CONFIGS[name].vocab_size)
    assert np.allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", CHANGED)
def test_graph_when_attention_is_expanded_too_then_shapes_still_agree(kind: str, tmp_path: Path):
    bundle = exported(replace(ODD, attention_softcap=5.0), tmp_path, kind)
    graph = onnx.load_from_string(fixed_graph(bundle.prefill_path, CAPACITY, expand_attention=True))
    onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True)
    found, wanted = logits(graph.SerializeToString(), bundle), logits(bundle.prefill_path.read_bytes(), bundle)
    assert np.allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def test_table_when_too_large_for_a_graph_then_is_left_as_it_is():
    assert may_be_padded(50257, 768)
    assert not may_be_padded(250001, 8192)


@pytest.mark.parametrize("quantize", [None, "int4", "int8-dynamic"])
def test_engine_when_the_vocabulary_is_odd_then_holds_the_table_once_and_unpacks_no_head(quantize, tmp_path):
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    sizes = []
    for vocabulary in (20001, 20008):
        folder = tmp_path / str(vocabulary)
        bundle = exported(replace(ODD, vocab_size=vocabulary, d_model=128), folder, quantize or "fp32")
        built = api.build_engine(bundle.path, dtype="fp16", capacity=64, max_batch=2, prompt_buckets=(16,), targets=("8.9",))
        assert built.record.unpacked == {}
        sizes.append(built.record.size)
    table = 20001 * 128 * 2
    assert abs(sizes[0] - sizes[1]) < 0.05 * table
