"""The proof of fusion can fail: unfused controls are refused, and both of its ways are tested apart."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.errors import InputError
from tformer_deploy.exporters.tensorrt.fusion import (
    Kernel,
    Product,
    ProofTarget,
    kernels_in_log,
    kernels_in_plan,
    prove_by_inspector,
    prove_fusion,
    unpacked_matrices,
)

NAMES = ["blocks.0.attention", "blocks.1.attention"]
PROFILES = [ProofTarget("decode", True), ProofTarget("prefill-64", False)]
ALLOWED = [ProofTarget("decode", True), ProofTarget("prefill-64", False, may_decompose=True)]


def plan_bytes(kernels: list[tuple[str, str]]) -> bytes:
    return b"\0mha _fused_mha\n" + b"".join(
        b'x function={ name=%s a=1 layers="[ONNX Layer: %s]"\n\xff' % (k.encode(), n.encode()) for k, n in kernels
    )


def log_text(kernels: list[tuple[int, str, str]]) -> str:
    """Rows as the builder prints them: part number in the name, the profile's in the names of tensors but for the first."""
    rows = ["Layers:", "Name: __mye1_myl0_0, LayerType: shape_call, Inputs: [], Metadata: "]
    for part in (0, 1):
        mark = f" [profile {part}]" if part else ""
        rows.append(
            f"Name: node_matmul{mark}_myl{part}_1, LayerType: gemm, Inputs: [ {{ Name: input_ids{mark} }}], Metadata: [ONNX Layer: m]"
        )
    rows += [
        f"Name: {k}_myl{part}_{i + 2}, LayerType: kgen, Inputs: [], TacticName: {k}_0x1, StreamId: 0, Metadata: [ONNX Layer: {n}]"
        for i, (part, k, n) in enumerate(kernels)
    ]
    return "\n".join(rows)


GOOD_PLAN = [("_gemv_mha_v1", n) for n in NAMES] + [("_gemm_mha_v2", n) for n in NAMES]
GOOD_LOG = [(0, "_gemv_mha_v1", n) for n in NAMES] + [(1, "_gemm_mha_v2", n) for n in NAMES]


def test_proof_when_both_ways_agree_then_counts_each_profile():
    decode, prefill = prove_fusion(plan_bytes(GOOD_PLAN), log_text(GOOD_LOG), NAMES, PROFILES)
    assert decode.plan == decode.log == {"_gemv_mha_v1": 2}
    assert prefill.plan == prefill.log == {"_gemm_mha_v2": 2}


def test_plan_when_it_only_mentions_mha_then_holds_no_kernel():
    assert kernels_in_plan(plan_bytes([])) == []


def test_log_when_profiles_are_numbered_otherwise_than_parts_then_follows_the_names():
    rows = log_text(GOOD_LOG).replace("_myl1_", "_myl7_")
    assert kernels_in_log(rows, 2)[1] == [Kernel("_gemm_mha_v2", (n,)) for n in NAMES]


@pytest.mark.parametrize(
    ("plan", "log", "words"),
    [
        ([], [], "holds 0 fused attention kernels; expected 2 layers × 2 profiles = 4"),
        (GOOD_PLAN[:3], GOOD_LOG, "holds 3 fused attention kernels"),
        (GOOD_PLAN[:2], GOOD_LOG, "profile prefill-64: the plan has no fused kernel for 2 of 2"),
        (GOOD_PLAN, GOOD_LOG[:3], "profile prefill-64: the log has no fused kernel for 1 of 2 attentions: blocks.1.attention."),
        (GOOD_PLAN, GOOD_LOG[:2], "the log has no fused kernel for 2 of 2"),
        (GOOD_PLAN, [*GOOD_LOG, GOOD_LOG[3]], "the log has 3 fused kernels for 2 attentions"),
        ([*GOOD_PLAN, GOOD_PLAN[0]], GOOD_LOG, "holds 5 fused attention kernels"),
        ([GOOD_PLAN[0], *GOOD_PLAN[:3]], GOOD_LOG, "no fused kernel for 1 of 2"),
        (GOOD_PLAN, [*GOOD_LOG[:3], (1, "_gemm_mha_v3", NAMES[1])], "plan and log name different kernels"),
        (
            [("_gemm_mha_v2", n) for n in NAMES * 2],
            [(p, "_gemm_mha_v2", n) for p in (0, 1) for n in NAMES],
            "decodes with _gemm_mha_v2, which copies the whole cache",
        ),
    ],
)
def test_proof_when_one_way_lacks_something_then_no_engine_is_kept(plan: list[Any], log: list[Any], words: str):
    with pytest.raises(InputError, match="no engine is kept") as e:
        prove_fusion(plan_bytes(plan), log_text(log), NAMES, PROFILES)
    assert words in e.value.message


