"""Opening an engine: what is refused, in which order, with which exit code, and that no runtime sees a byte before."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_gpu import EngineValidity, FakeMachine, write_engine

from tformer_deploy import cli
from tformer_deploy.backends import cuda
from tformer_deploy.backends.tensorrt import open_tensorrt, package
from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.bundle.engine_choice import choose_engine
from tformer_deploy.bundle.engines import ENGINES, GRAPH, SIDECAR, DerivedGraph, EngineProfile, dump_record, parse_record
from tformer_deploy.bundle.manifest import MANIFEST
from tformer_deploy.errors import CapabilityError, InputError, TformerError, UsageError

PLAN = "shared.engine"


@pytest.fixture
def bundle(tmp_path: Path, llama_bundle: Path) -> Bundle:
    return open_bundle(shutil.copytree(llama_bundle, tmp_path / "b"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine(monkeypatch)


def refused(bundle: Bundle, machine: FakeMachine, name: str | None = None) -> TformerError:
    with pytest.raises(TformerError) as caught:
        open_tensorrt(bundle, name)
    assert machine.settings.seen == [], "a runtime saw the plan"
    return caught.value


def test_engine_when_everything_fits_then_the_runtime_gets_the_bytes_that_were_hashed(bundle: Bundle, machine: FakeMachine):
    folder = write_engine(bundle)
    backend = open_tensorrt(bundle)
    data = (folder / PLAN).read_bytes()
    assert machine.settings.seen == [data, data]  # its head is judged, then it is loaded
    assert "Imaginary RTX 1" in backend.notes[0]
    assert folder.name in backend.notes[0]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"version": "1.8.0.1"}, "is for rtx 1.8.0.1; 1.7.1.116 is installed"),
        ({"capabilities": ("8.0", "12.0")}, "runs on compute capability 8.0, 12.0; this GPU has 8.9"),
    ],
)
def test_engine_when_for_another_version_or_gpu_then_exits_4_with_the_command(
    bundle: Bundle, machine: FakeMachine, engine: dict, words: str
):
    write_engine(bundle, **engine)
    error = refused(bundle, machine)
    assert error.exit_code == 4
    assert words in error.message
    assert error.hint == f"Run `tformer-deploy build-engine {bundle.path} --dtype fp16 --force`."


def test_engine_when_of_the_other_flavour_then_its_package_is_asked_for(bundle: Bundle, machine: FakeMachine):
    write_engine(bundle, flavour="tensorrt")
    error = refused(bundle, machine)
    assert error.exit_code == 4
    assert "needs the Python package tensorrt " in error.message
    assert "tformer-deploy[tensorrt]" in (error.hint or "")


def test_engine_when_none_was_built_then_exits_4_with_the_command(bundle: Bundle, machine: FakeMachine):
    error = refused(bundle, machine)
    assert (error.exit_code, error.hint) == (4, f"Run `tformer-deploy build-engine {bundle.path} --dtype fp16`.")


def _truncate(folder: Path) -> None:
    (folder / PLAN).write_bytes((folder / PLAN).read_bytes()[:-1])


def _flip(folder: Path) -> None:
    data = (folder / PLAN).read_bytes()
    (folder / PLAN).write_bytes(bytes([data[0] ^ 1]) + data[1:])


def _other_core(folder: Path) -> None:
    record = parse_record((folder / SIDECAR).read_bytes())
    (folder / SIDECAR).write_bytes(dump_record(dataclasses.replace(record, core_sha256="c" * 64)))


def _unsealed(folder: Path) -> None:
    data = (folder / SIDECAR).read_bytes()
    (folder / SIDECAR).write_bytes(data.replace(b'"max_batch": 8', b'"max_batch": 9'))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_truncate, "bytes; engine.json says"),
        (_flip, "sha256"),
        (_other_core, "compiled from the core cccc"),
        (_unsealed, "not as it was sealed"),
    ],
)
def test_engine_when_damaged_or_of_another_graph_then_exits_3_before_the_runtime(
    bundle: Bundle, machine: FakeMachine, damage, words: str
):
    folder = write_engine(bundle)
    damage(folder)
    error = refused(bundle, machine)
    assert error.exit_code == 3
    assert words in error.message
    assert "build-engine" in (error.hint or "")


@pytest.mark.parametrize("left", [b"another", None])
def test_engine_when_its_derived_graph_is_replaced_or_gone_then_exits_3_before_the_runtime(
    bundle: Bundle, machine: FakeMachine, left: bytes | None
):
    folder = write_engine(bundle)
    manifest = b"a manifest"
    graph = DerivedGraph(hashlib.sha256(manifest).hexdigest(), 1, {}, ())
    record = dataclasses.replace(parse_record((folder / SIDECAR).read_bytes()), graph=graph)
    (folder / SIDECAR).write_bytes(dump_record(record))
    (folder / GRAPH).mkdir()
    (folder / GRAPH / MANIFEST).write_bytes(manifest)
    assert open_tensorrt(bundle).notes
    machine.settings.seen.clear()
    (folder / GRAPH / MANIFEST).unlink()
    if left is not None:
        (folder / GRAPH / MANIFEST).write_bytes(left)
    error = refused(bundle, machine)
    assert error.exit_code == 3
    assert "graph/manifest.json has sha256" in error.message


def test_engine_when_its_record_says_other_profiles_than_the_plan_then_is_refused(bundle: Bundle, machine: FakeMachine):
    folder = write_engine(bundle)
    record = parse_record((folder / SIDECAR).read_bytes())
    profiles = record.profiles

    def rewritten(*changed: EngineProfile) -> None:
        plan = dataclasses.replace(record.plans[0], profiles=changed)
        (folder / SIDECAR).write_bytes(dump_record(dataclasses.replace(record, plans=(plan,))))

    rewritten(*profiles[:2], dataclasses.replace(profiles[2], sequence=(65, 128, 128)))
    with pytest.raises(InputError, match=r"prefill-256 takes \[1, 65\] to \[8, 256\].*\[8, 128\]"):
        open_tensorrt(bundle)
    rewritten(*profiles[:2], dataclasses.replace(profiles[2], logits=(1, 1, 4)))
    with pytest.raises(InputError, match=r"4 logits.*there are \[1, 1\]"):
        open_tensorrt(bundle)
    rewritten(*profiles[:2])
    with pytest.raises(InputError, match="has 3 profiles; its record names 2"):
        open_tensorrt(bundle)
    assert "cuDevicePrimaryCtxRelease_v2" in machine.library.names()


@pytest.mark.parametrize("change", [{"capacity": 128}, {"dtype": "fp16"}])
def test_engine_when_its_caches_are_not_the_records_then_is_refused(bundle: Bundle, machine: FakeMachine, change: dict):
    folder = write_engine(bundle)
    record = dataclasses.replace(parse_record((folder / SIDECAR).read_bytes()), **change)
    (folder / SIDECAR).write_bytes(dump_record(record))
    folder.rename(folder.with_name(record.name))
    with pytest.raises(InputError, match=r"past_key_values\.0\.key is .* expected"):
        open_tensorrt(bundle)


def test_engine_when_a_cache_is_not_shared_then_is_refused(bundle: Bundle, machine: FakeMachine):
    write_engine(bundle)
    machine.settings.alias_of = lambda name: None
    with pytest.raises(InputError, match=r"present\.0\.key has a buffer of its own"):
        open_tensorrt(bundle)


def test_engine_when_the_runtime_cannot_be_asked_for_aliases_then_a_note_says_so(
    bundle: Bundle, machine: FakeMachine, monkeypatch
):
    import fake_gpu

    monkeypatch.delattr(fake_gpu.FakeEngine, "get_aliased_input_tensor")
    write_engine(bundle)
    assert any("paired by their names" in note for note in open_tensorrt(bundle).notes)


def test_engines_when_several_fit_then_the_most_special_and_longest_is_taken_and_others_are_named(
    bundle: Bundle, machine: FakeMachine
):
    short = write_engine(bundle, capacity=128, buckets=(128,))
    long = write_engine(bundle, capacity=256)
    special = write_engine(bundle, target="sm89", capabilities=("8.9",), capacity=64, buckets=(64,))
    write_engine(bundle, target="sm120", capabilities=("12.0",))
    backend = open_tensorrt(bundle)
    assert special.name in backend.notes[0]
    assert f"{long.name}, {short.name} would run here too; --engine chooses" in backend.notes[1]
    assert open_tensorrt(bundle, short.name).max_length == 128
    versions = {"rtx": "1.7.1.116"}
    assert choose_engine(bundle, versions, "8.0").folder == long
    assert choose_engine(bundle, versions, "12.0").others == ()


def test_engine_when_named_wrongly_then_exits_2_and_when_it_does_not_fit_4(bundle: Bundle, machine: FakeMachine):
    write_engine(bundle)
    other = write_engine(bundle, target="sm120", capabilities=("12.0",))
    error = refused(bundle, machine, "nothing")
    assert isinstance(error, UsageError)
    assert other.name in error.message
    assert refused(bundle, machine, other.name).exit_code == 4


def test_engines_when_one_is_damaged_then_another_runs(bundle: Bundle, machine: FakeMachine):
    _truncate(write_engine(bundle))
    good = write_engine(bundle, capacity=128, buckets=(128,))
    assert good.name in open_tensorrt(bundle).notes[0]


def test_engine_when_a_build_was_killed_then_its_leftover_is_no_engine(bundle: Bundle, machine: FakeMachine):
    folder = write_engine(bundle)
    folder.rename(folder.with_name(f".tformer-tmp-{folder.name}"))
    assert refused(bundle, machine).exit_code == 4
    half = bundle.path / ENGINES / "rtx-1.7.1.116-portable-fp32-c256"
    half.mkdir()
    (half / PLAN).write_bytes(b"half")
    assert refused(bundle, machine).exit_code == 3


@pytest.mark.parametrize(
    ("set_up", "words"),
    [
        (lambda m: setattr(m.library, "gpus", 0), "the NVIDIA driver lists no GPU"),
        (lambda m: m.library.fail.update(cuInit=100), "cuInit failed: CUDA_ERROR_NO_DEVICE, no CUDA-capable device is detected"),
        (lambda m: m.library.fail.update(cuInit=803), "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        (
            lambda m: m.library.fail.update(cuDevicePrimaryCtxRetain=46),
            "CUDA_ERROR_DEVICE_UNAVAILABLE, CUDA-capable device(s) is/are busy",
        ),
    ],
)
def test_gpu_when_missing_busy_or_its_driver_unfit_then_exits_4_with_the_probes_words(
    bundle: Bundle, machine: FakeMachine, set_up, words: str
):
    write_engine(bundle)
    set_up(machine)
    error = refused(bundle, machine)
    assert error.exit_code == 4
    assert words in error.message


def test_gpu_when_hidden_by_the_environment_then_the_variable_is_named(bundle: Bundle, machine: FakeMachine, monkeypatch):
    write_engine(bundle)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine.library.fail["cuInit"] = 100
    assert "CUDA_VISIBLE_DEVICES is ''" in refused(bundle, machine).message


def test_driver_when_not_there_then_its_name_is(bundle: Bundle, machine: FakeMachine, monkeypatch):
    def absent():
        raise OSError

    write_engine(bundle)
    monkeypatch.setattr(cuda, "load_driver", absent)
    assert "libcuda.so.1 is not there" in refused(bundle, machine).message


def test_driver_when_too_old_for_the_engine_then_the_runtimes_reason_is_given(bundle: Bundle, machine: FakeMachine):
    write_engine(bundle)
    machine.settings.validity = (EngineValidity.INVALID, 4 | 1)
    with pytest.raises(CapabilityError, match="VERSION_MISMATCH, OLD_CUDA_DRIVER") as caught:
        open_tensorrt(bundle)
    assert "driver" in (caught.value.hint or "")


def test_package_when_absent_then_exits_4_and_says_what_to_install(bundle: Bundle, machine: FakeMachine, monkeypatch):
    write_engine(bundle)
    monkeypatch.setattr(package, "installed_flavours", list)
    error = refused(bundle, machine)
    assert (error.exit_code, error.hint) == (4, "Run pip install 'tformer-deploy[tensorrt-rtx]'.")


def test_package_when_it_does_not_load_then_exits_4_with_its_words(bundle: Bundle, machine: FakeMachine, monkeypatch):
    write_engine(bundle)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    error = refused(bundle, machine)
    assert error.exit_code == 4
    assert "does not load" in error.message


def test_installed_package_when_a_gpu_is_pretended_then_its_own_refusal_comes_through(bundle: Bundle, monkeypatch):
    """The real TensorRT-RTX judges a plan that is none: the calls to it are right as far as a machine without a GPU can tell."""
    trt = pytest.importorskip("tensorrt_rtx")
    machine = FakeMachine(monkeypatch, version=str(trt.__version__))
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", trt)
    write_engine(bundle, version=str(trt.__version__))
    with pytest.raises(CapabilityError, match="MALFORMED_ENGINE") as caught:
        open_tensorrt(bundle)
    assert caught.value.exit_code == 4
    assert machine.settings.seen == []


@pytest.mark.parametrize("flags", [["bench", "--prompt-length", "8"], ["check"], ["run", "p.jsonl", "-o", "o.jsonl"]])
def test_command_when_there_is_no_gpu_then_exits_4_with_one_sentence_and_nothing_on_stdout(
    flags: list[str], tmp_path: Path, bundle: Bundle, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"input_ids": [1]}\n')
    trt = pytest.importorskip("tensorrt_rtx")
    write_engine(bundle, version=str(trt.__version__))
    if cuda.probe()[0].gpus:
        pytest.skip("a GPU is here")
    assert (
        cli.run(
            [
                flags[0],
                str(bundle.path),
                *flags[1:],
                "--backend",
                "tensorrt",
                *(["--report", "r.json"] if flags[0] == "check" else []),
            ]
        )
        == 4
    )
    out, err = capsys.readouterr()
    assert out == ""
    assert "The tensorrt backend needs an NVIDIA GPU: no NVIDIA driver (libcuda.so.1 is not there)." in err.splitlines()[-1]
    assert not (tmp_path / "r.json").exists()
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize(
    "flags",
    [["--engine", "x"], ["--backend", "tensorrt", "--provider", "cuda"], ["--provider", "cuda", "--profile", "cpu"]],
)
@pytest.mark.parametrize("command", ["run", "bench", "check"])
def test_command_when_flags_contradict_each_other_then_exits_2(command: str, flags: list[str], tmp_path: Path, bundle: Bundle):
    (tmp_path / "p.jsonl").write_text("")
    extra = [str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "o")] if command == "run" else []
    assert cli.run([command, str(bundle.path), *extra, *flags]) == 2


def test_run_and_bench_when_an_engine_runs_then_rows_longer_than_its_capacity_are_error_rows(
    tmp_path: Path, bundle: Bundle, machine: FakeMachine, capsys
):
    write_engine(bundle, capacity=64, buckets=(64,))
    rows = [{"input_ids": [1, 2, 3], "max_new_tokens": 4}, {"input_ids": [5] * 65}, {"input_ids": [7] * 63, "max_new_tokens": 9}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    command = ["run", str(bundle.path), str(tmp_path / "p.jsonl"), "-o"]
    assert cli.run([*command, str(tmp_path / "gpu.jsonl"), "--backend", "tensorrt"]) == 1
    assert "Note: The engine rtx-1.7.1.116" in capsys.readouterr().err
    assert cli.run([*command, str(tmp_path / "cpu.jsonl")]) == 0
    gpu, cpu = ([json.loads(line) for line in (tmp_path / f"{n}.jsonl").read_text().splitlines()] for n in ("gpu", "cpu"))
    assert gpu[0]["output_ids"] == cpu[0]["output_ids"]
    assert gpu[1]["error"]["code"] == "prompt_too_long"
    assert (gpu[2]["output_ids"], gpu[2]["finish_reason"]) == (cpu[2]["output_ids"][:1], "length")
    assert (
        cli.run(
            [
                "bench",
                str(bundle.path),
                "--backend",
                "tensorrt",
                "--prompt-length",
                "8",
                "--new-tokens",
                "2",
                "--repeats",
                "1",
                "--json",
            ]
        )
        == 0
    )
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["backend"], figures["limits"]) == ("tensorrt", None)
    assert cli.run(["bench", str(bundle.path), "--backend", "tensorrt", "--prompt-length", "63", "--new-tokens", "2"]) == 2


@pytest.mark.parametrize("suite", ["quick", "full"])
def test_check_when_an_engine_runs_then_is_green_and_says_what_was_executed(
    bundle: Bundle, llama_checkpoint: Path, machine: FakeMachine, tmp_path: Path, suite: str
):
    write_engine(bundle, buckets=(32, 256))
    report = tmp_path / "r.json"
    code = cli.run(
        [
            "check",
            str(bundle.path),
            "--checkpoint",
            str(llama_checkpoint),
            "--backend",
            "tensorrt",
            "--suite",
            suite,
            "--report",
            str(report),
        ]
    )
    found = json.loads(report.read_text())
    assert (code, found["verdict"]) == (0, "green")
    assert any("portable graphs were not executed" in note for note in found["notes"])
    assert any("runs on Imaginary RTX 1" in note for note in found["notes"])
    assert not any(check["group"] == "two optimisation levels" for check in found["checks"])


def test_check_when_an_engine_writes_the_wrong_row_then_is_red(
    bundle: Bundle, llama_checkpoint: Path, machine: FakeMachine, monkeypatch
):
    import fake_gpu

    write_engine(bundle)
    original = fake_gpu.FakeEngine._compute

    def shifted(self, shapes, addresses):
        past = self._array("past_lengths", shapes["past_lengths"], addresses["past_lengths"])
        if shapes["input_ids"][1] == 1:
            past += 1  # one slot too far
        original(self, shapes, addresses)

    monkeypatch.setattr(fake_gpu.FakeEngine, "_compute", shifted)
    assert cli.run(["check", str(bundle.path), "--checkpoint", str(llama_checkpoint), "--backend", "tensorrt"]) == 1


def test_check_when_it_should_look_into_an_engine_then_exits_2(bundle: Bundle, machine: FakeMachine):
    assert cli.run(["check", str(bundle.path), "--bisect", "--backend", "tensorrt"]) == 2


def test_run_and_generate_when_torch_tensorrt_and_onnx_are_absent_then_work_and_tensorrt_exits_4(
    llama_bundle: Path, tmp_path: Path
):
    """Modules that cannot be imported, in a process of its own; nothing of CUDA is loaded either."""
    (tmp_path / "p.jsonl").write_text('{"input_ids": [1, 2], "max_new_tokens": 3}\n')
    code = (
        "import sys, ctypes\n"
        "for m in ('torch', 'onnx', 'tensorrt', 'tensorrt_rtx', 'cuda'): sys.modules[m] = None\n"
        "real = ctypes.CDLL\n"
        "def watched(name, *a, **k):\n"
        "    assert 'cuda' not in str(name), name\n"
        "    return real(name, *a, **k)\n"
        "ctypes.CDLL = watched\n"
        "import tformer_deploy\n"
        "from tformer_deploy import cli\n"
        f"b, d = {str(llama_bundle)!r}, {str(tmp_path)!r}\n"
        "assert cli.run(['run', b, d + '/p.jsonl', '-o', d + '/o.jsonl', '--profile', 'portable']) == 0\n"
        "assert cli.run(['run', b, d + '/p.jsonl', '-o', d + '/x.jsonl', '--backend', 'tensorrt']) == 4\n"
        "assert cli.run(['check', b]) == 4\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(json.loads((tmp_path / "o.jsonl").read_text())["output_ids"]) == 3
