"""build-engine from end to end on tiny models: what it writes, what it leaves alone, and what it leaves behind when stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tformer_deploy
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.engine_choice import choose_engine
from tformer_deploy.bundle.engines import ENGINES, GRAPH, SIDECAR, list_engines, read_engine
from tformer_deploy.cli import run
from tformer_deploy.config import ModelConfig, RopeConfig
from tformer_deploy.errors import InputError, UsageError
from tformer_deploy.reference import Decoder

trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")

from tformer_deploy.exporters.tensorrt import build, derive  # noqa: E402
from tformer_deploy.exporters.tensorrt.preflight import Layout  # noqa: E402


@pytest.fixture
def fp16(tmp_path: Path, llama_fp16_bundle: Path) -> Path:
    return shutil.copytree(llama_fp16_bundle, tmp_path / "fp16.bundle")


@pytest.fixture
def fp32(tmp_path: Path, llama_bundle: Path) -> Path:
    return shutil.copytree(llama_bundle, tmp_path / "fp32.bundle")


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_engine_when_built_then_is_proven_sealed_and_beside_an_untouched_core(fp16: Path):
    core, said = files(fp16), []
    built = tformer_deploy.build_engine(
        fp16, capacity=128, prompt_buckets=(16, 64), max_batch=4, on_progress=lambda phase, done: said.append(done)
    )
    bundle = open_bundle(fp16, verify="full")
    assert {name: data for name, data in files(fp16).items() if not name.startswith(ENGINES)} == core
    assert built.path == fp16 / ENGINES / f"rtx-{trt.__version__}-portable-fp16-c128"
    assert sorted(p.name for p in built.path.iterdir()) == [SIDECAR, "shared.engine"]
    kernels = [(p.name, p.sequence, p.plan_kernels, p.log_kernels) for p in built.record.profiles]
    assert kernels == [
        ("decode", (1, 1, 1), {"_gemv_mha_v1": 3}, {"_gemv_mha_v1": 3}),
        ("prefill-16", (2, 16, 16), {"_gemm_mha_v2": 3}, {"_gemm_mha_v2": 3}),
        ("prefill-64", (17, 64, 64), {"_gemm_mha_v2": 3}, {"_gemm_mha_v2": 3}),
    ]
    assert built.record.core_sha256 == bundle.core_sha256
    choice = choose_engine(bundle, {"rtx": trt.__version__}, "8.9")
    assert (choice.folder, choice.record) == (built.path, built.record)
    assert read_engine(bundle, built.path) == built.record
    assert said == sorted(said)
    assert said[-1] == 1.0
    assert 50 < built.peak_mib < 4000


@pytest.mark.parametrize("layout", ["shared", "split"])
def test_engine_when_built_twice_then_has_the_same_bytes(
    fp16: Path, tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
):
    """Elsewhere, and with variables of another length."""
    code = "import sys; from tformer_deploy.exporters.tensorrt import worker; sys.exit(not worker.fix_addresses())"
    if subprocess.run([sys.executable, "-c", code], check=False).returncode:
        pytest.skip("this system does not let a process fix its addresses")
    other = shutil.copytree(fp16, tmp_path / "other")
    first = build(fp16, capacity=128, layout=layout).path
    monkeypatch.setenv("TRT_NOTHING", "x" * 4001)
    second = build(other, capacity=128, layout=layout).path
    assert files(first) == files(second)


def test_engine_when_it_exists_then_needs_force_and_stays_until_the_new_one_is_ready(fp16: Path):
    folder = build(fp16, capacity=128).path
    before = files(folder)
    with pytest.raises(UsageError, match="exists") as e:
        build(fp16, capacity=128)
    assert e.value.hint == "Give --force to replace it, or give another --dtype, --capacity, --layout or --target."

    def stop(phase: str, done: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(fp16, capacity=128, max_batch=2, force=True, on_progress=stop)
    assert files(fp16 / ENGINES) == {f"{folder.name}/{name}": data for name, data in before.items()}
    assert build(fp16, capacity=128, max_batch=2, force=True).record.max_batch == 2
    assert os.listdir(fp16 / ENGINES) == [folder.name]


def test_engine_when_stopped_by_ctrl_c_then_leaves_nothing_and_no_process(fp16: Path):
    def stop(phase: str, done: float) -> None:
        if done > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(fp16, on_progress=stop)
    assert os.listdir(fp16 / ENGINES) == []
    assert workers_of(os.getpid()) == []


def workers_of(parent: int) -> list[int]:
    """Live builders that a process started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text("ascii").split()
    return [int(c) for c in children if b"tensorrt.worker" in Path(f"/proc/{c}/cmdline").read_bytes()]


