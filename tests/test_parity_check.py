"""``check``: what it prints, its exit codes, and what an export does with a red one."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from conftest import LLAMA_LIKE, hot_decoder

from tformer_deploy import api, cli
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.seal import seal
from tformer_deploy.parity import check_bundle
from tformer_deploy.parity.gates import GATES


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.run(["check", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def strict(text: str) -> dict:
    def refuse(word: str):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def spoiled(bundle: Path, path: Path, value: float) -> Path:
    """A copy, sealed, one value of whose weights is another."""
    shutil.copytree(bundle, path)
    opened = open_bundle(path)
    with opened.weights_path.open("r+b") as file:
        file.seek(opened.manifest.tensors["blocks.1.attention.value.weight"].offset)
        file.write(np.float32(value).tobytes())
    seal(path)
    return path


def test_check_when_bundle_is_right_then_exit_0_and_green(capsys, llama_bundle, llama_checkpoint):
    code, out, err = run(capsys, llama_bundle, "--checkpoint", llama_checkpoint)
    assert code == 0
    assert "Verdict: green" in out
    assert re.search(r"\bred\b", out) is None
    assert "Traceback" not in err


def test_check_when_a_weight_is_wrong_then_exit_1_and_names_it(capsys, llama_bundle, llama_checkpoint, tmp_path):
    path = spoiled(llama_bundle, tmp_path / "b", 5.0)
    code, out, _ = run(capsys, path, "--checkpoint", llama_checkpoint, "--json")
    found = strict(out)
    assert code == 1
    assert (found["verdict"], found["passed"]) == ("red", False)
    wrong = next(c for c in found["checks"] if c["metric"] == "tensors that differ from the checkpoint")
    assert (wrong["value"], wrong["verdict"], wrong["detail"]) == (1, "red", "blocks.1.attention.value.weight differs")


def test_check_when_json_is_asked_for_then_every_metric_has_gate_and_verdict(capsys, llama_bundle, llama_checkpoint, tmp_path):
    code, out, _ = run(capsys, llama_bundle, "--checkpoint", llama_checkpoint, "--json", "--report", tmp_path / "r.json")
    found = strict(out)
    assert code == 0
    assert strict((tmp_path / "r.json").read_text()) == found
    assert found["core_sha256"] == open_bundle(llama_bundle).core_sha256
    checks = {(c["group"], c["metric"]): c for c in found["checks"]}
    assert len(checks) == len(found["checks"])
    gates = GATES["fp32"]
    for group in ("prefill, ragged batch", "decode, teacher-forced", "decode, several tokens at once"):
        lines = [checks[group, m]["gate"] for m in ("max abs", "relative L2, p95", "cosine, p5", "mean KL", "same top-1")]
        assert lines == [gates.max_abs, gates.rel_l2_p95, gates.cosine_p5, gates.mean_kl, gates.top1_agreement]
    for group in ("prefill caches", "decode caches", "several-token caches"):
        assert checks[group, "max abs"]["gate"] == gates.cache_rows
    assert checks["greedy", "prompt 0: tokens agreed"]["value"] == 64
    assert {c["verdict"] for c in found["checks"]} == {"green"}
    assert all(isinstance(c["value"], (int, float)) and isinstance(c["gate"], (int, float)) for c in found["checks"])


def test_check_when_values_are_nan_then_json_stays_strict_and_red(capsys, llama_bundle, llama_checkpoint, tmp_path):
    path = spoiled(llama_bundle, tmp_path / "b", float("nan"))
    code, out, _ = run(capsys, path, "--checkpoint", llama_checkpoint, "--json")
    found = strict(out)
    assert code == 1
    assert any(c["value"] is None and c["verdict"] == "red" for c in found["checks"])


def test_check_when_there_is_no_checkpoint_then_is_self_consistent_only_and_exit_1(capsys, llama_bundle, tmp_path):
    code, out, _ = run(capsys, llama_bundle, "--json")
    found = strict(out)
    assert code == 1
    assert (found["verdict"], found["passed"]) == ("self-consistent only", False)
    assert {c["verdict"] for c in found["checks"]} == {"green"}
    assert not [c for c in found["checks"] if c["group"] == "weights"]
    # A wrong weight is beyond what it can see: this is why it is no success.
    wrong = spoiled(llama_bundle, tmp_path / "b", 5.0)
    assert strict(run(capsys, wrong, "--json")[1])["verdict"] == "self-consistent only"


def test_check_when_the_checkpoint_is_another_then_is_red(capsys, llama_bundle, tmp_path):
    hot_decoder(LLAMA_LIKE, seed=1).save_pretrained(tmp_path / "other")
    code, out, _ = run(capsys, llama_bundle, "--checkpoint", tmp_path / "other", "--json")
    found = strict(out)
    assert (code, found["verdict"]) == (1, "red")
    assert any("other" in note and "made from llama" in note for note in found["notes"])


@pytest.mark.parametrize("change", [{"vocab_size": 100}, {"n_layers": 2}, {"max_length": 16}, {"d_ff": 96}, {"norm_eps": 1e-6}])
def test_check_when_the_checkpoint_is_of_another_shape_then_is_red_without_a_traceback(capsys, llama_bundle, tmp_path, change):
    hot_decoder(replace(LLAMA_LIKE, **change)).save_pretrained(tmp_path / "other")
    code, out, err = run(capsys, llama_bundle, "--checkpoint", tmp_path / "other", "--json")
    assert (code, strict(out)["verdict"]) == (1, "red")
    assert "defect" not in err


def test_check_when_a_file_is_damaged_then_exit_3_and_names_it(capsys, llama_bundle, llama_checkpoint, tmp_path):
    shutil.copytree(llama_bundle, tmp_path / "b")
    with (tmp_path / "b" / "decode.onnx").open("ab") as file:
        file.write(b"\0")
    code, out, err = run(capsys, tmp_path / "b", "--checkpoint", llama_checkpoint)
    assert (code, out) == (3, "")
    assert "decode.onnx" in err
    assert "Traceback" not in err


def test_check_when_bundle_or_checkpoint_is_absent_then_exit_3(capsys, llama_bundle, tmp_path):
    assert run(capsys, tmp_path / "none")[0] == 3
    assert run(capsys, llama_bundle, "--checkpoint", tmp_path / "none")[0] == 3


@pytest.fixture(scope="module", params=["fp16", "bf16"])
def half(request, llama_checkpoint, tmp_path_factory) -> tuple[str, Path]:
    """A dtype, and the llama-like checkpoint exported in it."""
    path = tmp_path_factory.mktemp("half") / "b"
    return request.param, api.export(llama_checkpoint, path, dtype=request.param, check=False)


def test_check_when_bundle_is_half_precision_then_is_green_under_its_own_gates(half, llama_checkpoint):
    dtype, path = half
    report = check_bundle(path, llama_checkpoint)
    assert report.passed, [c for c in report.checks if c.verdict == "red"]
    assert report.dtype == dtype
    ran = [n for n in report.notes if "was not executed" in n]
    assert bool(ran) == (dtype == "bf16")
    for c in report.checks:
        if c.metric in ("cosine, p5", "same top-1"):  # never widened
            assert c.gate == {"cosine, p5": GATES[dtype].cosine_p5, "same top-1": GATES[dtype].top1_agreement}[c.metric]


def test_check_when_a_half_precision_weight_is_wrong_then_is_red(half, llama_checkpoint, tmp_path):
    path = tmp_path / "b"
    shutil.copytree(half[1], path)
    bundle = open_bundle(path)
    record = bundle.manifest.tensors["blocks.1.attention.value.weight"]
    with bundle.weights_path.open("r+b") as file:
        file.seek(record.offset)
        file.write(bytes(record.size))
    seal(path)
    found = {(c.group, c.metric) for c in check_bundle(path, llama_checkpoint).checks if c.verdict == "red"}
    assert {("weights", "tensors that differ from the checkpoint"), ("prefill, ragged batch", "same top-1")} <= found


def test_check_when_suite_is_full_then_rows_meet_a_buckets_edge(llama_bundle, llama_checkpoint):
    report = check_bundle(llama_bundle, llama_checkpoint, suite="full")
    assert report.passed
    assert report.suite == "full"
    assert next(c for c in report.checks if c.group == "prefill, ragged batch").detail == "382 positions"


def test_check_when_a_graph_gives_logits_of_another_shape_then_is_red_without_a_traceback(
    capsys, llama_bundle, llama_checkpoint, tmp_path
):
    """Sealed on purpose: every row gets the first row's logits, and one of them is enough."""
    shutil.copytree(llama_bundle, tmp_path / "b")
    model = onnx.load(tmp_path / "b" / "prefill.onnx", load_external_data=False)
    node = next(n for n in model.graph.node if "logits" in n.output)
    node.output[0] = "all_logits"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0], np.int64), "first"))
    model.graph.node.append(onnx.helper.make_node("Gather", ["all_logits", "first"], ["logits"], axis=0))
    (tmp_path / "b" / "prefill.onnx").write_bytes(model.SerializeToString())
    seal(tmp_path / "b")
    code, out, err = run(capsys, tmp_path / "b", "--checkpoint", llama_checkpoint, "--bisect", "--json")
    assert code == 1
    assert {c["group"] for c in strict(out)["checks"] if c["verdict"] == "red"} == {"graphs"}
    assert "defect" not in err


