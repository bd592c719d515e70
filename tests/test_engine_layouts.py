"""What each layout and precision builds: which plans, which profiles, how large, and what is recorded where it is not fused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import GPT2_LIKE, LLAMA_LIKE, hot_decoder

import tformer_deploy
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.engines import ENGINES, list_engines
from tformer_deploy.cli import run
from tformer_deploy.config import DType, ModelConfig, RopeConfig
from tformer_deploy.errors import InputError
from tformer_deploy.exporters.tensorrt.graph import fixed_graph

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

from tformer_deploy.exporters.tensorrt import build
from tformer_deploy.exporters.tensorrt.costs import PROFILE_BYTES
from tformer_deploy.exporters.tensorrt.preflight import Layout, make_plan

ONE, SEVERAL = {"_gemv_mha_v1": 2}, {"_gemm_mha_v2": 2}
LLAMA = dataclasses.replace(LLAMA_LIKE, n_layers=2, d_model=128, head_dim=64, max_length=128)
SHAPES: dict[str, ModelConfig] = {
    "gpt2": dataclasses.replace(GPT2_LIKE, n_layers=2, d_model=128, n_kv_heads=4, head_dim=64, max_length=128),
    "llama": LLAMA,
    "qwen3": dataclasses.replace(LLAMA, qk_norm="head", head_dim=128),
    "gemma": dataclasses.replace(
        LLAMA, head_dim=256, n_kv_heads=1, qk_norm="head", post_norm=True, window=16, window_layers=(0,),
        window_rope=RopeConfig(1000.0), embedding_scale=8.0,
    ),
}  # fmt: skip


def exported(config: ModelConfig, folder: Path, dtype: DType = "fp16") -> Path:
    hot_decoder(config).save_pretrained(folder / "model")
    return tformer_deploy.export(folder / "model", folder / "bundle", dtype=dtype, check=False)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("gpt2", "fp16"),
        ("llama", "bf16"),
        ("qwen3", "fp16"),
        ("gemma", "bf16"),
        pytest.param("gpt2", "bf16", marks=pytest.mark.slow),
        pytest.param("llama", "fp16", marks=pytest.mark.slow),
        pytest.param("qwen3", "bf16", marks=pytest.mark.slow),
        pytest.param("gemma", "fp16", marks=pytest.mark.slow),
    ],
)
def test_layouts_when_built_then_every_attention_of_every_profile_fuses(shape: str, dtype: DType, tmp_path: Path):
    bundle = exported(SHAPES[shape], tmp_path, dtype)
    shared = build(bundle, max_batch=2, targets=("8.9",)).record
    split = build(bundle, max_batch=2, targets=("8.9",), layout="split", prompt_buckets=(32, 128)).record
    assert [(p.name, p.plan_kernels, p.log_kernels) for p in shared.profiles] == [
        ("decode", ONE, ONE),
        ("prefill-128", SEVERAL, SEVERAL),
    ]
    assert [
        (plan.file, plan.graph, [(p.name, p.plan_kernels, p.log_kernels) for p in plan.profiles]) for plan in split.plans
    ] == [
        ("decode.engine", "decode", [("decode", ONE, ONE), ("extend-64", SEVERAL, SEVERAL)]),
        ("prefill.engine", "prefill", [("prefill-32", SEVERAL, SEVERAL), ("prefill-128", SEVERAL, SEVERAL)]),
    ]
    assert split.plans[1].profiles[1].sequence == (33, 128, 128)
    assert split.plans[0].profiles[1].logits == (1, 1, 16)
    assert not split.unfused
    assert split.cache_updates == 4
    for record in (shared, split):
        for plan in record.plans:
            assert plan.size <= record.weights_bytes + len(plan.profiles) * PROFILE_BYTES
    assert sorted(e.record.layout for e in list_engines(open_bundle(bundle)) if e.record) == ["shared", "split"]


def test_shared_plan_when_its_weights_outweigh_everything_then_holds_them_once_and_split_twice(tmp_path: Path):
    wide = dataclasses.replace(LLAMA, vocab_size=32000, d_model=512, d_ff=2048, n_heads=8)
    bundle = exported(wide, tmp_path)
    weights = sum(t.size for t in open_bundle(bundle).manifest.tensors.values())
    assert weights > 2.2 * PROFILE_BYTES
    shared, split = build(bundle, targets=("8.9",)).record, build(bundle, targets=("8.9",), layout="split").record
    assert shared.weights_bytes == weights
    assert weights < shared.size <= weights + 2 * PROFILE_BYTES
    assert shared.size < 1.5 * weights  # whatever the kernels take, not a second copy
    assert 2 * weights < split.size <= 2 * weights + 3 * PROFILE_BYTES


@pytest.fixture(scope="module")
def fp16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(LLAMA, tmp_path_factory.mktemp("fp16"))


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(LLAMA, tmp_path_factory.mktemp("fp32"), "fp32")


def test_fp32_when_the_layout_only_decodes_then_is_fused(fp32: Path, tmp_path: Path):
    record = build(shutil.copytree(fp32, tmp_path / "b"), layout="decode").record
    assert [(plan.name, [(p.name, p.plan_kernels) for p in plan.profiles]) for plan in record.plans] == [
        ("decode", [("decode", ONE)])
    ]
    assert record.dtype == "fp32"


def test_head_dim_8_when_the_layout_only_decodes_then_is_fused_in_fp16(tmp_path: Path):
    record = build(exported(dataclasses.replace(LLAMA, head_dim=8), tmp_path), layout="decode").record
    assert [(p.name, p.plan_kernels) for p in record.plans[0].profiles] == [("decode", ONE)]
    assert not record.unfused


@pytest.mark.parametrize("layout", ["shared", "split"])
def test_fp32_when_it_would_prefill_then_is_refused_for_that_phase(fp32: Path, layout: Layout):
    with pytest.raises(InputError, match=r"prefill( and extend)?: the dtype is fp32") as e:
        build(fp32, layout=layout)
    assert "decode: the dtype" not in e.value.message
    assert not (fp32 / ENGINES).exists()


def test_decomposed_attention_when_allowed_then_is_loud_recorded_and_never_called_fused(
    fp32: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    bundle = shutil.copytree(fp32, tmp_path / "b")
    assert run(["build-engine", str(bundle), "--allow-decomposed"]) == 0
    out, err = capsys.readouterr()
    assert "prefill: 2 attentions, fp32, head_dim 64, over 128 cache slots, mask computed in the graph: CANNOT FUSE" in err
    assert "decode: 2 attentions, fp32, head_dim 64, over 128 cache slots, mask computed in the graph: will fuse" in err
    assert "WARNING: the attention of prefill may be DECOMPOSED" in err
    assert "NOT FUSED in prefill-128: blocks.0.attention, blocks.1.attention" in out
    assert "fused attentions proven" not in out
    (entry,) = list_engines(open_bundle(bundle))
    assert entry.record is not None
    assert entry.record.unfused == {"prefill-128": ("blocks.0.attention", "blocks.1.attention")}
    assert [p.plan_kernels for p in entry.record.profiles] == [ONE, {}]
    assert run(["inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 NOT FUSED" in shown
    assert "fused attention proven" not in shown


def test_decomposing_when_allowed_but_not_needed_then_changes_nothing(fp16: Path, tmp_path: Path):
    bundle = shutil.copytree(fp16, tmp_path / "b")
    first, again = (build(bundle, allow_decomposed=allowed, force=True).record for allowed in (False, True))
    assert not again.unfused
    # The flag is part of the input, and so a few bytes of the plan may differ.
    assert [p.size for p in again.plans] == [p.size for p in first.plans]
    assert again.profiles == first.profiles


CAPPED = dataclasses.replace(LLAMA, attention_softcap=5.0, window=16, window_layers=(0,))


def test_soft_cap_when_decomposing_is_allowed_then_no_layer_counts_as_fused(tmp_path: Path):
    record = build(exported(CAPPED, tmp_path), allow_decomposed=True, layout="split").record
    layers = ("blocks.0.attention", "blocks.1.attention")
    assert record.unfused == {"decode": layers, "extend-64": layers, "prefill-128": layers}
    assert all(not p.plan_kernels and not p.log_kernels for p in record.profiles)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_soft_cap_when_written_as_operators_then_computes_the_same(phase: str, tmp_path: Path):
    bundle = open_bundle(exported(CAPPED, tmp_path, "fp32"))
    path, generator = bundle.path / f"{phase}.onnx", np.random.default_rng(0)
    inputs = {
        "input_ids": generator.integers(0, 131, (2, 5)),
        "logit_positions": np.array([[4], [2]]),
        "past_lengths": np.array([40, 3]),
    }
    found = []
    for expand in (False, True):
        data = fixed_graph(path, 128, expand)
        assert expand != ("Attention" in {node.op_type for node in onnx.load_from_string(data).graph.node})
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        feeds = {i.name: inputs[i.name] for i in session.get_inputs() if i.name in inputs}
        for i in session.get_inputs():
            if i.name not in inputs:
                feeds[i.name] = np.random.default_rng(len(feeds)).normal(size=(2, *i.shape[1:])).astype(np.float32)
        found.append(session.run(["logits"], feeds)[0])
    assert np.abs(found[0]).max() > 0.5
    assert np.abs(found[0] - found[1]).max() < 1e-4


@pytest.mark.parametrize("change", [{"head_dim": 20}, {"head_dim": 264}, {"n_heads": 3, "n_kv_heads": 1}])
def test_attention_when_it_may_be_decomposed_then_what_became_of_it_is_recorded_layer_by_layer(
    change: dict[str, int], tmp_path: Path
):
    record = build(exported(dataclasses.replace(LLAMA, **change), tmp_path), allow_decomposed=True).record
    decode, prefill = record.profiles
    # RTX pads a head of 20 when it may, and fuses then; it and three heads decode with the kernel that copies the cache.
    layers = ("blocks.0.attention", "blocks.1.attention") if change == {"head_dim": 264} else ()
    assert decode.decomposed == prefill.decomposed == layers
    assert decode.plan_kernels == ({} if layers else SEVERAL)


@pytest.mark.parametrize(
    ("change", "capacity", "words"),
    [
        ({"max_length": 32768}, 32768, "decode: capacity is 32768; for head_dim 64 in fp16 the kernel ends at 24512"),
        ({"head_dim": 20}, 128, "prefill and decode: head_dim is 20"),
        ({"n_heads": 3, "n_kv_heads": 1}, 128, "decode: the model has 3 query heads; the fused kernel takes 4 or more"),
        ({"attention_softcap": 50.0}, 128, "prefill and decode: attention scores are capped at 50"),
    ],
)
def test_model_when_an_attention_cannot_fuse_then_is_refused_phase_by_phase(
    change: dict[str, int], capacity: int, words: str, fp16: Path
):
    manifest, config = open_bundle(fp16).manifest, dataclasses.replace(LLAMA, **change)
    changed = dataclasses.replace(manifest, config=config, max_length=config.max_length)
    with pytest.raises(InputError) as e:
        make_plan(changed, "fp16", capacity, 8, ())
    assert words.replace("prefill and decode", "decode and prefill") in e.value.message


def test_capacity_when_beyond_the_decode_kernel_then_the_command_refuses_before_the_builder_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bundle = exported(dataclasses.replace(LLAMA, max_length=32768), tmp_path)
    assert run(["build-engine", str(bundle), "--capacity", "32768"]) == 3
    assert "decode: capacity is 32768" in capsys.readouterr().err
    assert not (bundle / ENGINES).exists()


def test_command_when_it_starts_then_costs_and_fusion_are_said_before_and_buckets_come_from_a_file(
    fp16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bundle = shutil.copytree(fp16, tmp_path / "b")
    (tmp_path / "lengths").write_text("10\n20\n90\n")
    arguments = ["--layout", "split", "--prompt-buckets-from", str(tmp_path / "lengths"), "--json"]
    assert run(["build-engine", str(bundle), *arguments]) == 0
    out, err = capsys.readouterr()
    plans = json.loads(out)["plans"]
    assert [p["name"] for p in plans[1]["profiles"]] == ["prefill-64", "prefill-128"]
    before = err[: err.index("%")]
    for words in (
        "prefill: 2 attentions",
        "causal flag: will fuse",
        "MiB a row of 128 slots",
        "in each of 2 plans",
        "available",
        "free",
    ):
        assert words in before


def test_builder_when_there_is_too_little_memory_then_is_not_started(
    fp16: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from tformer_deploy.exporters.tensorrt import costs

    monkeypatch.setattr(costs, "available_memory", lambda: 100 * 2**20)
    assert run(["build-engine", str(fp16)]) == 6
    assert "100.0 MiB are available" in capsys.readouterr().err
    assert not (fp16 / ENGINES).exists()


def test_node_when_the_parser_refuses_it_then_the_error_names_node_and_layer_and_the_cure(fp16: Path, tmp_path: Path):
    from tformer_deploy.exporters.tensorrt.build import run_worker

    folder = shutil.copytree(fp16, tmp_path / "b")
    proto = onnx.load(folder / "decode.onnx", load_external_data=False)
    attentions = [node for node in proto.graph.node if node.op_type == "Attention"]
    next(a for a in attentions[1].attribute if a.name == "softcap").f = 5.0
    (folder / "decode.onnx").write_bytes(proto.SerializeToString())
    profile = {"name": "decode", "phase": "decode", "batch": [1, 1, 1], "sequence": [1, 1, 1], "logits": [1, 1, 1]}
    request = {
        "flavour": "rtx", "graph": "decode.onnx", "square": False, "capacity": 64, "n_layers": 2, "compute_capabilities": ["8.9"], "profiles": [profile], "expand_attention": False, "decomposable": False,
        "may_decompose": [],
    }  # fmt: skip
    with pytest.raises(InputError, match=r"node blocks\.1\.attention \(Attention\): softcap") as e:
        run_worker(request, folder, tmp_path / "x", lambda phase, done: None)
    assert "--allow-decomposed" in (e.value.hint or "")


def test_command_when_the_gpu_is_hidden_then_builds_and_inspects_all_the_same(fp16: Path, tmp_path: Path):
    bundle = shutil.copytree(fp16, tmp_path / "b")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    for command in (["build-engine", str(bundle), "--target", "8.9"], ["inspect", str(bundle)]):
        done = subprocess.run(
            [sys.executable, "-m", "tformer_deploy.cli", *command], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "fused attention proven" in done.stdout.replace("\n", " ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_command_when_stopped_while_building_then_nothing_that_is_left_can_be_used(
    fp16: Path, tmp_path: Path, number: signal.Signals, code: int
):
    bundle = shutil.copytree(fp16, tmp_path / "b")
    command = [sys.executable, "-m", "tformer_deploy.cli", "build-engine", str(bundle), "--layout", "split"]
    # Enough to do behind the first line that is read, however busy the machine is.
    command += [f"--prompt-bucket={n}" for n in range(8, 33, 4)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "%" in line:  # the builder of the first plan is at work
            break
    process.send_signal(number)
    assert process.wait(timeout=5) == code
    process.stderr.close()
    assert list_engines(open_bundle(bundle)) == []
    assert number == signal.SIGKILL or os.listdir(bundle / ENGINES) == []
    build(bundle, layout="split")
    assert len(os.listdir(bundle / ENGINES)) == 1
