"""What is refused before the builder starts, and the profiles that it gets."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import LLAMA_LIKE

from tformer_deploy.bundle import Manifest, open_bundle
from tformer_deploy.bundle.fusable import preflight, unfusable
from tformer_deploy.errors import CapabilityError, InputError, UsageError
from tformer_deploy.exporters.tensorrt import flavours
from tformer_deploy.exporters.tensorrt.flavours import Flavour, load_flavour
from tformer_deploy.exporters.tensorrt.monitor import Fraction
from tformer_deploy.exporters.tensorrt.preflight import make_plan


@pytest.fixture(scope="module")
def manifest(llama_bundle: Path) -> Manifest:
    return open_bundle(llama_bundle).manifest


def test_plan_when_nothing_is_asked_then_has_decode_and_one_prefill_profile(manifest: Manifest):
    plan = make_plan(manifest, "fp16", None, 8, ())
    assert plan.capacity == 256
    assert [(p.name, p.batch, p.sequence) for p in plan.parts[0].profiles] == [
        ("decode", (1, 8, 8), (1, 1, 1)),
        ("prefill-256", (1, 8, 8), (2, 256, 256)),
    ]


def test_plan_when_buckets_are_given_then_each_length_has_exactly_one_profile(manifest: Manifest):
    plan = make_plan(manifest, "fp16", 100, 4, (64, 16, 16))
    lengths = [s for p in plan.parts[0].profiles for s in range(p.sequence[0], p.sequence[2] + 1)]
    assert lengths == list(range(1, 65))


@pytest.mark.parametrize("capacity", [0, 1, 257])
def test_capacity_when_out_of_range_then_is_a_usage_error(manifest: Manifest, capacity: int):
    with pytest.raises(UsageError, match="--capacity"):
        make_plan(manifest, "fp16", capacity, 8, ())


@pytest.mark.parametrize("buckets", [(1,), (16, 129)])
def test_bucket_when_beyond_the_capacity_or_of_one_token_then_is_a_usage_error(manifest: Manifest, buckets: tuple[int, ...]):
    with pytest.raises(UsageError, match="--prompt-bucket"):
        make_plan(manifest, "fp16", 128, 8, buckets)


def test_fp32_when_planned_then_names_the_phase_and_proposes_fp16(manifest: Manifest):
    with pytest.raises(InputError, match="prefill: the dtype is fp32") as e:
        make_plan(manifest, "fp32", None, 8, ())
    assert (e.value.hint or "").startswith("Give --dtype fp16, or --layout decode")


@pytest.mark.parametrize(
    ("head_dim", "words"),
    [(8, "prefill: head_dim is 8"), (20, "prefill and decode: head_dim is 20"), (264, "prefill and decode: head_dim is 264")],
)
def test_head_dim_when_no_kernel_takes_it_then_is_refused_by_name(head_dim: int, words: str):
    config = dataclasses.replace(LLAMA_LIKE, head_dim=head_dim)
    (fault,) = unfusable(config, "fp16", 128)
    assert words in fault[0]


@pytest.mark.parametrize(("head_dim", "limit"), [(64, 24512), (128, 24448), (256, 24320), (16, 24560)])
def test_capacity_when_above_what_was_measured_then_is_refused(head_dim: int, limit: int):
    config = dataclasses.replace(LLAMA_LIKE, head_dim=head_dim)
    assert unfusable(config, "bf16", limit) == []
    ((fault, hint),) = unfusable(config, "bf16", limit + 1)
    assert "decode: capacity" in fault
    assert str(limit) in hint


def test_soft_cap_when_the_model_has_one_then_is_refused_before_the_builder_starts():
    config = dataclasses.replace(LLAMA_LIKE, attention_softcap=50.0)
    ((fault, hint),) = unfusable(config, "fp16", 128)
    assert fault == "prefill and decode: attention scores are capped at 50; TensorRT takes no cap."
    assert "ONNX Runtime" in hint
    assert unfusable(dataclasses.replace(LLAMA_LIKE, logit_softcap=30.0, window=8, window_layers=(0,)), "fp16", 128) == []


def test_fp32_capacity_when_above_what_was_measured_then_is_refused_too():
    config = dataclasses.replace(LLAMA_LIKE, head_dim=64)
    assert len(unfusable(config, "fp32", 12224)) == 1
    assert len(unfusable(config, "fp32", 12225)) == 2


@pytest.mark.parametrize(("name", "extra"), [("rtx", "tensorrt-rtx"), ("tensorrt", "tensorrt"), ("auto", "tensorrt-rtx")])
def test_flavour_when_not_installed_then_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, name, extra: str):
    monkeypatch.setattr(flavours.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CapabilityError, match="not installed") as e:
        load_flavour(name)
    assert f"tformer-deploy[{extra}]" in (e.value.hint or "")


def stub(monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__=version, __spec__=object()))
    monkeypatch.setattr(flavours.importlib.util, "find_spec", lambda n: object() if n == name else None)


def test_flavour_when_too_old_for_the_graph_then_is_refused(monkeypatch: pytest.MonkeyPatch):
    stub(monkeypatch, "tensorrt", "10.14.1")
    with pytest.raises(CapabilityError, match=r"10\.15 is the first that fits"):
        load_flavour("tensorrt")


def test_auto_when_only_full_tensorrt_is_there_then_takes_it(monkeypatch: pytest.MonkeyPatch):
    stub(monkeypatch, "tensorrt", "10.16.0")
    assert load_flavour("auto").name == "tensorrt"


@pytest.mark.parametrize(("version", "flags"), [("10.16.0", 2), ("11.0.0", 0)])
def test_full_tensorrt_when_older_than_11_then_strong_typing_is_asked_for(version: str, flags: int):
    module = SimpleNamespace(NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1))
    assert Flavour("tensorrt", module, version).network_flags() == flags


def test_full_tensorrt_when_there_is_no_gpu_then_says_where_to_build(monkeypatch: pytest.MonkeyPatch):
    def absent(_: str) -> None:
        raise OSError

    monkeypatch.setattr(flavours.ctypes, "CDLL", absent)
    with pytest.raises(CapabilityError, match="compiles for the GPU it runs on"):
        Flavour("tensorrt", None, "11.0.0").compute_capabilities(())


def test_full_tensorrt_when_targets_are_given_then_is_a_usage_error():
    with pytest.raises(UsageError, match="--target"):
        Flavour("tensorrt", None, "11.0.0").compute_capabilities(("8.9",))


def test_full_tensorrt_when_the_driver_refuses_then_its_answer_is_in_the_message(monkeypatch: pytest.MonkeyPatch):
    # What a driver gives that is too old, or sees no device (CUDA_VISIBLE_DEVICES empty).
    monkeypatch.setattr(flavours.ctypes, "CDLL", lambda _: SimpleNamespace(cuInit=lambda _: 100))
    with pytest.raises(CapabilityError, match=r"the NVIDIA driver gives none \(error 100\)") as e:
        Flavour("tensorrt", None, "11.0.0").compute_capabilities(())
    assert e.value.exit_code == 4


RTX = SimpleNamespace(ComputeCapability=SimpleNamespace(SM75=1, SM80=2, SM89=3, SM120=4, NONE=5, CURRENT=6))


def test_rtx_when_no_target_is_given_then_the_portable_set_is_named():
    assert Flavour("rtx", RTX, "1.7.1").compute_capabilities(()) == ("8.0", "8.9", "12.0")


def test_rtx_when_a_target_is_in_no_list_then_is_refused():
    with pytest.raises(CapabilityError, match=r"9\.0"):
        Flavour("rtx", RTX, "1.7.1").compute_capabilities(("9.0",))


@pytest.mark.parametrize(
    ("gpu", "compiled", "words"),
    [
        ("9.0", ("8.9",), "9.0, which TensorRT-RTX 1.7.1 does not support (H100 and H200 are 9.0)"),
        ("8.9", ("8.0",), "Give --target 8.9 to run it here"),
        ("8.9", ("8.0", "8.9"), None),
        (None, ("8.0",), None),
        (100, ("8.0",), None),
    ],
)
def test_advice_when_the_gpu_here_is_not_served_then_says_what_to_give(monkeypatch: pytest.MonkeyPatch, gpu, compiled, words):
    monkeypatch.setattr(flavours, "_probe", lambda: gpu)
    found = Flavour("rtx", RTX, "1.7.1").advice(compiled)
    assert (found is None) if words is None else (words in found)
    assert Flavour("tensorrt", None, "11.0.0").advice(compiled) is None


@pytest.mark.parametrize(("gpu", "name"), [("9.0", "tensorrt"), ("8.9", "rtx"), (None, "rtx")])
def test_auto_when_both_are_installed_then_takes_the_one_that_knows_the_gpu_here(monkeypatch: pytest.MonkeyPatch, gpu, name: str):
    rtx = SimpleNamespace(__version__="1.7.1", ComputeCapability=RTX.ComputeCapability)
    for module, fake in (("tensorrt_rtx", rtx), ("tensorrt", SimpleNamespace(__version__="10.16.0"))):
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setattr(flavours.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(flavours, "_probe", lambda: gpu)
    assert load_flavour("auto").name == name


class FullTensorRT:
    """The calls of full TensorRT that read a plan back; ``engine`` is what it makes of one."""

    LayerInformationFormat = SimpleNamespace(JSON="json")

    def __init__(self, engine: object) -> None:
        self.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)


def test_full_tensorrt_when_a_plan_is_built_then_its_inspector_is_asked_for_json():
    inspector = SimpleNamespace(get_engine_information=lambda kind: f"{kind}: layers")
    engine = SimpleNamespace(create_engine_inspector=lambda: inspector)
    assert Flavour("tensorrt", FullTensorRT(engine), "11.0.0").inspect(b"plan", None) == "json: layers"
    assert Flavour("rtx", None, "1.7.1").inspect(b"plan", None) is None


def test_full_tensorrt_when_it_cannot_load_its_own_plan_then_nothing_is_proven():
    with pytest.raises(InputError, match="cannot load the plan"):
        Flavour("tensorrt", FullTensorRT(None), "11.0.0").inspect(b"plan", None)


def test_attention_when_square_then_a_causal_flag_hides_what_lies_ahead_and_nothing_else_does():
    upper = SimpleNamespace(mask=None, causal_kind="CausalMaskKind.UPPER_LEFT", key_value_lengths=None)
    assert Flavour("rtx", None, "1.7.1").masks(upper, square=True)
    assert not Flavour("rtx", None, "1.7.1").masks(upper)
    none = SimpleNamespace(mask=None, causal_kind="CausalMaskKind.NONE", key_value_lengths=None)
    assert not Flavour("rtx", None, "1.7.1").masks(none, square=True)
    for causal in (True, False):
        older = SimpleNamespace(mask=None, causal=causal)  # 10.x
        assert Flavour("tensorrt", None, "10.16.0").masks(older, square=True) is causal
        assert not Flavour("tensorrt", None, "10.16.0").masks(older)


def test_split_plan_when_made_then_prompts_and_what_extends_a_row_have_profiles_of_their_own(manifest: Manifest):
    plan = make_plan(manifest, "fp16", 100, 4, (16, 64), "split")
    assert [(part.name, part.graph, [(p.name, p.sequence, p.logits) for p in part.profiles]) for part in plan.parts] == [
        ("decode", "decode", [("decode", (1, 1, 1), (1, 1, 1)), ("extend-64", (2, 64, 64), (1, 1, 16))]),
        ("prefill", "prefill", [("prefill-16", (2, 16, 16), (1, 1, 16)), ("prefill-64", (17, 64, 64), (1, 1, 16))]),
    ]
    assert [r.phase for r in plan.reports] == ["decode", "extend", "prefill"]
    assert "causal flag" in plan.reports[2].sentence


def test_decode_layout_when_fp32_then_has_one_token_a_row_only(manifest: Manifest):
    assert [p.name for p in make_plan(manifest, "fp32", 100, 4, (), "decode").parts[0].profiles] == ["decode"]
    assert [p.name for p in make_plan(manifest, "fp16", 40, 4, (), "decode").parts[0].profiles] == ["decode", "extend-40"]
    with pytest.raises(UsageError, match="--layout decode has no prefill profile"):
        make_plan(manifest, "fp16", 100, 4, (16,), "decode")


def test_head_dim_8_when_the_refusal_proposes_the_decode_layout_then_that_has_a_plan(manifest: Manifest):
    small = dataclasses.replace(manifest, config=dataclasses.replace(manifest.config, head_dim=8))
    with pytest.raises(InputError, match="prefill: head_dim is 8") as e:
        make_plan(small, "fp16", 100, 4, ())
    assert (e.value.hint or "").startswith("Give --layout decode")
    plan = make_plan(small, "fp16", 100, 4, (), "decode")
    assert [p.name for p in plan.parts[0].profiles] == ["decode"]
    assert not plan.unfusable_phases


@pytest.mark.parametrize(
    ("change", "fresh", "words"),
    [
        ({}, True, "causal flag: will fuse"),
        ({}, False, "mask computed in the graph: will fuse"),
        ({"window": 8, "window_layers": (0, 2)}, True, "causal flag (2 of them a window of 8, mask computed in the graph)"),
        ({"positions": "alibi", "rope": None}, True, "mask with ALiBi computed in the graph"),
    ],
)
def test_report_when_printed_then_says_which_mask_the_attention_has(change, fresh: bool, words: str):
    (report,) = preflight(dataclasses.replace(LLAMA_LIKE, **change), "fp16", 128, ("prefill",), square=fresh)
    assert words in report.sentence
    assert ("the prompt's own keys" in report.sentence) is fresh


@pytest.mark.parametrize(
    ("mask", "kind", "lengths", "hides"),
    [
        (object(), "CausalMaskKind.NONE", None, True),
        (None, "CausalMaskKind.LOWER_RIGHT", object(), True),
        (None, "CausalMaskKind.UPPER_LEFT", None, False),
        (None, "CausalMaskKind.NONE", None, False),
        (None, "CausalMaskKind.LOWER_RIGHT", None, False),
    ],
)
def test_attention_when_anchored_at_the_upper_left_then_counts_as_hiding_nothing(mask, kind, lengths, hides: bool):
    attention = SimpleNamespace(mask=mask, causal_kind=kind, key_value_lengths=lengths)
    assert Flavour("rtx", None, "1.7.1").masks(attention) is hides


def test_progress_when_phases_nest_then_rises_to_one():
    fraction, seen = Fraction(), []
    fraction.start("build", None, 2)
    for step in range(2):
        fraction.start("inner", "build", 4)
        for inner in range(4):
            fraction.step("inner", inner)
            seen.append(fraction.value)
        fraction.finish("inner")
        fraction.step("build", step)
        seen.append(fraction.value)
    fraction.finish("build")
    assert seen == [0.125, 0.25, 0.375, 0.5, 0.5, 0.625, 0.75, 0.875, 1.0, 1.0]
    assert fraction.value == 1.0
