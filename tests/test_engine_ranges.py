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
from tformer_deploy.bundle.engines import list_engines
from tformer_deploy.cli import run
from tformer_deploy.config import DType
from tformer_deploy.exporters.tensorrt.ranges import (
    CALIBRATION_TOKENS,
    FP16_MOST,
    Prompts,
    RangeScan,
    Reach,
    compared_prompts,
    prompts_for,
    scan_ranges,
)

ROWS = (tuple(range(1, 40)), tuple(range(131 - 1, 0, -1)) * 2)


def exported(folder: Path, scale: float, dtype: DType = "fp32") -> Path:
    decoder = hot_decoder(dataclasses.replace(LLAMA_LIKE, n_layers=2))
    with torch.no_grad():
        decoder.get_parameter("blocks.1.feed_forward.up.weight").mul_(scale)
    decoder.save_pretrained(folder / "model")
    return tformer_deploy.export(folder / "model", folder / "bundle", dtype=dtype, check=False)


def test_scan_when_everything_fits_then_says_how_far_the_largest_goes(tmp_path: Path):
    found = scan_ranges(open_bundle(exported(tmp_path, 1.0)), Prompts(ROWS))
    assert found.tokens == 39 + 260
    assert found.values > 20
    assert not found.beyond
    assert not found.near
    (sentence,) = found.sentences
    assert found.largest.place in sentence
    assert "65,504" in sentence


def test_scan_when_one_projection_is_too_large_then_names_it_and_what_follows_and_proposes_bf16(tmp_path: Path):
    found = scan_ranges(open_bundle(exported(tmp_path, 2e5)), Prompts(ROWS))
    places = [reach.place for reach in found.beyond]
    assert any(place.startswith("blocks.1.feed_forward/") for place in places)
    assert not [place for place in places if place.startswith("blocks.0") or ".attention" in place]
    assert all(reach.most > FP16_MOST for reach in found.beyond)
    assert found.first.startswith("blocks.1.feed_forward/")  # where it begins, and not what grew furthest
    assert not found.largest.place.startswith("blocks.1.feed_forward/")
    assert "do NOT fit fp16" in " ".join(found.sentences)
    assert "--dtype bf16" in " ".join(found.sentences)


def test_sentence_when_a_value_comes_close_then_is_named_as_near_and_the_rest_is_counted():
    near = tuple(Reach(f"blocks.{i}/x", 20000.0) for i in range(10))
    text = " ".join(RangeScan(5, 20, near[0], (), near).sentences)
    assert "10 values come close to the end of fp16: blocks.0/x reaches 20,000" in text
    assert "blocks.7/x reaches 20,000 and 2 more" in text
    assert "blocks.8" not in text


def test_scan_when_the_graph_is_fp16_then_an_overflow_is_infinite_and_beyond(tmp_path: Path):
    found = scan_ranges(open_bundle(exported(tmp_path, 2e4, "fp16")), Prompts(ROWS))
    assert found.beyond
    assert found.largest.most == float("inf")


def test_command_when_asked_to_scan_then_says_what_it_found_before_building(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    bundle = exported(tmp_path, 1.0, "fp16")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"input_ids": list(row)}) + "\n" for row in ROWS))
    scan = ["--range-scan", str(tmp_path / "rows.jsonl")]
    assert run(["build-engine", str(bundle), "--capacity", "64", *scan]) == 0
    lines = capsys.readouterr().err.splitlines()
    said = next(i for i, line in enumerate(lines) if line.startswith("range scan:"))
    assert "on 295 tokens of the prompts given" in lines[said]
    assert not [line for line in lines[:said] if "%" in line and not line.endswith("range scan")]
    assert any("100%" in line for line in lines[said:])
    assert run(["build-engine", str(bundle), "--layout", "decode", "--range-scan", str(tmp_path / "absent")]) == 3
    assert "absent" in capsys.readouterr().err


def test_prompts_when_given_then_are_run_and_else_random_tokens_are_and_called_so(tmp_path: Path):
    bundle = open_bundle(exported(tmp_path, 1.0))
    assert prompts_for(bundle, ROWS) == Prompts(ROWS)
    assert prompts_for(bundle, ()) == compared_prompts(bundle)
    (sentence,) = scan_ranges(bundle, prompts_for(bundle, ())).sentences
    assert "on 114 random tokens" in sentence
    assert "no real prompts" in sentence
    assert "--range-scan FILE" in sentence
    assert "random" not in " ".join(scan_ranges(bundle, Prompts(ROWS)).sentences)


def test_prompts_when_the_bundle_was_calibrated_then_are_its_rows_within_a_bound(tmp_path: Path):
    hot_decoder(dataclasses.replace(LLAMA_LIKE, n_layers=2)).save_pretrained(tmp_path / "model")
    text = tmp_path / "rows.jsonl"
    text.write_text("".join(json.dumps({"input_ids": [i % 131] * 60}) + "\n" for i in range(100)))
    path = tformer_deploy.export(tmp_path / "model", tmp_path / "b", quantize="int8", calibration=text, check=False)
    bundle = open_bundle(path)
    prompts = prompts_for(bundle, ())
    ids = [row[0] for row in prompts.rows]
    assert ids == list(range(0, 100, 3))  # from the whole file, not from its beginning
    found = scan_ranges(bundle, prompts)
    assert 1900 < found.tokens <= CALIBRATION_TOKENS
    assert "of the 6,000 tokens that the weights were rounded for (calibration.json)" in found.sentences[0]
    assert "random" not in " ".join(found.sentences)
    assert prompts_for(bundle, ROWS) == Prompts(ROWS)


def test_command_when_fp16_is_derived_then_scans_unasked_records_it_and_inspect_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    bundle = exported(tmp_path, 1e3)
    wanted = scan_ranges(open_bundle(bundle), compared_prompts(open_bundle(bundle))).sentences
    assert run(["build-engine", str(bundle), "--dtype", "fp16", "--capacity", "64"]) == 0
    assert set(wanted) <= set(capsys.readouterr().err.splitlines())
    (entry,) = list_engines(open_bundle(bundle))
    assert entry.record is not None
    assert entry.record.graph is not None
    assert entry.record.graph.notes[-len(wanted) :] == wanted
    assert run(["inspect", str(bundle)]) == 0
    assert "note: range scan:" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "flags"), [("fp16", []), ("fp32", ["--dtype", "bf16"])])
def test_command_when_no_fp16_graph_is_derived_then_nothing_is_scanned_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: DType, flags: list[str]
):
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    bundle = exported(tmp_path, 1.0, dtype)
    assert run(["build-engine", str(bundle), "--capacity", "64", *flags]) == 0
    assert "range scan" not in capsys.readouterr().err
    (entry,) = list_engines(open_bundle(bundle))
    assert "range scan" not in repr(entry.record)


def test_command_when_fp16_overflows_then_the_error_names_where_it_begins_beside_the_red_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    bundle = exported(tmp_path, 2e4)
    assert run(["build-engine", str(bundle), "--dtype", "fp16", "--capacity", "64"]) == 3
    err = capsys.readouterr().err
    error = err[err.index("differs too much") :]
    assert "prefill, ragged batch, max abs: nan" in error
    first = scan_ranges(open_bundle(bundle), compared_prompts(open_bundle(bundle))).beyond[0]
    assert f"first to last: {first.place} reaches {first.most:,.0f}, " in error
    assert error.index("blocks.1.feed_forward/") < error.index("blocks.1/")
    assert "do NOT fit fp16" in err[: err.index("differs too much")]
