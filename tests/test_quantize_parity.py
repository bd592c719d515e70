"""``check`` of a quantised bundle: what makes it green, and for each line what makes it red."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from tformer_deploy import api
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.quantization import Calibration, Quantization, is_matrix, scale_name
from tformer_deploy.bundle.seal import seal
from tformer_deploy.checkpoints import open_checkpoint
from tformer_deploy.parity import accuracy, check_bundle, quantised_weights
from tformer_deploy.parity.gates import Check
from tformer_deploy.parity.report import Report
from tformer_deploy.parity.rounded_rows import rounded_rows
from tformer_deploy.quantization import StoredTensor
from tformer_deploy.reference import Decoder

SAMPLE = Path(__file__).resolve().parent.parent / "samples"
CHECKPOINT, TEXT = SAMPLE / "shakespeare", SAMPLE / "text" / "tinyshakespeare.txt"


@pytest.fixture(scope="module")
def int8(tmp_path_factory) -> Path:
    return api.export(CHECKPOINT, tmp_path_factory.mktemp("int8") / "bundle", quantize="int8", check=False)


@pytest.fixture(scope="module")
def int4(tmp_path_factory) -> Path:
    """Blocks of 128, rounded for the text."""
    path = tmp_path_factory.mktemp("int4") / "bundle"
    return api.export(CHECKPOINT, path, quantize="int4", calibration=TEXT, check=False)


@pytest.fixture(scope="module")
def uncalibrated(tmp_path_factory) -> Path:
    """int4 in blocks of 128, each value rounded to the nearest."""
    return api.export(CHECKPOINT, tmp_path_factory.mktemp("plain") / "bundle", quantize="int4", block=128, check=False)


def verdicts(report: Report) -> dict[tuple[str, str], Check]:
    found = {(c.group, c.metric): c for c in report.checks}
    assert len(found) == len(report.checks)
    return found


def red(report: Report) -> set[tuple[str, str]]:
    return {(c.group, c.metric) for c in report.checks if c.verdict == "red"}


OWN = "deployed against the unquantised model, its own text"


def test_check_when_int8_is_right_then_is_green_and_every_line_was_looked_at(int8):
    report = check_bundle(int8, CHECKPOINT)
    assert report.passed, red(report)
    found = verdicts(report)
    for group in ("prefill, ragged batch", "decode, teacher-forced", "decode, several tokens at once"):
        assert found[group, "mean KL"].gate == 1e-7  # with the weights dequantised: exact
        assert found[f"deployed, {group}", "mean KL"].value > 1e-5  # rows are rounded: what runs is not the same graph
    assert found["deployed, decode caches", "slots changed beside the written one"].gate == 0
    assert found["deployed, poisoned cache slots", "max abs"].gate == 0
    assert found[OWN, "prefill: mean KL"].gate == found[OWN, "decode: mean KL"].gate == 1e-3
    assert found[OWN, "prefill: same top-1, margin ≥ 0.1"].gate == 0.99
    assert found[OWN, "prefill: perplexity ratio"].verdict == "reported"
    assert any("Matrices in int8, blocks of 32" in note for note in report.notes)


def test_check_when_int4_is_calibrated_then_is_green_and_beats_plain_rounding_in_small_blocks(int4):
    report = check_bundle(int4, CHECKPOINT)
    assert report.passed, red(report)
    found = verdicts(report)
    check = found[OWN, "prefill: mean KL"]
    assert check.gate is not None
    assert check.value < 0.9 * check.gate
    assert found["weights", "share of outputs rounded otherwise"].value == 0
    assert any("8192 tokens of tinyshakespeare.txt" in note for note in report.notes)


def test_check_when_int4_is_neither_calibrated_nor_in_small_blocks_then_its_accuracy_is_red(uncalibrated):
    report = check_bundle(uncalibrated, CHECKPOINT)
    assert red(report) <= {(OWN, "prefill: mean KL"), (OWN, "decode: mean KL")}
    assert (OWN, "prefill: mean KL") in red(report)


def test_check_when_a_text_is_given_then_perplexity_and_kl_are_of_it(int8, tmp_path):
    (tmp_path / "t.txt").write_text(TEXT.read_text()[-8000:])
    report = api.check(int8, CHECKPOINT, text=tmp_path / "t.txt")
    assert report.passed, red(report)
    found = verdicts(report)
    group = f"deployed against the unquantised model, {tmp_path / 't.txt'}"
    assert found[group, "prefill: perplexity ratio"].gate == 1.002
    assert found[group, "prefill: mean KL"].value < 1e-3
    assert found[group, "tokens compared"].value > 1500
    assert found["perplexity", "prefill: distance of the ratio from 1"].gate == 1e-5  # dequantised


def test_check_when_everything_is_compared_on_derived_graphs_then_is_green(int8):
    report = check_bundle(int8, CHECKPOINT, "full", profile="cpu")
    assert report.passed, red(report)
    groups = {c.group for c in report.checks}
    assert {
        "deployed, two turns",
        "deployed, bucket edges",
        "deployed, allocated and reused slots",
        "two optimisation levels",
    } <= groups


def test_check_when_there_is_no_checkpoint_then_is_self_consistent_only(int8):
    report = check_bundle(int8, None)
    assert report.verdict == "self-consistent only"
    assert not [c for c in report.checks if c.group == OWN]


def edited(bundle: Path, path: Path, name: str, position: int, data: bytes) -> Path:
    """A copy, sealed, some bytes of one of whose tensors are others."""
    shutil.copytree(bundle, path)
    record = open_bundle(path).manifest.tensors[name]
    with (path / "weights.bin").open("r+b") as file:
        file.seek(record.offset + position)
        file.write(data)
    seal(path)
    return path


def differing(bundle: Path) -> Check:
    checks = quantised_weights.compare_quantised_weights(open_bundle(bundle), open_checkpoint(CHECKPOINT), lambda _: None)
    return next(c for c in checks if c.metric == "tensors that differ from the rounded checkpoint")


def test_check_when_one_quantised_value_is_another_then_its_matrix_is_named(int8, tmp_path):
    name = "blocks.2.feed_forward.up.weight"
    value = int(open_bundle(int8).tensor(name)[0, 0])
    wrong = differing(edited(int8, tmp_path / "b", name, 0, np.int8(value + 1 if value < 100 else value - 1).tobytes()))
    assert (wrong.value, wrong.verdict) == (1, "red")
    assert f"{name} differs in 1 of 384 outputs" in wrong.detail


@pytest.mark.parametrize("name", ["embedding.weight", "blocks.0.norm1.weight", "norm.weight"])
def test_check_when_a_tensor_that_is_not_quantised_is_another_then_it_is_named(int4, tmp_path, name):
    wrong = differing(edited(int4, tmp_path / "b", name, 4, b"\x11\x3f"))
    assert wrong.verdict == "red"
    assert wrong.detail == f"{name} differs"


def test_check_when_the_scales_of_a_matrix_are_off_by_a_tenth_then_weights_and_accuracy_are_red(int8, tmp_path):
    name = "blocks.1.attention.out.scale"
    scales = open_bundle(int8).tensor(name) * np.float32(1.1)
    report = check_bundle(edited(int8, tmp_path / "b", name, 0, scales.tobytes()), CHECKPOINT)
    assert {("weights", "tensors that differ from the rounded checkpoint"), (OWN, "prefill: mean KL")} <= red(report)
    # The graph computes what its own weights say: only the checkpoint shows that they are wrong.
    assert ("prefill, ragged batch", "mean KL") not in red(report)


def test_check_when_a_calibrated_output_is_rounded_worse_then_its_matrix_is_named(int4, tmp_path):
    name = "blocks.0.attention.query.weight"
    scales = scale_name(name)
    values = open_bundle(int4).tensor(scales).copy()
    values[0, 3] *= 2
    wrong = differing(edited(int4, tmp_path / "b", scales, 0, values.tobytes()))
    assert wrong.verdict == "red"
    assert f"{name} differs in 1 of 128 outputs" in wrong.detail


def test_weights_when_a_calibrated_output_is_rounded_otherwise_and_as_well_then_it_only_counts(int4, monkeypatch):
    """Another machine sums in another order, and a value between two levels goes to the other one."""
    real = quantised_weights.quantized_tensors
    changed = {"outputs": 1}

    def other(*arguments):
        for stored in real(*arguments):
            if stored.name == "head.weight":
                values = stored.tensor.clone()
                for output in range(changed["outputs"]):
                    values[0, output] += 1 if values[0, output] < 7 else -1
                stored = StoredTensor(stored.name, stored.dtype, values)
            yield stored

    monkeypatch.setattr(quantised_weights, "quantized_tensors", other)
    for outputs, verdict in ((1, "green"), (40, "red")):
        changed["outputs"] = outputs
        checks = quantised_weights.compare_quantised_weights(open_bundle(int4), open_checkpoint(CHECKPOINT), lambda _: None)
        named = {c.metric: c for c in checks}
        assert named["tensors that differ from the rounded checkpoint"].verdict == "green"
        share = named["share of outputs rounded otherwise"]
        assert (share.verdict, share.detail) == (verdict, f"{outputs} of 6144")


def graph_edited(bundle: Path, path: Path, phase: str, edit) -> Path:
    shutil.copytree(bundle, path)
    proto = onnx.load(path / f"{phase}.onnx", load_external_data=False)
    edit(proto.graph)
    (path / f"{phase}.onnx").write_bytes(proto.SerializeToString())
    seal(path)
    return path


def _swap_scales(graph) -> None:
    """Keys are dequantised with the scales of values, which are of the same shape."""
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0].endswith("blocks.1.attention.key.weight"):
            node.input[1] = "blocks.1.attention.value.scale"


def _swap_matrices(graph) -> None:
    """The gate is multiplied with the matrix of the up projection."""
    for node in graph.node:
        if node.op_type == "MatMul" and "blocks.0.feed_forward.gate" in node.input[1]:
            node.input[1] = node.input[1].replace("gate", "up")


@pytest.mark.parametrize(("phase", "fault"), [("prefill", _swap_scales), ("decode", _swap_matrices)])
def test_check_when_a_graph_reads_the_wrong_tensor_then_its_exact_comparison_is_red(int8, tmp_path, phase, fault):
    report = check_bundle(graph_edited(int8, tmp_path / "b", phase, fault), CHECKPOINT)
    group = {"prefill": "prefill, ragged batch", "decode": "decode, teacher-forced"}[phase]
    assert {(group, "mean KL"), (f"deployed, {group}", "mean KL")} <= red(report)
    assert not [metric for metric in red(report) if metric[0] == "weights"]


def test_check_when_only_the_deployed_graph_is_wrong_then_only_deployed_comparisons_are_red(int8, monkeypatch):
    """A fault of the runtime's own fusion, or of a derived graph, which the dequantised graph cannot show."""
    from tformer_deploy.parity import quantised

    real = quantised.open_cpu

    def late(*arguments, **options):
        backend = real(*arguments, **options)
        decode = backend.decode
        backend.decode = lambda ids, lengths, positions, cache: decode(ids, np.maximum(lengths - 1, 0), positions, cache)
        return backend

    monkeypatch.setattr(quantised, "open_cpu", late)
    found = red(check_bundle(int8, CHECKPOINT))
    assert {group.split(",")[0].split(" ")[0] for group, _ in found} == {"deployed"}
    assert ("deployed, decode, teacher-forced", "mean KL") in found
    assert ("deployed, decode caches", "slots changed beside the written one") in found
    assert ("deployed, prefill n+1 against prefill n, decode 1", "mean KL") in found
    assert (OWN, "decode: mean KL") in found
    assert (OWN, "prefill: mean KL") not in found


