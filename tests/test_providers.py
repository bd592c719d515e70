"""ONNX Runtime's providers: one that is absent or does not start is an error; caches on a device are bound by address."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tformer_deploy import cli
from tformer_deploy.backends import graph, open_session
from tformer_deploy.backends import onnxruntime as backend_module
from tformer_deploy.backends.providers import ProviderCache, placement_note
from tformer_deploy.bundle import open_bundle
from tformer_deploy.errors import CapabilityError, UsageError

ROWS = [[1, 2, 3], [5] * 20, [7], list(range(100))]
CUDA, TENSORRT, CPU = "CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"


class FakeBinding:
    """Says cpu where cuda is said: host memory stands for the device's."""

    def __init__(self, binding: Any, log: list[Any]) -> None:
        self._binding, self._log = binding, log

    def bind_input(self, name, device_type, device_id, element_type, shape, buffer_ptr):
        assert device_type == "cuda"
        self._log.append((name, buffer_ptr))
        self._binding.bind_input(name, "cpu", device_id, element_type, shape, buffer_ptr)

    def bind_output(self, name, device_type="cpu", device_id=0, element_type=None, shape=None, buffer_ptr=None):
        if buffer_ptr is not None:
            assert device_type == "cuda"
            self._log.append((name, buffer_ptr))
            self._binding.bind_output(name, "cpu", device_id, element_type, shape, buffer_ptr)
        else:
            self._binding.bind_output(name)

    def __getattr__(self, name):
        return getattr(self._binding, name)


class FakeSession:
    def __init__(self, path, options, providers, fake: FakeOnnxRuntime) -> None:
        self._session = onnxruntime.InferenceSession(path, options, providers=[CPU])
        self._fake, self.asked = fake, providers
        fake.asked.append(providers)

    def get_providers(self):
        return [CPU] if self._fake.drops else [*self.asked, CPU]

    def io_binding(self):
        return FakeBinding(self._session.io_binding(), self._fake.log)

    def run_with_iobinding(self, binding):
        self._session.run_with_iobinding(binding._binding)

    def get_provider_graph_assignment_info(self):
        nodes = [types.SimpleNamespace(op_type=name) for name in self._fake.on_cpu]
        return [types.SimpleNamespace(ep_name=CPU, get_nodes=lambda: nodes)]