def test_proof_when_decomposing_is_allowed_in_a_profile_then_names_its_layers_and_counts_zero():
    decode, prefill = prove_fusion(plan_bytes(GOOD_PLAN[:2]), log_text(GOOD_LOG[:2]), NAMES, ALLOWED)
    assert (decode.plan, decode.decomposed) == ({"_gemv_mha_v1": 2}, ())
    assert (prefill.plan, prefill.log, prefill.decomposed) == ({}, {}, tuple(NAMES))


def test_proof_when_some_are_decomposed_where_allowed_then_only_those_are_named():
    _, prefill = prove_fusion(plan_bytes(GOOD_PLAN[:3]), log_text(GOOD_LOG[:3]), NAMES, ALLOWED)
    assert (prefill.plan, prefill.log, prefill.decomposed) == ({"_gemm_mha_v2": 1}, {"_gemm_mha_v2": 1}, (NAMES[1],))


@pytest.mark.parametrize(
    ("plan", "log", "words"),
    [
        (GOOD_PLAN[2:], GOOD_LOG[2:], "profile decode: the log has no fused kernel for 2 of 2"),
        (GOOD_PLAN[:3], GOOD_LOG[:2], "the plan holds 3 fused attention kernels; expected 2, as the log has"),
        (GOOD_PLAN[:3], [*GOOD_LOG[:2], GOOD_LOG[3]], "profile prefill-64: plan and log name different layers"),
    ],
)
def test_proof_when_decomposing_is_allowed_then_the_ways_must_still_agree(plan: list[Any], log: list[Any], words: str):
    with pytest.raises(InputError) as e:
        prove_fusion(plan_bytes(plan), log_text(log), NAMES, ALLOWED)
    assert words in e.value.message


def inspected(kernels: list[tuple[int, str, str]]) -> str:
    """As the engine inspector of full TensorRT prints an engine with two profiles."""
    layers: list[dict[str, Any]] = [{"Name": "Reformatting CopyNode for Input Tensor 0", "LayerType": "Reformat", "Metadata": ""}]
    for part in (0, 1):
        mark = f" [profile {part}]" if part else ""
        layers.append(
            {"Name": f"gemm_myl{part}_1{mark}", "Inputs": [{"Name": f"input_ids{mark}"}], "Metadata": "[ONNX Layer: m]"}
        )
    for i, (part, kernel, name) in enumerate(kernels):
        layers.append({"Name": f"{kernel}_myl{part}_{i + 2}", "LayerType": "kgen", "Metadata": f"[ONNX Layer: {name}]"})
    return json.dumps({"Layers": layers, "Bindings": []})


def test_inspector_when_it_shows_every_layer_then_proves_it_and_says_whether_the_log_agrees():
    (decode, prefill), agrees = prove_by_inspector(inspected(GOOD_LOG), log_text(GOOD_LOG), NAMES, PROFILES)
    assert (decode.plan, decode.log, prefill.plan) == ({"_gemv_mha_v1": 2}, {"_gemv_mha_v1": 2}, {"_gemm_mha_v2": 2})
    assert agrees
    (decode, _), agrees = prove_by_inspector(inspected(GOOD_LOG), "another form", NAMES, PROFILES)
    assert (decode.plan, decode.log, agrees) == ({"_gemv_mha_v1": 2}, {}, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            inspected(GOOD_LOG[:3]),
            "profile prefill-64: the inspector has no fused kernel for 1 of 2 attentions: blocks.1.attention.",
        ),
        (inspected([]), "the inspector has no fused kernel for 2 of 2"),
        ('{"Layers": ["Layer(Myelin): one"]}', "no detailed layers"),
        ("no json", "no detailed layers"),
        ("{}", "no detailed layers"),
    ],
)
def test_inspector_when_it_lacks_a_layer_then_the_log_cannot_make_up_for_it(text: str, words: str):
    with pytest.raises(InputError) as e:
        prove_by_inspector(text, log_text(GOOD_LOG), NAMES, PROFILES)
    assert words in e.value.message


