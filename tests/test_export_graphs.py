"""The exported graphs on ONNX Runtime against PyTorch's full causal pass, for every kind of block, on hot weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import GPT2_LIKE, LLAMA_LIKE, hot_decoder

import tformer_deploy
from tformer_deploy.bundle import open_bundle
from tformer_deploy.config import ModelConfig, RopeConfig
from tformer_deploy.reference import Decoder

LLAMA3 = RopeConfig(theta=500.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_length=32)
CONFIGS: dict[str, ModelConfig] = {
    "untied, llama3 rope, qkv bias, wide heads": replace(
        LLAMA_LIKE, n_layers=2, tied=False, rope=LLAMA3, qkv_bias=True, head_dim=24, n_kv_heads=1
    ),
    "layernorm, rotary, gelu, untied, one layer": replace(
        LLAMA_LIKE,
        n_layers=1,
        norm="layernorm",
        activation="gelu",
        gated=False,
        tied=False,
        mlp_bias=True,
        out_bias=True,
        n_kv_heads=4,
    ),
    "rmsnorm, learned positions, gated gelu_tanh": replace(
        GPT2_LIKE, n_layers=2, norm="rmsnorm", activation="gelu_tanh", gated=True, n_kv_heads=2, qkv_bias=False
    ),
}
ROWS = [[7], [3, 90, 41, 5, 17], [8, 8, 130, 2, 61, 44, 12, 9, 100]]
NEXT = [[11, 64, 3, 77, 20], [1, 99, 128, 6, 35], [54, 0, 23, 23, 88]]
NUMPY = {"fp32": np.float32, "fp16": np.float16}


class Graphs:
    """Both graphs with caches as plain arrays; ``shift`` moves every write and position: a fault to be found."""

    def __init__(self, path: Path, shift: int = 0) -> None:
        self.manifest = open_bundle(path).manifest
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.prefill_, self.decode_ = (onnxruntime.InferenceSession(path / f"{p}.onnx", options) for p in ("prefill", "decode"))
        self.caches: list[np.ndarray] = []
        self.shift = shift

    def allocate(self, batch: int, capacity: int) -> None:
        config = self.manifest.config
        shape = (batch, config.n_kv_heads, capacity, config.head_dim)
        self.caches = [np.zeros(shape, NUMPY[self.manifest.dtype]) for _ in range(2 * config.n_layers)]

    def resize(self, capacity: int) -> None:
        old, n = self.caches, min(capacity, self.caches[0].shape[2])
        self.allocate(old[0].shape[0], capacity)
        for new, cache in zip(self.caches, old, strict=True):
            new[:, :, :n] = cache[:, :, :n]

    def run(self, session, **feed) -> np.ndarray:
        names = [i.name for i in session.get_inputs() if i.name.startswith("past_key_values")]
        logits, *self.caches = session.run(None, feed | dict(zip(names, self.caches, strict=True)))
        assert logits.dtype == np.float32
        return logits

    def prefill(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self.run(self.prefill_, input_ids=ids, logit_positions=positions)

    def decode(self, ids: np.ndarray, lengths: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self.run(self.decode_, input_ids=ids, past_lengths=lengths + self.shift, logit_positions=positions)


def truth(decoder: Decoder, row: list[int]) -> np.ndarray:
    with torch.no_grad():
        return decoder(torch.tensor([row]))[0].numpy()


def worst_difference(graphs: Graphs, decoder: Decoder) -> float:
    """The largest |difference| over every logit of a ragged batch, relative to the largest logit of its position."""
    expected = [truth(decoder, row + more) for row, more in zip(ROWS, NEXT, strict=True)]
    lengths = np.array([len(r) for r in ROWS])
    ids = np.array([r + [0] * (max(lengths) - len(r)) for r in ROWS])
    differences = []

    def compare(logits: np.ndarray, positions: np.ndarray) -> None:
        for row, at in np.ndindex(positions.shape):
            want = expected[row][positions[row, at]]
            differences.append(np.abs(logits[row, at] - want).max() / np.abs(want).max())

    graphs.allocate(len(ROWS), 11 + graphs.shift)  # just full after two steps
    last = lengths[:, None] - 1
    compare(graphs.prefill(ids, last), last)
    for step in range(2):
        logits = graphs.decode(np.array([[n[step]] for n in NEXT]), lengths, np.zeros((3, 1), np.int64))
        compare(logits, lengths[:, None])
        lengths = lengths + 1
        graphs.resize((11 if step == 0 else 19) + graphs.shift)
    # Three new tokens a row at once, logits of all of them.
    logits = graphs.decode(np.array([n[2:] for n in NEXT]), lengths, np.tile(np.arange(3), (3, 1)))
    compare(logits, lengths[:, None] + np.arange(3))
    return float(max(differences))


def export(path: Path, decoder: Decoder, dtype: str = "fp32") -> Path:
    return tformer_deploy.export(decoder, path, dtype=dtype, check=False)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_graphs_when_the_blocks_vary_then_equal_pytorch(config, tmp_path):
    decoder = hot_decoder(config)
    assert worst_difference(Graphs(export(tmp_path / "b", decoder)), decoder) < 2e-5


@pytest.mark.parametrize(("fixture", "config"), [("llama_bundle", LLAMA_LIKE), ("gpt2_bundle", GPT2_LIKE)])
def test_graphs_when_like_llama_or_gpt2_then_equal_pytorch_and_a_shift_shows(fixture, config, request):
    path, decoder = request.getfixturevalue(fixture), hot_decoder(config)
    assert worst_difference(Graphs(path), decoder) < 2e-5
    assert worst_difference(Graphs(path, shift=1), decoder) > 1e-2


def test_graphs_when_fp16_then_are_near_pytorch_in_fp32_and_a_shift_shows(tmp_path):
    decoder = hot_decoder(LLAMA_LIKE)
    path = export(tmp_path / "b", decoder, "fp16")
    assert worst_difference(Graphs(path), decoder) < 2e-2
    assert worst_difference(Graphs(path, shift=1), decoder) > 5e-2


def test_graphs_when_a_row_stands_alone_then_it_has_the_same_bits(llama_bundle):
    graphs = Graphs(llama_bundle)
    graphs.allocate(2, 16)
    ids = np.array([[3, 90, 41, 5], [7, 1, 0, 0]])
    together = graphs.prefill(ids, np.array([[3], [1]]))
    stepped = graphs.decode(np.array([[9], [4]]), np.array([4, 2]), np.zeros((2, 1), np.int64))
    for row, n in ((0, 4), (1, 2)):
        graphs.allocate(1, 16)
        assert np.array_equal(graphs.prefill(ids[row : row + 1, :n], np.array([[n - 1]]))[0], together[row])
        alone = graphs.decode(np.array([[9], [4]])[row : row + 1], np.array([n]), np.zeros((1, 1), np.int64))
        assert np.array_equal(alone[0], stepped[row])


def test_graphs_when_past_and_present_share_a_buffer_then_no_cache_is_copied(llama_bundle, capfd):
    session = onnxruntime.InferenceSession(llama_bundle / "decode.onnx")

    def step(shared: bool) -> str:
        binding = session.io_binding()
        feed = {"input_ids": [[3], [4]], "past_lengths": [2, 5], "logit_positions": [[0], [0]]}
        for name, value in feed.items():
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(np.array(value)))
        for past in (i for i in session.get_inputs() if i.name.startswith("past_key_values")):
            cache, other = (
                onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((2, past.shape[1], 16, past.shape[3]), np.float32))
                for _ in range(2)
            )
            binding.bind_ortvalue_input(past.name, cache)
            binding.bind_ortvalue_output(past.name.replace("past_key_values", "present"), cache if shared else other)
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        return capfd.readouterr().err

    assert "in-place optimization not activated" in step(shared=False)
    assert "in-place" not in step(shared=True)


@pytest.mark.parametrize(
    ("fixture", "config", "norm"), [("llama_bundle", LLAMA_LIKE, "RMS"), ("gpt2_bundle", GPT2_LIKE, "Layer")]
)
def test_graphs_when_looked_at_then_hold_single_standard_operators_and_no_trace_of_their_making(fixture, config, norm, request):
    path = request.getfixturevalue(fixture)
    for phase in ("prefill", "decode"):
        model = onnx.load(path / f"{phase}.onnx", load_external_data=False)
        onnx.checker.check_model(str(path / f"{phase}.onnx"), full_check=True)
        kinds = [n.op_type for n in model.graph.node]
        assert kinds.count(f"{norm}Normalization" if norm == "Layer" else "RMSNormalization") == 2 * config.n_layers + 1
        assert kinds.count("Attention") == config.n_layers
        assert kinds.count("TensorScatter") == 2 * config.n_layers
        assert kinds.count("RotaryEmbedding") == (2 * config.n_layers if config.rope else 0)
        assert not {"ReduceMean", "Pow", "Softmax", "Where"} & set(kinds)
        assert [(p.key) for p in model.metadata_props] == ["tformer_deploy.build", "tformer_deploy.phase"]
        assert not any(n.doc_string or n.metadata_props for n in model.graph.node)
        assert not any(
            v.metadata_props or v.doc_string for v in [*model.graph.value_info, *model.graph.input, *model.graph.output]
        )
        data = (path / f"{phase}.onnx").read_bytes()
        assert b".py" not in data
        assert b"site-packages" not in data
        assert str(Path.cwd()).encode() not in data