def test_check_when_rows_of_a_deployed_batch_depend_on_one_another_then_is_red(int8, monkeypatch):
    from tformer_deploy.parity import quantised

    real = quantised.open_cpu

    def mixed(*arguments, **options):
        backend = real(*arguments, **options)
        prefill = backend.prefill

        def shifted(ids, positions, cache):
            logits = prefill(ids, positions, cache)
            return logits + (np.roll(logits, 1, axis=0) - logits) * 0.3

        backend.prefill = shifted
        return backend

    monkeypatch.setattr(quantised, "open_cpu", mixed)
    assert ("deployed, each row alone", "prefill: mean KL") in red(check_bundle(int8, CHECKPOINT))


def test_accuracy_when_each_line_is_crossed_then_it_is_red(int8, monkeypatch):
    monkeypatch.setattr(accuracy, "MEAN_KL", 1e-6)
    monkeypatch.setattr(accuracy, "SAME_TOP1", 1.01)
    metric = "same top-1, margin ≥ 0.1"
    wanted = {(OWN, f"{graph}: {m}") for graph in ("prefill", "decode") for m in ("mean KL", metric)}
    assert red(check_bundle(int8, CHECKPOINT)) == wanted


def test_perplexity_when_it_is_worse_than_the_line_then_is_red():
    distance = accuracy._Distance()
    want = np.zeros((4, 3), np.float32)
    distance.add(want, want + np.array([0, 0, 0.02], np.float32), (0, 1, 0))
    checks = {c.metric: c for c in accuracy._int8_checks("g", "prefill", distance, True)}
    assert checks["prefill: perplexity ratio"].value == pytest.approx(1 + 0.02 / 3, rel=1e-2)
    assert checks["prefill: perplexity ratio"].verdict == "red"