def test_proof_when_the_network_has_no_attention_then_is_refused():
    with pytest.raises(InputError, match="no attention layer"):
        prove_fusion(b"", "Layers:", [], PROFILES)


# From here on the real builder runs, each time in a process of its own.
trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

from tformer_deploy.exporters.tensorrt.build import run_worker  # noqa: E402
from tformer_deploy.exporters.tensorrt.flavours import load_flavour  # noqa: E402
from tformer_deploy.exporters.tensorrt.preflight import make_plan  # noqa: E402
from tformer_deploy.exporters.tensorrt.worker import require_no_unused_input  # noqa: E402

QUIET = lambda phase, done: None  # noqa: E731


def build_plan(bundle: Bundle, output: Path, **changes: Any) -> dict[str, Any]:
    """One plan of the decode graph, by the worker."""
    plan = make_plan(bundle.manifest, "fp16", 128, 4, (32,))
    request = {
        "flavour": "rtx",
        "graph": "decode.onnx",
        "capacity": 128,
        "n_layers": bundle.manifest.config.n_layers,
        "compute_capabilities": list(load_flavour("rtx").compute_capabilities(())),
        "profiles": [dataclasses.asdict(p) for p in plan.parts[0].profiles],
        "square": False,
        "expand_attention": False,
        "decomposable": False,
        "may_decompose": [],
    } | changes
    return run_worker(request, bundle.path, output, QUIET)


def profiles_of(phase: str, **changes: Any) -> list[dict[str, Any]]:
    """Profiles as the worker is told; sequence may differ."""
    sequence = [1, 1, 1] if phase == "decode" else [2, 32, 32]
    return [{"name": f"{phase}-x", "phase": phase, "batch": [1, 4, 4], "sequence": sequence, "logits": [1, 1, 1]} | changes]


def edited(bundle: Path, folder: Path, edit: Any) -> Bundle:
    """A copy whose decode graph is edited behind the manifest's back."""
    shutil.copytree(bundle, folder)
    opened = open_bundle(folder)
    proto = onnx.load(opened.decode_path, load_external_data=False)
    for node in proto.graph.node:
        if node.op_type == "Attention":
            edit(node)
    opened.decode_path.write_bytes(proto.SerializeToString())
    return opened


def test_decomposed_attention_when_built_then_counts_zero_and_is_refused(llama_bundle: Path, tmp_path: Path):
    bundle, output = open_bundle(llama_bundle), tmp_path / "x.engine"
    with pytest.raises(InputError, match="holds 0 fused attention kernels; expected 3 layers") as e:  # in fp32 it cannot fuse
        build_plan(bundle, output, decomposable=True, profiles=profiles_of("prefill"))
    assert "the log has no fused kernel for 3 of 3 attentions" in e.value.message
    assert not output.exists()


def test_attention_when_only_one_profile_is_unfused_then_names_that_profile(llama_bundle: Path, tmp_path: Path):
    output = tmp_path / "x.engine"
    with pytest.raises(InputError, match="profile prefill-32: the log has no fused kernel for 3 of 3") as e:
        build_plan(open_bundle(llama_bundle), output, decomposable=True)
    assert "profile decode" not in e.value.message
    assert not output.exists()


def test_attention_when_it_may_not_decompose_then_the_builder_itself_refuses(llama_bundle: Path, tmp_path: Path):
    with pytest.raises(InputError, match="not supported by a dedicated kernel") as e:
        build_plan(open_bundle(llama_bundle), tmp_path / "x.engine")
    assert "/_src/" not in e.value.message
    assert "fp16" in (e.value.hint or "")


def test_attention_when_a_node_attribute_allows_decomposing_then_is_refused_before_building(
    llama_fp16_bundle: Path, tmp_path: Path
):
    bundle = edited(
        llama_fp16_bundle, tmp_path / "b", lambda node: node.attribute.append(onnx.helper.make_attribute("TRT_decomposable", 1))
    )
    with pytest.raises(InputError, match="marked decomposable"):
        build_plan(bundle, tmp_path / "x.engine")


