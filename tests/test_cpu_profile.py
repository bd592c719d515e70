"""Graphs derived for a CPU: the same numbers as the portable ones, made once, never trusted blindly."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import GPT2_LIKE, LLAMA_LIKE, hot_decoder

import tformer_deploy
from tformer_deploy.backends import open_backend, open_session
from tformer_deploy.backends.cpu import backend as cpu_backend
from tformer_deploy.backends.cpu import derived as cpu_derived
from tformer_deploy.backends.cpu.backend import CpuBackend
from tformer_deploy.backends.cpu.derived import derive, derived_folder, find_derived, remove_derived
from tformer_deploy.backends.cpu.plan import plan_for
from tformer_deploy.backends.onnxruntime import OnnxRuntimeBackend
from tformer_deploy.bundle import open_bundle
from tformer_deploy.cli import run
from tformer_deploy.config import ModelConfig, RopeConfig
from tformer_deploy.errors import UsageError
from tformer_deploy.parity import check_bundle

MODELS: dict[str, ModelConfig] = {
    "grouped": replace(LLAMA_LIKE, n_heads=8, n_kv_heads=1),
    "small groups": LLAMA_LIKE,
    "each head its own": GPT2_LIKE,
    "one for all, wide": replace(LLAMA_LIKE, n_kv_heads=1, head_dim=64),
    "narrow": replace(LLAMA_LIKE, head_dim=8),
    "windows": replace(LLAMA_LIKE, window=8, window_layers=(0, 2)),
    "windows with soft caps": replace(LLAMA_LIKE, window=8, window_layers=(1,), attention_softcap=5.0, logit_softcap=3.0),
    "two rotary bases": replace(
        LLAMA_LIKE, post_norm=True, qk_norm="head", window=8, window_layers=(0, 1), window_rope=RopeConfig(1000.0), attention_scale=0.1
    ),
    "parallel": replace(LLAMA_LIKE, norm="layernorm", residual="parallel", rope=RopeConfig(dim=4), gated=False, head_bias=True),
}  # fmt: skip


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Name → bundle, checkpoint; exported when first asked for."""
    folder = tmp_path_factory.mktemp("cpu")

    class Made(dict[str, tuple[Path, Path]]):
        def __missing__(self, name: str) -> tuple[Path, Path]:
            checkpoint = folder / f"{name}.ckpt"
            hot_decoder(MODELS[name]).save_pretrained(checkpoint)
            self[name] = tformer_deploy.export(checkpoint, folder / f"{name}.bundle", check=False), checkpoint
            return self[name]

    return Made()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("piece", [512, 6])