def test_export_when_the_graphs_are_wrong_then_leaves_no_bundle(monkeypatch, llama_checkpoint, tmp_path):
    """A defect of the exporter: every decode mask leaves the new token out."""
    from tformer_deploy.exporters.onnx import export as exporter

    def sabotaged(model, path):
        for node in model.graph:
            if node.op_type == "LessOrEqual":
                node.op_type = "Less"
        return right(model, path)

    right = exporter.save_graph
    monkeypatch.setattr(exporter, "save_graph", sabotaged)
    with pytest.raises(api.ParityError, match="decode, teacher-forced") as caught:
        api.export(llama_checkpoint, tmp_path / "b")
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_export_when_the_graphs_are_wrong_and_a_bundle_is_there_then_keeps_the_old_one(
    monkeypatch, llama_bundle, llama_checkpoint, tmp_path
):
    shutil.copytree(llama_bundle, tmp_path / "b")
    before = open_bundle(tmp_path / "b").core_sha256
    monkeypatch.setattr(api.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stdout='{"checks": []}', stderr=""))
    with pytest.raises(api.ParityError, match="differ from PyTorch"):
        api.export(llama_checkpoint, tmp_path / "b", force=True)
    assert open_bundle(tmp_path / "b", verify="full").core_sha256 == before
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_export_when_the_check_is_killed_then_leaves_no_bundle_and_exit_6(monkeypatch, llama_checkpoint, tmp_path):
    monkeypatch.setattr(api.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=-9, stdout="", stderr=""))
    with pytest.raises(api.ResourceError, match="signal 9"):
        api.export(llama_checkpoint, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_export_when_the_check_runs_in_its_child_then_the_bundle_is_there(llama_checkpoint, tmp_path):
    path = api.export(llama_checkpoint, tmp_path / "b")
    assert open_bundle(path).manifest.dtype == "fp32"


def test_check_when_the_checkpoint_bounds_no_length_then_the_bundles_own_stands_in(shared_models, tmp_path):
    """A config.json may leave the length out; export was told it."""
    shutil.copytree(shared_models / "stories260k", tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    del config["max_position_embeddings"]
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    path = api.export(tmp_path / "c", tmp_path / "b", max_length=96, check=False)
    assert check_bundle(path, tmp_path / "c").passed