class FakeOnnxRuntime:
    """The package as if it were built for CUDA; it runs on the CPU."""

    def __init__(self) -> None:
        self.available, self.drops, self.on_cpu = [TENSORRT, CUDA, CPU], False, []
        self.log: list[Any] = []
        self.asked: list[Any] = []
        self.OrtValue = types.SimpleNamespace(ortvalue_from_numpy=self._value)

    def _value(self, array, device_type="cpu", device_id=0):
        assert device_type == "cuda"
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.array(array))

    def get_available_providers(self):
        return self.available

    def InferenceSession(self, path, options, providers):  # noqa: N802 - its own name
        return FakeSession(path, options, providers, self)

    def __getattr__(self, name):
        return getattr(onnxruntime, name)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeOnnxRuntime:
    runtime = FakeOnnxRuntime()
    for module in (graph, backend_module):
        monkeypatch.setattr(module, "import_runtime", lambda: runtime)
    return runtime


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
@pytest.mark.parametrize("command", ["run", "bench", "check"])
def test_provider_when_this_build_has_it_not_then_every_command_exits_4_and_runs_nothing(
    command: str, provider: str, llama_bundle: Path, tmp_path: Path, capsys
):
    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("it has")
    (tmp_path / "p.jsonl").write_text('{"input_ids": [1]}\n')
    extra = {"run": [str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "o.jsonl")], "bench": ["--prompt-length", "4"], "check": []}
    assert cli.run([command, str(llama_bundle), *extra[command], "--provider", provider]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert "ExecutionProvider; it has" in err.splitlines()[-1]
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_provider_when_onnxruntime_drops_it_then_is_an_error_and_no_cpu_run(
    fake: FakeOnnxRuntime, llama_bundle: Path, provider: str
):
    fake.drops = True
    with pytest.raises(CapabilityError, match="would have run on CPUExecutionProvider") as caught:
        open_session(open_bundle(llama_bundle), provider=provider)  # type: ignore[arg-type]
    assert caught.value.exit_code == 4
    assert fake.log == []


def test_provider_when_it_runs_then_equals_the_cpu_and_binds_past_and_present_to_one_address(
    fake: FakeOnnxRuntime, llama_bundle: Path
):
    bundle = open_bundle(llama_bundle)
    session = open_session(bundle, provider="cuda")
    assert fake.asked[:2] == [[CUDA], [CUDA]]  # both graphs, before anything ran
    logits = session.prefill(ROWS)
    steps = [session.decode([i, 2, 3, 4]) for i in range(40)]
    session.retire([0, 2])
    session.refill([2], [[9] * 30])
    assert session.compact() == [1, 2, 3]
    last = session.decode([1, 2, 3])
    past = {name: address for name, address in fake.log if name.startswith("past")}
    present = {name: address for name, address in fake.log if name.startswith("present")}
    assert len(past) == 6
    assert [past[n] for n in sorted(past)] == [present[n.replace("past_key_values", "present")] for n in sorted(past)]
    torch_session = open_session(bundle, "torch")
    np.testing.assert_allclose(logits, torch_session.prefill(ROWS), atol=5e-5)
    for i, step in enumerate(steps):
        np.testing.assert_allclose(step, torch_session.decode([i, 2, 3, 4]), atol=5e-5)
    torch_session.retire([0, 2])
    torch_session.refill([2], [[9] * 30])
    torch_session.compact()
    np.testing.assert_allclose(last, torch_session.decode([1, 2, 3]), atol=5e-5)


def test_provider_when_it_is_tensorrt_then_cuda_stands_behind_it(fake: FakeOnnxRuntime, llama_bundle: Path):
    fake.on_cpu = ["Shape", "Gather", "Shape"]
    session = open_session(open_bundle(llama_bundle), provider="tensorrt")
    assert fake.asked[0] == [TENSORRT, CUDA]
    assert f"{TENSORRT} left operations of prefill to the CPU: 1 × Gather, 2 × Shape." in session.backend.notes


def test_cache_when_read_written_and_resized_then_views_touch_their_rows_alone(fake: FakeOnnxRuntime):
    cache = ProviderCache.allocate(fake, 2, (3, 2, 4, 8), np.float16)
    assert not cache.read(0)[0].any()
    view = cache.rows(1, 2)
    view.write(0, np.ones((1, 2, 4, 8), np.float32), np.full((1, 2, 4, 8), 2.0, np.float32))
    key, value = cache.read(0)
    assert (key.dtype, key[:, 0, 0, 0].tolist(), value[:, 0, 0, 0].tolist()) == (np.float32, [0, 1, 0], [0, 2, 0])
    grown = view.resize([0, 0], 6)
    assert (grown.batch, grown.capacity) == (2, 6)
    assert grown.read(0)[0][:, :, 4:].sum() == 0
    assert grown.read(0)[0][:, :, :4].min() == 1


def test_check_when_a_provider_runs_then_compares_what_it_ran(
    fake: FakeOnnxRuntime, llama_bundle: Path, llama_checkpoint: Path, tmp_path: Path
):
    report = tmp_path / "r.json"
    command = ["check", str(llama_bundle), "--checkpoint", str(llama_checkpoint), "--provider", "cuda", "--report", str(report)]
    assert cli.run(command) == 0
    assert f"ONNX Runtime runs on {CUDA}." in json.loads(report.read_text())["notes"]


def test_placement_when_the_real_runtime_is_asked_then_names_its_nodes(llama_bundle: Path):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = onnxruntime.InferenceSession(str(llama_bundle / "decode.onnx"), options, providers=[CPU])
    assert "6 × TensorScatter" in (placement_note(session, "decode", "cuda") or "")
    assert placement_note(session, "decode", "cpu") is None


def test_provider_when_unknown_then_is_a_usage_error(llama_bundle: Path):
    with pytest.raises(UsageError, match="cpu, cuda, tensorrt"):
        open_session(open_bundle(llama_bundle), provider="rocm")  # type: ignore[arg-type]