def test_attention_when_it_has_an_input_that_the_parser_drops_then_is_refused(llama_fp16_bundle: Path, tmp_path: Path):
    # Right by the standard; TensorRT-RTX 1.7 parses it, says nothing, and ignores the lengths.
    bundle = edited(llama_fp16_bundle, tmp_path / "b", lambda node: node.input.extend(["", "", "past_lengths"]))
    with pytest.raises(InputError, match="reads past_lengths beside query, key, value and mask"):
        build_plan(bundle, tmp_path / "x.engine")


@pytest.mark.parametrize(("causal", "words"), [(1, "has a causal flag and reads the cache"), (0, "has no mask")])
def test_attention_when_its_mask_is_missing_then_is_refused(llama_fp16_bundle: Path, tmp_path: Path, causal: int, words: str):
    def edit(node: onnx.NodeProto) -> None:
        del node.input[3]
        next(a for a in node.attribute if a.name == "is_causal").i = causal

    bundle = edited(llama_fp16_bundle, tmp_path / "b", edit)
    with pytest.raises(InputError, match=words):
        build_plan(bundle, tmp_path / "x.engine")


def test_log_when_the_parser_says_that_it_drops_an_input_then_is_refused():
    with pytest.raises(InputError, match="Unused Input: past_lengths"):
        require_no_unused_input(SimpleNamespace(complaints=["Make sure …", "Unused Input: past_lengths"]))


def test_network_when_it_has_fewer_attentions_than_layers_then_is_refused(llama_fp16_bundle: Path, tmp_path: Path):
    with pytest.raises(InputError, match="3 attentions and 6 cache updates; expected 4 and 8"):
        build_plan(open_bundle(llama_fp16_bundle), tmp_path / "x.engine", n_layers=4)


@pytest.mark.parametrize("data", [b"junk" * 125, b""])
def test_graph_when_it_is_junk_then_is_refused(llama_fp16_bundle: Path, tmp_path: Path, data: bytes):
    bundle = open_bundle(shutil.copytree(llama_fp16_bundle, tmp_path / "b"))
    (bundle.path / "decode.onnx").write_bytes(data)
    with pytest.raises(InputError, match=r"decode\.onnx"):
        build_plan(bundle, tmp_path / "x.engine")


def test_decode_when_its_profile_has_a_range_then_does_not_pass_for_one_that_reads_in_place(
    llama_fp16_bundle: Path, tmp_path: Path
):
    profiles = profiles_of("decode", sequence=[1, 8, 8])
    assert build_plan(open_bundle(llama_fp16_bundle), tmp_path / "x.engine", profiles=profiles)["proofs"] == [
        {"plan": {"_gemm_mha_v2": 3}, "log": {"_gemm_mha_v2": 3}, "decomposed": [], "unpacked": []}
    ]


def test_compute_capabilities_when_named_then_are_in_the_plan(llama_fp16_bundle: Path, tmp_path: Path):
    build_plan(open_bundle(llama_fp16_bundle), tmp_path / "x.engine", compute_capabilities=["8.6", "12.0"])
    plan = (tmp_path / "x.engine").read_bytes()
    assert b"sm86" in plan
    assert b"sm120" in plan
    assert b"sm89" not in plan


def test_matrices_when_a_kernel_reads_one_without_multiplying_then_are_named_as_unpacked_in_that_profile():
    def row(part: int, inputs: str, layers: str) -> str:
        mark = f" [profile {part}]" if part else ""
        return (
            f"Name: k{mark}_myl{part}_9, LayerType: kgen, Inputs: [ {{ Name: x{mark}, Datatype: {inputs} }}], Metadata: {layers}"
        )

    products = [Product("blocks.0.attention.query", "q.dequantize", "q"), Product("head", "h.dequantize", "h")]
    both, alone, product = "[ONNX Layer: q.dequantize][ONNX Layer: q]", "[ONNX Layer: q.dequantize]", "[ONNX Layer: q]"
    head = "[ONNX Layer: h.dequantize][ONNX Layer: h]"
    text = "\n".join(
        [
            "Layers:",
            row(0, "Half, Datatype: Int4", both),
            row(0, "FP8", head),
            row(1, "Int8", alone),
            row(1, "Half", product),
            row(1, "Half", both),  # names both and reads neither as stored
            row(1, "Int8", head),
        ]
    )
    assert unpacked_matrices(text, products, 2) == [(), ("blocks.0.attention.query",)]
    assert unpacked_matrices("Layers:\n", products, 2) == [("blocks.0.attention.query", "head")] * 2