def test_unfinished_folder_when_a_dead_process_left_it_then_the_next_build_removes_it(fp16: Path):
    code = (
        "import os, sys; from tformer_deploy.exporters.tensorrt import build;"
        "build(sys.argv[1], on_progress=lambda phase, done: os.kill(os.getpid(), 9))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(fp16)], check=False).returncode == -signal.SIGKILL
    (left,) = os.listdir(fp16 / ENGINES)
    assert left.startswith(".")
    bundle = open_bundle(fp16)
    assert list_engines(bundle) == []
    folder = build(fp16).path
    assert os.listdir(fp16 / ENGINES) == [folder.name]


def test_bundle_of_fp32_when_no_dtype_is_given_then_is_refused_and_nothing_is_written(
    fp32: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(["build-engine", str(fp32)]) == 3
    assert "Give --dtype fp16, or --layout decode" in capsys.readouterr().err
    assert not (fp32 / ENGINES).exists()


def test_bundle_of_fp16_when_another_dtype_is_asked_for_then_is_refused(fp16: Path):
    with pytest.raises(InputError, match="bundle in fp16"):
        build(fp16, dtype="bf16")


def test_bundle_of_fp32_when_fp16_is_asked_for_then_the_fp16_graph_is_kept_checked_and_recorded(fp32: Path):
    built = build(fp32, dtype="fp16", capacity=128)
    graph = built.record.graph
    assert graph is not None
    derived = open_bundle(built.path / GRAPH, verify="full")
    assert (derived.manifest.dtype, derived.core_sha256) == ("fp16", graph.core_sha256)
    assert derived.manifest.source == open_bundle(fp32).manifest.source
    assert graph.checks > 10
    value, gate = graph.figures["prefill, ragged batch: max abs"]
    assert 0 < value <= gate
    assert read_engine(open_bundle(fp32), built.path) == built.record
    assert derived.manifest.dtype == built.record.dtype == "fp16"


def test_fp16_graph_when_one_weight_has_the_wrong_sign_then_is_red_and_nothing_is_left(
    fp32: Path, monkeypatch: pytest.MonkeyPatch
):
    read = derive.BundleSource.read

    def wrong(self: derive.BundleSource, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = read(self, name, dtype)
        return -tensor if name == "blocks.1.attention.value.weight" else tensor

    monkeypatch.setattr(derive.BundleSource, "read", wrong)
    with pytest.raises(InputError, match="differs too much from the bundle") as e:
        build(fp32, dtype="fp16")
    assert "prefill, ragged batch, max abs" in e.value.message
    assert os.listdir(fp32 / ENGINES) == []


def test_command_when_asked_for_json_then_prints_one_object_and_progress_on_stderr(
    fp16: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(["build-engine", str(fp16), "--capacity", "64", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["path"].endswith("-portable-fp16-c64")
    assert found["attentions"] == 3
    assert found["build_s"] > 0
    assert "100%" in err
    assert run(["build-engine", str(fp16), "--capacity", "64"]) == 2
    assert "--force" in capsys.readouterr().err


def test_command_when_done_then_the_table_shows_each_profile_and_claims_no_execution(
    fp16: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(["build-engine", str(fp16), "--capacity", "64", "--target", "8.9"]) == 0
    out = capsys.readouterr().out
    assert "_gemv_mha_v1" in out
    assert "prefill-64" in out
    assert "not executed" in out
    assert "-sm89-" in out
    assert run(["inspect", str(fp16)]) == 0
    assert "3 × _gemv_mha_v1" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--flavour", "tensorrt"], 4),
        (["--target", "9.0"], 4),
        (["--capacity", "4096"], 2),
        (["--prompt-bucket", "300"], 2),
        (["--max-batch", "0"], 2),
        (["--layout", "both"], 2),
        (["--layout", "decode", "--prompt-bucket", "16"], 2),
        (["--dtype", "int8"], 2),
    ],
)
def test_command_when_it_cannot_be_done_then_the_exit_code_says_why(fp16: Path, arguments: list[str], code: int):
    if "tensorrt" in arguments:
        pytest.importorskip("tensorrt_rtx")
        try:
            import tensorrt  # noqa: F401

            pytest.skip("full TensorRT is installed")
        except ImportError:
            pass
    assert run(["build-engine", str(fp16), *arguments]) == code
    assert not (fp16 / ENGINES).exists()


def test_bundle_when_damaged_then_is_refused_before_the_builder_starts(fp16: Path):
    data = bytearray((fp16 / "weights.bin").read_bytes())
    data[5000] ^= 1
    (fp16 / "weights.bin").write_bytes(data)
    assert run(["build-engine", str(fp16)]) == 3


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Path:
    return tformer_deploy.export(smollm2_gguf, tmp_path_factory.mktemp("smollm2") / "bundle", dtype="fp16", check=False)


@pytest.mark.slow
def test_smollm2_when_built_in_fp16_then_30_attentions_are_fused_in_each_profile(smollm2: Path):
    built = build(smollm2, capacity=2048, prompt_buckets=(256, 1024))
    assert [sum(p.plan_kernels.values()) for p in built.record.profiles] == [30, 30, 30]
    assert [sum(p.log_kernels.values()) for p in built.record.profiles] == [30, 30, 30]
    assert built.record.size < 320 * 2**20
    assert built.peak_mib < 2500


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_command_when_stopped_in_the_middle_then_ends_within_seconds_and_leaves_no_builder(smollm2: Path, number: int, code: int):
    command = [sys.executable, "-m", "tformer_deploy.cli", "build-engine", str(smollm2), "--capacity", "512"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "70%" in line or "80%" in line:
            break
    (worker,) = workers_of(process.pid)
    process.send_signal(number)
    assert process.wait(timeout=5) == code
    process.stderr.close()
    assert until(
        lambda: not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text("ascii").split()[2]
    )
    left = os.listdir(smollm2 / ENGINES)
    assert not [name for name in left if "-c512" in name and not name.startswith(".")]
    assert number == signal.SIGKILL or not [name for name in left if name.startswith(".")]


def until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_llama_of_half_a_billion_parameters_when_built_then_is_proven_within_5_gb(tmp_path: Path):
    config = ModelConfig(
        vocab_size=151936,
        d_model=896,
        n_layers=24,
        n_heads=14,
        n_kv_heads=2,
        head_dim=64,
        d_ff=4864,
        max_length=32768,
        qkv_bias=True,
        rope=RopeConfig(),
    )
    with torch.no_grad():
        Decoder(config).half().save_pretrained(tmp_path / "checkpoint")
    bundle = tformer_deploy.export(tmp_path / "checkpoint", tmp_path / "bundle", dtype="fp16", check=False)
    built = build(bundle, prompt_buckets=(512,))
    assert [(p.plan_kernels, p.log_kernels) for p in built.record.profiles] == [
        ({"_gemv_mha_v1": 24}, {"_gemv_mha_v1": 24}),
        ({"_gemm_mha_v2": 24}, {"_gemm_mha_v2": 24}),
    ]
    assert built.record.size < 1.1e9  # both profiles share 0.99 GB of weights
    assert built.peak_mib < 5000


def without(folder: Path, *modules: str) -> dict[str, str]:
    """The environment of a process in which, as in its children, some packages are not installed."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({modules!r})\n")
    return os.environ | {"PYTHONPATH": str(folder)}


# What the extra tensorrt-rtx does not bring.
EXPORT = ("torch", "onnx_ir", "onnxscript", "onnxruntime", "safetensors")


def test_engine_when_only_the_extra_of_its_flavour_is_installed_then_is_built_in_the_bundles_dtype(fp16: Path, tmp_path: Path):
    command = [sys.executable, "-m", "tformer_deploy.cli", "build-engine", str(fp16), "--capacity", "64", "--max-batch", "2"]
    done = subprocess.run(command, env=without(tmp_path / "few", *EXPORT), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list_engines(open_bundle(fp16))) == 1


def test_engine_when_it_would_be_derived_and_nothing_can_derive_then_is_refused_before_a_word(fp32: Path, tmp_path: Path):
    command = [sys.executable, "-m", "tformer_deploy.cli", "build-engine", str(fp32), "--dtype", "fp16"]
    done = subprocess.run(command, env=without(tmp_path / "few", *EXPORT), capture_output=True, text=True, check=False)
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert "deriving an engine in fp16 from it needs the Python package torch" in line
    assert "'tformer-deploy[export]', or export the checkpoint with --dtype fp16" in line


def test_doctor_when_asked_then_an_engine_in_the_bundles_dtype_needs_the_extra_of_its_flavour_alone(tmp_path: Path):
    command = [sys.executable, "-m", "tformer_deploy.cli", "doctor", "--json"]
    done = subprocess.run(command, env=without(tmp_path / "few", *EXPORT), capture_output=True, text=True, check=True)
    commands = json.loads(done.stdout)["commands"]
    assert commands["build-engine --flavour rtx"]["lacks"] == []
    derived = commands["build-engine in another dtype than the bundle's, too"]
    assert (set(derived["lacks"]), derived["extra"]) == (set(EXPORT) - {"safetensors"}, "export")


def test_build_when_the_plan_cannot_be_written_then_ends_with_5_and_leaves_nothing(llama_fp16_bundle: Path, tmp_path: Path):
    path = shutil.copytree(llama_fp16_bundle, tmp_path / "b")
    build = f"exec {sys.executable} -m tformer_deploy.cli build-engine {path} --capacity 64 --target 8.9"
    done = subprocess.run(["bash", "-c", f"ulimit -f 1000; {build}"], check=False, capture_output=True, text=True)
    assert done.returncode == 5, done.stderr
    assert "The plan cannot be written: File too large. → Make room" in done.stderr.splitlines()[-1]
    assert [p.name for p in (path / "engines").iterdir()] == []