def test_logits_when_derived_graphs_run_then_equal_the_portable_ones(bundles, name, piece, monkeypatch):
    monkeypatch.setattr(cpu_backend, "CHUNK", piece)  # at 6, prompts and new tokens go in several pieces
    bundle = open_bundle(bundles[name][0])
    derived, portable = open_backend(bundle), open_backend(bundle, profile="portable")
    assert isinstance(derived, CpuBackend)
    assert isinstance(portable, OnnxRuntimeBackend)
    rng, lengths = np.random.default_rng(0), np.array([20, 7, 13])
    caches = [backend.allocate(3, 64) for backend in (derived, portable)]

    def both(method: str, *inputs: np.ndarray) -> None:
        found, wanted = (
            getattr(backend, method)(*inputs, cache) for backend, cache in zip((derived, portable), caches, strict=True)
        )
        assert np.abs(found - wanted).max() < 1e-4

    both("prefill", rng.integers(0, 131, (3, 20)), np.stack([lengths - 1, lengths // 2], 1))
    for step in range(3):
        both("decode", rng.integers(0, 131, (3, 1)), lengths + step, np.zeros((3, 1), np.int64))
    both("decode", rng.integers(0, 131, (3, 7)), lengths + 3, np.tile(np.arange(7), (3, 1)))
    for a, b in zip(*(cache.arrays for cache in caches), strict=True):
        assert all(np.abs(a[row, :, : n + 10] - b[row, :, : n + 10]).max() < 1e-4 for row, n in enumerate(lengths))


@pytest.mark.parametrize("name", ["grouped", "each head its own", "two rotary bases"])
def test_check_when_the_derived_graphs_are_judged_then_the_full_suite_is_green(bundles, name):
    report = check_bundle(*bundles[name], suite="full", profile="cpu")
    assert report.verdict == "green"


def test_check_when_a_derived_graph_is_wrong_then_is_red(bundles, monkeypatch):
    bundle, checkpoint = bundles["windows"]
    remove_derived(open_bundle(bundle))
    real = cpu_derived.use_group_query_attention
    monkeypatch.setattr(cpu_derived, "use_group_query_attention", lambda p, config: real(p, replace(config, window=9)))
    try:
        assert check_bundle(bundle, checkpoint, profile="cpu").verdict == "red"
    finally:
        remove_derived(open_bundle(bundle))


@pytest.mark.parametrize(
    "name", ["grouped", "small groups", "each head its own", "narrow", "one for all, wide", "parallel", "two rotary bases"]
)
def test_logits_when_neighbours_are_longer_then_a_row_has_the_same_bits(bundles, name, monkeypatch):
    session, rng = open_session(open_bundle(bundles[name][0])), np.random.default_rng(5)
    lengths = (1, 2, 31, 32, 33, 34, 64, 65, 97, 129, 130)
    rows = [rng.integers(0, 131, n).tolist() for n in lengths]
    alone = []
    for row in rows:
        alone.append([session.prefill([row])[0], session.decode([7])[0]])
    session.prefill_tokens = 1 << 20
    monkeypatch.setattr(session, "_calls", lambda rows, _: [(0, len(rows))])  # all together, however much padding that is
    together = [session.prefill(rows), session.decode([7] * len(rows))]
    for i, length in enumerate(lengths):
        for step, (a, b) in enumerate(zip(alone[i], together, strict=True)):
            assert np.array_equal(a, b[i]), (length, step)


def kinds(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def test_graphs_when_derived_then_are_rewritten_and_map_one_file_of_weights(bundles):
    bundle = open_bundle(bundles["grouped"][0])
    remove_derived(bundle)
    derived = derive(bundle, plan_for(bundle.manifest.config, "fp32"))
    step, decode = kinds(derived.graph("step")), kinds(derived.graph("decode"))
    assert step.count("GroupQueryAttention") == 3
    assert not {"Attention", "TensorScatter", "LessOrEqual"} & set(step)
    assert decode.count("Attention") == 3
    # Nothing splits heads apart where rows go in, nor turns what is one token.
    assert not {"Transpose", "RotaryEmbedding", "Cos"} & set(step)
    others = 3  # outside of the blocks
    assert step.count("Reshape") <= others
    assert decode.count("Reshape") <= 3 * 5 + others
    assert "Transpose" not in decode
    assert step.count("SkipSimplifiedLayerNormalization") == decode.count("SkipSimplifiedLayerNormalization") == 5
    assert kinds(derived.graph("several")).count("Transpose") == 3 * 4
    assert sorted(p.name for p in derived.path.iterdir()) == [
        "decode.onnx", "derived.json", "several.onnx", "step.bin", "step.onnx",
    ]  # fmt: skip
    for name in ("step", "decode", "several"):
        model = onnx.load(derived.graph(name), load_external_data=False)
        entries = [{e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data]
        assert {e["location"] for e in entries} == {"step.bin"}
        assert any(key.startswith("prepacked_") for e in entries for key in e)


def test_bundle_when_opened_then_its_own_files_are_untouched(bundles, tmp_path: Path):
    path = shutil.copytree(bundles["grouped"][0], tmp_path / "copy")
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    open_session(open_bundle(path)).prefill([[1, 2, 3]])
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before


@pytest.mark.parametrize("fault", ["a bit", "cut short", "record", "missing"])
def test_derived_graphs_when_damaged_then_are_made_again(bundles, fault: str):
    bundle = open_bundle(bundles["grouped"][0])
    plan = plan_for(bundle.manifest.config, "fp32")
    wanted = open_session(bundle).prefill([[1, 2, 3]])
    folder = derived_folder(bundle)
    weights = folder / "step.bin"
    data = bytearray(weights.read_bytes())
    if fault == "a bit":
        data[1000] ^= 64
        weights.write_bytes(data)
    elif fault == "cut short":
        weights.write_bytes(data[:-1])
    elif fault == "record":
        (folder / "derived.json").write_text(json.dumps({"files": {"step.onnx": {}}}))
    else:
        (folder / "decode.onnx").unlink()
    assert find_derived(bundle, plan) is None
    assert np.array_equal(open_session(bundle).prefill([[1, 2, 3]]), wanted)
    assert find_derived(bundle, plan) is not None


def test_derived_folder_when_runtime_or_cpu_differ_then_is_another(bundles, monkeypatch):
    bundle = open_bundle(bundles["grouped"][0])
    here = derived_folder(bundle)
    monkeypatch.setattr(cpu_derived, "_cpu", lambda: "another processor")
    assert derived_folder(bundle) != here


def test_auto_when_derived_graphs_cannot_be_written_then_runs_the_portable_ones_and_says_so(bundles, monkeypatch, tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    bundle = open_bundle(bundles["grouped"][0])
    backend = open_backend(bundle)
    assert isinstance(backend, OnnxRuntimeBackend)
    assert "The portable graphs run as they are" in backend.notes[0]


def test_auto_when_there_is_no_room_then_runs_the_portable_ones(bundles, monkeypatch):
    bundle = open_bundle(bundles["grouped"][0])
    remove_derived(bundle)
    monkeypatch.setattr(cpu_derived, "free_space", lambda folder: 1000)
    assert "derived graphs need" in open_backend(bundle).notes[0]


@pytest.mark.parametrize(
    ("config", "dtype", "reason"),
    [
        (replace(LLAMA_LIKE, positions="alibi", rope=None), "fp32", "ALiBi"),
        (replace(LLAMA_LIKE, head_dim=10), "fp32", "head_dim 10"),
        (LLAMA_LIKE, "fp16", "Nothing is derived for fp16"),
        (LLAMA_LIKE, "bf16", "Nothing is derived for bf16"),
    ],
)
def test_plan_when_nothing_applies_then_says_why(config, dtype, reason):
    plan = plan_for(config, dtype)
    assert not plan.applies
    assert reason in plan.reasons[0]


def test_cpu_profile_when_asked_for_and_not_there_then_is_refused(tmp_path: Path):
    hot_decoder(replace(LLAMA_LIKE, head_dim=10)).save_pretrained(tmp_path / "model")
    bundle = open_bundle(tformer_deploy.export(tmp_path / "model", tmp_path / "bundle", check=False))
    assert isinstance(open_backend(bundle), OnnxRuntimeBackend)
    with pytest.raises(UsageError, match="no graphs for the profile cpu"):
        open_backend(bundle, profile="cpu")


def test_inspect_when_asked_then_names_the_profile_and_why(bundles, capsys):
    assert run(["inspect", str(bundles["grouped"][0]), "--json"]) == 0
    cpu = json.loads(capsys.readouterr().out)["cpu"]
    assert cpu["profile"] == "cpu"
    assert "folds 8 query heads" in cpu["reasons"][1]


def test_logits_when_kept_over_steps_then_do_not_change(bundles):
    session = open_session(open_bundle(bundles["grouped"][0]))
    kept = [session.prefill([[1, 2, 3], [4, 5]])]
    copies = [kept[0].copy()]
    for _ in range(3):
        kept.append(session.decode([7, 8]))
        copies.append(kept[-1].copy())
    assert all(np.array_equal(a, b) for a, b in zip(kept, copies, strict=True))


@pytest.mark.parametrize("name", ["grouped", "each head its own"])
def test_row_when_run_with_others_or_alone_then_has_the_same_bits(bundles, name):
    """Within the derived profile a row does not depend on its neighbours, their number or the capacity."""
    bundle = open_bundle(bundles[name][0])
    rows = [[5, 9, 2, 7], [1], [8] * 17]
    together = open_session(bundle)
    logits = [together.prefill(rows, capacity=64), together.decode([3, 3, 3]), together.decode([4, 4, 4])]
    for i, row in enumerate(rows):
        alone = open_session(bundle)
        single = [alone.prefill([row]), alone.decode([3]), alone.decode([4])]
        assert all(np.array_equal(a[i], b[0]) for a, b in zip(logits, single, strict=True))
