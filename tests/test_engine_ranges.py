"""The range scan names what would overflow in fp16, and only that. No TensorRT is needed but where an engine is built."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from conftest import LLAMA_LIKE, hot_decoder

import tformer_deploy
from tformer_deploy.bundle import open_bundle
from tformer_deploy.cli import run
from tformer_deploy.config import DType
from tformer_deploy.exporters.tensorrt.ranges import FP16_MOST, RangeScan, Reach, scan_ranges

ROWS = (tuple(range(1, 40)), tuple(range(131 - 1, 0, -1)) * 2)


def exported(folder: Path, scale: float, dtype: DType = "fp32") -> Path:
    decoder = hot_decoder(dataclasses.replace(LLAMA_LIKE, n_layers=2))
    with torch.no_grad():
        decoder.get_parameter("blocks.1.feed_forward.up.weight").mul_(scale)
    decoder.save_pretrained(folder / "model")
    return tformer_deploy.export(folder / "model", folder / "bundle", dtype=dtype, check=False)


def test_scan_when_everything_fits_then_says_how_far_the_largest_goes(tmp_path: Path):
    found = scan_ranges(open_bundle(exported(tmp_path, 1.0)), ROWS)
    assert found.tokens == 39 + 260
    assert found.values > 20
    assert not found.beyond
    assert not found.near
    (sentence,) = found.sentences
    assert found.largest.place in sentence
    assert "65,504" in sentence


def test_scan_when_one_projection_is_too_large_then_names_it_and_what_follows_and_proposes_bf16(tmp_path: Path):
    found = scan_ranges(open_bundle(exported(tmp_path, 2e5)), ROWS)
    places = [reach.place for reach in found.beyond]
    assert any(place.startswith("blocks.1.feed_forward/") for place in places)
    assert not [place for place in places if place.startswith("blocks.0") or ".attention" in place]
    assert all(reach.most > FP16_MOST for reach in found.beyond)
    assert "do NOT fit fp16" in " ".join(found.sentences)
    assert "--dtype bf16" in " ".join(found.sentences)


def test_sentence_when_a_value_comes_close_then_is_named_as_near_and_the_rest_is_counted():
    near = tuple(Reach(f"blocks.{i}/x", 20000.0) for i in range(10))
    text = " ".join(RangeScan(5, 20, near[0], (), near).sentences)
    assert "10 values come close to the end of fp16: blocks.0/x reaches 20,000" in text
    assert "blocks.7/x reaches 20,000 and 2 more" in text
    assert "blocks.8" not in text


def test_scan_when_the_graph_is_fp16_then_an_overflow_is_infinite_and_beyond(tmp_path: Path):
    found = scan_ranges(open_bundle(exported(tmp_path, 2e4, "fp16")), ROWS)
    assert found.beyond
    assert found.largest.most == float("inf")


def test_command_when_asked_to_scan_then_says_what_it_found_before_building(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    bundle = exported(tmp_path, 1.0, "fp16")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": list(row)}) + "\n" for row in ROWS))
    scan = ["--range-scan", str(tmp_path / "rows.jsonl")]
    assert run(["build-engine", str(bundle), "--capacity", "64", *scan]) == 0
    err = capsys.readouterr().err
    assert "range scan:" in err[: err.index("%")]
    assert run(["build-engine", str(bundle), "--layout", "decode", "--range-scan", str(tmp_path / "absent")]) == 3
    assert "absent" in capsys.readouterr().err