def test_rounded_rows_when_entered_then_inputs_have_255_levels_a_block_and_afterwards_none(tmp_path):
    config = replace(Decoder.from_pretrained(CHECKPOINT).config, tied=False, n_layers=1)
    decoder = Decoder(config).eval()
    seen: list[torch.Tensor] = []
    ids = torch.tensor([[1, 2, 3]])
    exact = decoder(ids)
    with rounded_rows(decoder, 32), torch.inference_mode():
        handle = decoder.blocks[0].get_submodule("feed_forward.down").register_forward_hook(lambda _, a, __: seen.append(a[0]))
        rounded = decoder(ids)
        handle.remove()
    blocks = seen[0].reshape(3, -1, 32)
    steps = blocks.abs().amax(-1, keepdim=True) / 127
    assert torch.allclose((blocks / steps).round(), blocks / steps, atol=1e-3)
    assert not torch.equal(rounded, exact)
    assert torch.equal(decoder(ids), exact)
    assert sum(is_matrix(name) for name, _ in decoder.named_parameters()) == 8


def test_export_when_the_check_is_red_then_no_bundle_is_kept(tmp_path):
    with pytest.raises(api.ParityError, match="prefill: mean KL") as e:
        api.export(CHECKPOINT, tmp_path / "b", quantize="int4", block=128)
    assert str(e.value.hint).startswith(
        "Try --calibration with a text that the model is meant for, --block 32, --head int8, --quant"
    )
    lines = e.value.message.splitlines()
    assert lines[0].startswith("The graphs are right, but what quantisation costs is beyond the line: ")
    assert lines[0].endswith("no bundle is kept.")
    assert all(" is " in line and "; the line is " in line for line in lines[1:])  # the red ones alone
    assert "tformer-tmp" not in e.value.message
    assert not (tmp_path / "b").exists()


USED = Calibration("t", 1, 2)


@pytest.mark.parametrize(
    ("quantization", "first"),
    [
        (Quantization("int8", "int8", 32), "Try --calibration with a text that the model is meant for and --block 32; or leave"),
        (Quantization("int8", "int8", 128), "Try --calibration with a text that the model is meant for, --block 32; or leave"),
        (Quantization("int8", "int8", 128, USED), "Try --block 32; or leave"),
        (Quantization("int8", "int8", 32, USED), "Leave --quantize out; or keep it as it is: export with --no-check"),
        (Quantization("int4", "int8", 32, USED), "Try --quantize int8; or leave"),
    ],
)
def test_cure_when_an_option_is_in_use_then_it_is_not_proposed_and_leaving_the_check_out_comes_last(quantization, first):
    hint = api._cure(quantization)
    assert hint.startswith(first)
    assert hint.upper().index("--NO-CHECK") > hint.upper().index("LEAVE --QUANTIZE OUT")
