"""benchmarks/gpu_check.py: what it says where nothing can run, where parts fail, and where time runs out."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tformer_deploy.backends import cuda

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_check.py"
PARITY = {
    "verdict": "green",
    "checks": [{"group": "g", "metric": "m", "value": 0.0, "verdict": "green"}],
    "dtype": "fp16",
    "notes": ["ran"],
}
POINT = {
    "batch": 1, "prompt_length": 64, "ttft_ms": 1.0, "tpot_ms": 0.5, "itl_p99_ms": 0.6, "prefill_tokens_per_s": 1.0,
    "decode_tokens_per_s": 2.0,
}  # fmt: skip
ANSWERS: dict[str, tuple[int | None, str, str]] = {
    "export": (0, "", ""),
    "build-engine": (0, json.dumps({"flavour": "rtx", "version": "1.7", "dtype": "fp16", "capacity": 256, "build_s": 3.0}), ""),
    "check": (0, json.dumps(PARITY), ""),
    "bench": (0, json.dumps({"points": [POINT], "versions": {}, "notes": []}), ""),
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


class Machine:
    """Answers in place of the commands; records them."""

    def __init__(self, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capability: str = "8.9", flavours: tuple[str, ...] = ("rtx",),
                 providers: tuple[str, ...] = ("CUDAExecutionProvider",)) -> None:  # fmt: skip
        self.calls: list[list[str]] = []
        self.answers = dict(ANSWERS)
        found = {
            "gpu": {"count": 1, "devices": [{"compute_capability": capability}], "reason": None, "driver_cuda": "13.0"},
            "tensorrt": [{"flavour": f, "version": "1", "fault": None} for f in flavours],
            "onnxruntime_providers": list(providers),
        }
        monkeypatch.setattr(script, "examine", lambda: found)
        monkeypatch.setattr(script, "command", self.command)

    def command(self, arguments: list[str], limit: float) -> tuple[int | None, str, str]:
        self.calls.append(arguments)
        return self.answers[arguments[0]]


def run(script: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = script.main(list(arguments))
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]), err


def test_script_when_there_is_no_gpu_then_ends_cleanly_exits_4_and_its_json_says_that_nothing_ran():
    if cuda.probe()[0].gpus:
        pytest.skip("a GPU is here")
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 4
    assert done.stderr.splitlines()[-1].startswith("Nothing ran: no NVIDIA GPU is here (")
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["executed"], line["engine_executed"], line["failed"]) == ([], False, [])
    assert set(line["not_run"].values()) == {"there is no NVIDIA GPU"}
    assert len(line["not_run"]) == 6
    assert all(part["status"] == "not run" and part["figures"] == {} for part in line["parts"])


def test_script_when_everything_runs_then_exits_0_with_figures(script: ModuleType, monkeypatch, capsys):
    machine = Machine(script, monkeypatch)
    code, line, _ = run(script, capsys)
    assert (code, line["not_run"], line["failed"], line["engine_executed"]) == (0, {}, [], True)
    assert [c[0] for c in machine.calls] == ["export", "build-engine", "check", "bench", "check", "bench"]
    assert ["--backend", "tensorrt"] == machine.calls[2][-2:] == machine.calls[3][-2:]
    assert ["--provider", "cuda"] == machine.calls[4][-2:] == machine.calls[5][-2:]
    assert machine.calls[1][machine.calls[1].index("--target") + 1] == "8.9"
    assert line["parts"][3]["figures"]["points"] == [POINT]


def test_script_when_parity_is_red_then_exits_1_and_does_not_call_it_executed_and_passed(script: ModuleType, monkeypatch, capsys):
    machine = Machine(script, monkeypatch)
    red = PARITY | {"verdict": "red", "checks": [{"group": "g", "metric": "m", "value": 9.0, "verdict": "red"}]}
    machine.answers["check"] = (1, json.dumps(red), "")
    code, line, _ = run(script, capsys)
    assert code == 1
    assert line["failed"] == ["parity: tensorrt", "parity: onnxruntime cuda"]
    assert line["parts"][2]["figures"]["red"] == {"g: m": 9.0}


def test_script_when_the_engine_cannot_be_built_then_its_parts_did_not_run(script: ModuleType, monkeypatch, capsys):
    machine = Machine(script, monkeypatch, providers=())
    machine.answers["build-engine"] = (4, "", "progress\nError: cannot → do this")
    code, line, err = run(script, capsys)
    assert (code, line["executed"]) == (1, [])
    assert line["not_run"]["parity: tensorrt"] == "there is no engine for this GPU"
    assert "no CUDAExecutionProvider" in line["not_run"]["speed: onnxruntime cuda"]
    assert line["parts"][1]["why"] == "exit code 4: Error: cannot → do this"
    assert "No engine was executed" in err


@pytest.mark.parametrize(("flavours", "flavour"), [(("rtx",), None), (("rtx", "tensorrt"), "tensorrt")])
def test_script_when_the_gpu_is_a_data_centre_one_then_full_tensorrt_is_needed(
    script: ModuleType, monkeypatch, capsys, flavours: tuple[str, ...], flavour: str | None
):
    machine = Machine(script, monkeypatch, "9.0", flavours)
    code, line, _ = run(script, capsys)
    if flavour is None:
        assert (code, line["engine_executed"]) == (1, False)  # onnxruntime ran; the engine did not
        assert "9.0" in line["not_run"]["build engine"]
    else:
        assert code == 0
        build = next(c for c in machine.calls if c[0] == "build-engine")
        assert build[build.index("--flavour") + 1] == "tensorrt"
        assert "--target" not in build


def test_script_when_the_budget_is_used_up_then_the_rest_did_not_run(script: ModuleType, monkeypatch, capsys):
    Machine(script, monkeypatch)
    code, line, _ = run(script, capsys, "--budget", "0")
    assert (code, line["executed"]) == (4, [])
    assert line["not_run"]["export"] == "the time budget was used up"


def test_part_when_it_passes_its_limit_then_is_stopped_with_its_children(script: ModuleType, monkeypatch):
    monkeypatch.setattr(script.sys, "executable", "/bin/sh")
    monkeypatch.setattr(script, "LIMITS", script.LIMITS | {"export": 1})
    original = subprocess.Popen
    words = ["/bin/sh", "-c", "sleep 60 & sleep 60"]
    monkeypatch.setattr(script.subprocess, "Popen", lambda command, **options: original(words, **options))
    parts = script.Parts(30)
    assert not parts.run("export", [])
    assert parts.outcomes[0].why == "it was stopped after 1 s"


def test_part_when_its_output_cannot_be_read_then_failed(script: ModuleType, monkeypatch, capsys):
    machine = Machine(script, monkeypatch)
    machine.answers["bench"] = (0, "{}", "")
    code, line, _ = run(script, capsys)
    assert code == 1
    assert "cannot be read" in line["parts"][3]["why"]
