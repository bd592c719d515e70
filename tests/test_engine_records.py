"""engine.json: sealed, read strictly, and compared with the plan before a runtime may see it. No TensorRT is needed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest

from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.bundle.engine_choice import choose_engine, good_engines
from tformer_deploy.bundle.engines import (
    ENGINES,
    GRAPH,
    SIDECAR,
    DerivedGraph,
    EnginePlan,
    EngineProfile,
    EngineRecord,
    dump_record,
    list_engines,
    parse_record,
    read_engine,
)
from tformer_deploy.bundle.manifest import MANIFEST
from tformer_deploy.cli import run
from tformer_deploy.errors import CapabilityError, InputError

DATA, DERIVED = b"a plan" * 100, b"a manifest"
PLAN = "shared.engine"
HERE = {"rtx": "1.7.1.116"}


ONE, MANY = {"_gemv_mha_v1": 3}, {"_gemm_mha_v2": 3}
DECODE = EngineProfile("decode", "decode", (1, 8, 8), (1, 1, 1), (1, 1, 1), ONE, ONE)
PREFILL = EngineProfile("prefill-256", "prefill", (1, 8, 8), (2, 256, 256), (1, 1, 16), MANY, MANY)


def plan_of(**changes: object) -> dict[str, object]:
    """A plan as ``engine.json`` has it."""
    plan = dataclasses.asdict(EnginePlan("shared", PLAN, "0" * 64, 5, "decode", "a" * 64, (DECODE,)))
    return plan | changes


def make_record(bundle: Bundle) -> EngineRecord:
    return EngineRecord(
        core_sha256=bundle.core_sha256,
        flavour="rtx",
        version="1.7.1.116",
        target="portable",
        compute_capabilities=("8.0", "8.9"),
        layout="shared",
        dtype="fp16",
        matrices="fp16",
        capacity=256,
        max_batch=8,
        attentions=3,
        cache_updates=6,
        weights_bytes=1000,
        cache_row_bytes=2000,
        ways=("plan", "log"),
        plans=(EnginePlan("shared", PLAN, hashlib.sha256(DATA).hexdigest(), len(DATA), "decode", "a" * 64, (DECODE, PREFILL)),),
        graph=DerivedGraph(hashlib.sha256(DERIVED).hexdigest(), 26, {"decode: max abs": (0.01, 0.12)}, ("a note",)),
    )


@pytest.fixture
def bundle(tmp_path: Path, llama_bundle: Path) -> Bundle:
    return open_bundle(shutil.copytree(llama_bundle, tmp_path / "b"))


@pytest.fixture
def engine(bundle: Bundle) -> Path:
    return write_engine(bundle, make_record(bundle))


def write_engine(bundle: Bundle, record: EngineRecord) -> Path:
    folder = bundle.path / ENGINES / record.name
    folder.mkdir(parents=True)
    for plan in record.plans:
        (folder / plan.file).write_bytes(DATA)
    (folder / GRAPH).mkdir()
    (folder / GRAPH / MANIFEST).write_bytes(DERIVED)
    (folder / SIDECAR).write_bytes(dump_record(record))
    return folder


def resealed(folder: Path, **changes: object) -> None:
    """Edits the record and gives it a right seal, as someone would who knows how."""
    raw = json.loads((folder / SIDECAR).read_text("utf-8"))
    del raw["seal"]
    raw.update(changes)
    text = json.dumps(raw, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    raw["seal"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / SIDECAR).write_text(json.dumps(raw), "utf-8")


def test_record_when_dumped_and_parsed_then_is_the_same(bundle: Bundle):
    record = make_record(bundle)
    assert parse_record(dump_record(record)) == record
    without = dataclasses.replace(record, graph=None)
    assert parse_record(dump_record(without)) == without


def test_bundle_when_it_has_an_engine_then_its_core_is_the_same(bundle: Bundle, engine: Path):
    assert open_bundle(bundle.path, verify="full").core_sha256 == bundle.core_sha256


def test_engine_when_intact_then_is_listed_and_found(bundle: Bundle, engine: Path):
    (entry,) = list_engines(bundle)
    assert entry.fault is None
    assert "3 × _gemv_mha_v1" in entry.summary
    assert "not executed" in entry.summary
    json.dumps(dataclasses.asdict(entry))  # what inspect --json prints
    choice = choose_engine(bundle, HERE, "8.9")
    assert (choice.folder, choice.record, choice.others) == (engine, make_record(bundle), ())
    assert read_engine(bundle, engine) == choice.record


def test_bundle_when_without_engines_then_lists_none_and_says_how_to_build(bundle: Bundle):
    assert list_engines(bundle) == []
    with pytest.raises(CapabilityError, match=r"has no engine\.") as e:
        choose_engine(bundle, HERE)
    assert "build-engine" in (e.value.hint or "")


@pytest.mark.parametrize(
    ("flavour", "version", "gpu", "words"),
    [
        ("rtx", "1.8.0.1", "8.9", "1.8.0.1 is installed"),
        ("tensorrt", "1.7.1.116", "8.9", "flavour rtx; tensorrt 1.7.1.116 is installed"),
        ("rtx", "1.7.1.116", "9.0", "this GPU has 9.0"),
    ],
)
def test_engine_when_for_another_runtime_or_gpu_then_is_refused_as_a_capability(
    bundle: Bundle, engine: Path, flavour: str, version: str, gpu: str, words: str
):
    with pytest.raises(CapabilityError, match=words) as e:
        choose_engine(bundle, {flavour: version}, gpu)
    assert e.value.exit_code == 4
    assert "build-engine" in (e.value.hint or "")


def test_plan_when_truncated_then_is_refused_and_listed_with_its_fault(bundle: Bundle, engine: Path):
    (engine / PLAN).write_bytes(DATA[:-1])
    assert "599 bytes" in (list_engines(bundle)[0].fault or "")
    with pytest.raises(InputError, match="599 bytes") as e:
        choose_engine(bundle, HERE)
    assert e.value.exit_code == 3


def test_plan_when_one_bit_flips_then_is_refused_before_it_is_used(bundle: Bundle, engine: Path):
    (engine / PLAN).write_bytes(bytes([DATA[0] ^ 1]) + DATA[1:])
    with pytest.raises(InputError, match=r"shared\.engine has sha256"):
        read_engine(bundle, engine)


def test_plan_when_a_symbolic_link_then_is_refused(bundle: Bundle, engine: Path, tmp_path: Path):
    (engine / PLAN).rename(tmp_path / "elsewhere")
    (engine / PLAN).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="no regular file"):
        read_engine(bundle, engine)


def test_plan_when_missing_then_is_refused(bundle: Bundle, engine: Path):
    (engine / PLAN).unlink()
    with pytest.raises(InputError, match="missing"):
        read_engine(bundle, engine)


def test_engine_when_the_core_changed_then_is_refused(bundle: Bundle, engine: Path):
    other = dataclasses.replace(bundle, core_sha256="c" * 64)
    with pytest.raises(InputError, match="compiled from the core"):
        read_engine(other, engine)
    assert "compiled from the core" in (list_engines(other)[0].fault or "")
    with pytest.raises(InputError, match="compiled from the core"):
        choose_engine(other, HERE)


def test_engine_folder_when_renamed_then_is_refused(bundle: Bundle, engine: Path):
    moved = engine.rename(engine.with_name("rtx-1.8.0.1-portable-fp16-c256"))
    with pytest.raises(InputError, match=r"holds the engine rtx-1\.7\.1\.116"):
        read_engine(bundle, moved)


@pytest.mark.parametrize("cut", [0, 1, 100, 700])
def test_sidecar_when_torn_then_is_refused_by_name(bundle: Bundle, engine: Path, cut: int):
    data = (engine / SIDECAR).read_bytes()
    (engine / SIDECAR).write_bytes(data[:cut])
    with pytest.raises(InputError, match=r"engine\.json"):
        read_engine(bundle, engine)


def test_sidecar_when_edited_then_its_seal_shows_it(bundle: Bundle, engine: Path):
    data = (engine / SIDECAR).read_bytes()
    (engine / SIDECAR).write_bytes(data.replace(b'"capacity": 256', b'"capacity": 512'))
    with pytest.raises(InputError, match="not as it was sealed"):
        read_engine(bundle, engine)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("capacity", 0, "capacity"),
        ("capacity", 256.0, "capacity"),
        ("capacity", True, "capacity"),
        ("flavour", "onnx", "flavour"),
        ("version", "../../etc", "version"),
        ("target", "a/b", "target"),
        ("compute_capabilities", [], "compute_capabilities"),
        ("plans", [plan_of(sha256="0" * 63)], "sha256"),
        ("plans", [plan_of(size=None)], "size"),
        ("plans", [plan_of(file="../x.engine")], "file"),
        ("plans", [plan_of(file="other.engine")], "names other.engine as the plan shared"),
        ("plans", [plan_of(graph="encoder")], "graph"),
        ("plans", [plan_of(profiles=[])], "proves nothing of shared.engine"),
        ("plans", [plan_of(profiles=[{"name": "decode"}])], "phase"),
        (
            "plans",
            [plan_of(profiles=[dataclasses.asdict(DECODE) | {"plan_kernels": {"[/x]": 3}, "log_kernels": {"[/x]": 3}}])],
            "counts by short names",
        ),
        (
            "plans",
            [plan_of(profiles=[dataclasses.asdict(DECODE) | {"unpacked": ["\x1b[2J"]}])],
            "names as unpacked what is no matrix",
        ),
        ("plans", [], "the layout shared has shared"),
        ("plans", [plan_of(name="decode", file="decode.engine")], "the layout shared has shared"),
        ("layout", "split", "the layout split has decode, prefill"),
        ("layout", "both", "layout"),
        ("ways", ["plan"], "expected plan, log"),
        ("ways", ["inspector", "log"], "expected plan, log"),
        ("graph", {}, "core_sha256"),
        ("extra", 1, "unknown fields: extra"),
        ("schema", 1, "has schema 1; this version reads 3"),
        ("schema", 4, "schema"),
    ],
)
def test_sidecar_when_a_field_is_wrong_then_is_refused_with_its_name(
    bundle: Bundle, engine: Path, field: str, value: object, words: str
):
    resealed(engine, **{field: value})
    with pytest.raises(InputError, match=words):
        read_engine(bundle, engine)


def test_sidecar_when_of_the_older_schema_then_is_listed_with_the_command_that_rebuilds(bundle: Bundle, engine: Path):
    resealed(engine, schema=1)
    (entry,) = list_engines(bundle)
    assert f"tformer-deploy build-engine {bundle.path} --dtype fp16 --force" in entry.summary
    with pytest.raises(InputError, match="schema 1") as e:
        choose_engine(bundle, HERE)
    assert "build-engine" in (e.value.hint or "")


@pytest.mark.parametrize("way", ["plan_kernels", "log_kernels"])
def test_sidecar_when_a_profile_lacks_a_fused_kernel_then_is_refused(bundle: Bundle, engine: Path, way: str):
    (plan,) = json.loads((engine / SIDECAR).read_text("utf-8"))["plans"]
    plan["profiles"][1][way] = {"_gemm_mha_v2": 2}
    resealed(engine, plans=[plan])
    with pytest.raises(InputError, match="does not prove 3 fused attentions"):
        read_engine(bundle, engine)


@pytest.mark.parametrize("layers", [("blocks.1.attention", "blocks.1.attention"), ("blocks.3.attention",), ("node_x",)])
def test_sidecar_when_what_is_not_fused_is_not_named_by_layer_then_is_refused(
    bundle: Bundle, engine: Path, layers: tuple[str, ...]
):
    (plan,) = json.loads((engine / SIDECAR).read_text("utf-8"))["plans"]
    fused = {"_gemm_mha_v2": 3 - len(layers)}
    plan["profiles"][1] |= {"plan_kernels": fused, "log_kernels": fused, "decomposed": list(layers)}
    resealed(engine, plans=[plan])
    with pytest.raises(InputError, match="does not prove 3 fused attentions"):
        read_engine(bundle, engine)


def test_engine_when_some_attention_is_decomposed_then_its_line_never_calls_all_of_it_fused(bundle: Bundle):
    fused = {"_gemm_mha_v2": 1}
    prefill = dataclasses.replace(
        PREFILL, plan_kernels=fused, log_kernels=fused, decomposed=("blocks.0.attention", "blocks.2.attention")
    )
    record = make_record(bundle)
    record = dataclasses.replace(record, plans=(dataclasses.replace(record.plans[0], profiles=(DECODE, prefill)),))
    assert parse_record(dump_record(record)) == record
    assert record.unfused == {"prefill-256": ("blocks.0.attention", "blocks.2.attention")}
    write_engine(bundle, record)
    (entry,) = list_engines(bundle)
    assert "2 of 3 NOT FUSED (blocks.0.attention … blocks.2.attention)" in entry.summary
    assert "fused attention proven" not in entry.summary


def test_inspect_when_an_engine_is_there_then_shows_plans_costs_and_kernels_without_tensorrt(
    bundle: Bundle, engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("tensorrt", "tensorrt_rtx"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it would fail
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["inspect", str(bundle.path)]) == 0
    out = capsys.readouterr().out
    assert f"engine {engine.name}: " in out  # what --engine takes
    assert "layout shared, fp16, capacity 256" in out
    assert "shared.engine" in out
    assert "3 × _gemv_mha_v1" in out
    assert "a row" in out


def test_derived_graph_when_replaced_then_is_refused(bundle: Bundle, engine: Path):
    (engine / GRAPH / MANIFEST).write_bytes(b"another")
    with pytest.raises(InputError, match=r"graph/manifest\.json has sha256"):
        read_engine(bundle, engine)


def test_split_engine_when_one_plan_is_damaged_then_that_one_is_named(bundle: Bundle):
    record = make_record(bundle)
    plan = record.plans[0]
    plans = tuple(
        dataclasses.replace(plan, name=name, file=f"{name}.engine", graph=name, profiles=profiles)
        for name, profiles in (("decode", (DECODE,)), ("prefill", (PREFILL,)))
    )
    split = dataclasses.replace(record, layout="split", plans=plans)
    folder = write_engine(bundle, split)
    assert folder.name.endswith("-c256-split")
    assert choose_engine(bundle, HERE, "8.9").folder == folder
    assert read_engine(bundle, folder) == split
    (folder / "prefill.engine").write_bytes(DATA[:-1] + b"x")
    with pytest.raises(InputError, match=r"prefill\.engine has sha256"):
        read_engine(bundle, folder)


def test_engine_when_one_only_decodes_then_one_with_both_phases_goes_first(bundle: Bundle):
    record = make_record(bundle)
    plan = dataclasses.replace(record.plans[0], name="decode", file="decode.engine", profiles=(DECODE,))
    smaller = dataclasses.replace(record, layout="decode", capacity=128, plans=(plan,))
    write_engine(bundle, smaller)
    assert choose_engine(bundle, HERE).record == smaller
    write_engine(bundle, record)
    assert choose_engine(bundle, HERE).record == record


def test_folder_when_it_holds_no_engine_then_is_listed_as_unusable(bundle: Bundle):
    (bundle.path / ENGINES / "notes").mkdir(parents=True)
    (entry,) = list_engines(bundle)
    assert entry.flavour == "?"
    assert "missing" in (entry.fault or "")


def test_folder_when_an_unfinished_build_left_it_then_is_not_listed(bundle: Bundle):
    (bundle.path / ENGINES / ".tformer-tmp-abc").mkdir(parents=True)
    assert list_engines(bundle) == []


@pytest.mark.parametrize(("source", "dtype"), [("llama_bundle", " --dtype fp16"), ("llama_fp16_bundle", "")])
def test_next_step_when_there_is_no_engine_then_is_a_command_that_builds_one(
    source: str, dtype: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
):
    opened = open_bundle(request.getfixturevalue(source))
    command = f"`tformer-deploy build-engine {opened.path}{dtype}`"
    assert run(["inspect", str(opened.path)]) == 0
    assert f"engines: none ({command} makes one)" in capsys.readouterr().out
    with pytest.raises(CapabilityError, match="has no engine") as e:
        good_engines(opened)
    assert e.value.hint == f"Run {command}."


def test_table_when_stdout_is_no_terminal_then_no_cell_is_cut(
    bundle: Bundle, engine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert run(["inspect", str(bundle.path)]) == 0
    out = capsys.readouterr().out
    assert "│ shared.engine │ prefill-256 │" in out
    assert "…" not in out


def test_inspect_when_the_derived_graph_is_gone_then_says_that_the_engine_cannot_be_used(bundle: Bundle, engine: Path):
    (engine / "graph/manifest.json").unlink()
    (entry,) = list_engines(bundle)
    assert entry.fault is not None
    assert "graph/manifest.json has sha256 none: it is missing" in entry.fault
