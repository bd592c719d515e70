"""Engines of the block layouts that families bring: every attention of both phases fuses, or is refused before the build."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from conftest import LLAMA_LIKE, hot_decoder

import tformer_deploy
from tformer_deploy.bundle.engines import ENGINES
from tformer_deploy.cli import run
from tformer_deploy.config import ModelConfig, RopeConfig

pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

BASE = dataclasses.replace(LLAMA_LIKE, max_length=128)
LAYOUTS: dict[str, ModelConfig] = {
    "qwen3": dataclasses.replace(BASE, qk_norm="head", head_dim=32),
    "gemma3": dataclasses.replace(
        BASE, post_norm=True, qk_norm="head", window=16, window_layers=(0, 1), window_rope=RopeConfig(1000.0), attention_scale=0.1,
        embedding_scale=8.0, head_dim=256, n_kv_heads=1,
    ),
    "cohere": dataclasses.replace(
        BASE, norm="layernorm", norm_bias=False, residual="parallel_shared", qk_norm="each_head", logit_scale=0.0625
    ),
    "pythia": dataclasses.replace(BASE, norm="layernorm", residual="parallel", rope=RopeConfig(dim=4), gated=False, tied=False),
    "bloom": dataclasses.replace(BASE, positions="alibi", rope=None, norm="layernorm", embedding_norm=True),
}  # fmt: skip


def exported(config: ModelConfig, folder: Path) -> Path:
    hot_decoder(config).save_pretrained(folder / "model")
    return tformer_deploy.export(folder / "model", folder / "bundle", dtype="fp16", check=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engine_when_a_family_has_its_own_layout_then_every_attention_fuses(layout: str, tmp_path: Path):
    built = tformer_deploy.build_engine(exported(LAYOUTS[layout], tmp_path), max_batch=2)
    assert [(p.plan_kernels, p.log_kernels) for p in built.record.profiles] == [
        ({"_gemv_mha_v1": 3}, {"_gemv_mha_v1": 3}),
        ({"_gemm_mha_v2": 3}, {"_gemm_mha_v2": 3}),
    ]


def test_soft_cap_when_the_model_has_one_then_inspect_says_so_and_the_build_does_not_start(tmp_path: Path, capsys):
    bundle = exported(dataclasses.replace(BASE, attention_softcap=50.0, head_dim=20), tmp_path)
    assert run(["inspect", str(bundle), "--json"]) == 0
    faults = json.loads(capsys.readouterr().out)["tensorrt"]
    assert faults["fp16"][0] == "prefill and decode: attention scores are capped at 50; TensorRT takes no cap."
    assert "head_dim is 20" in faults["fp16"][1]
    assert len(faults["fp32"]) == 3
    assert run(["inspect", str(bundle)]) == 0
    assert "TensorRT fp16: prefill and decode: attention scores are capped at 50" in capsys.readouterr().out.replace("\n", " ")
    assert run(["build-engine", str(bundle)]) == 3
    assert "capped at 50" in capsys.readouterr().err
    assert not (bundle / ENGINES).exists()
