"""bench: bytes and operations against counts by hand, figures from known times, the order of runs, the command."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import GPT2_LIKE, LLAMA_LIKE

from tformer_deploy import api, cli
from tformer_deploy.bench import limits, memory, sweep, work
from tformer_deploy.bench.limits import LimitProbe, Limits
from tformer_deploy.bench.measure import Point, Run, figures, measure
from tformer_deploy.bundle import open_bundle
from tformer_deploy.errors import CapabilityError, StorageError, UsageError
from tformer_deploy.parameters import parameter_shapes

LINUX = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is read from Linux's /proc")


class CountingSession:
    """A session that answers at once and writes down what it was asked."""

    class Backend:
        name, dtype, notes, config = "onnxruntime", "fp32", (), LLAMA_LIKE

    def __init__(self) -> None:
        self.backend, self.calls = self.Backend(), []

    def prefill(self, rows: list[list[int]], capacity: int | None = None) -> np.ndarray:
        self.calls.append(("prefill", len(rows), len(rows[0]), capacity))
        return np.eye(131, dtype=np.float32)[: len(rows)]

    def decode(self, tokens: list[int]) -> np.ndarray:
        self.calls.append(("decode", tuple(tokens)))
        return np.eye(131, dtype=np.float32)[5 : 5 + len(tokens)]


class FixedProbe:
    """Limits of one byte and one operation a nanosecond, written into a session's calls."""

    missing = None
    session: CountingSession

    def __init__(self, threads: int | None) -> None:
        self.session.calls.append(("probe made", threads))

    def sample(self) -> Limits:
        self.session.calls.append(("limits",))
        return Limits(1.0, 1.0)


# Work


def test_weight_bytes_when_the_head_is_the_embedding_then_counts_every_weight_once_and_no_positions(
    llama_bundle: Path, gpt2_bundle: Path
):
    for path in (llama_bundle, gpt2_bundle):
        manifest = open_bundle(path).manifest
        shapes = parameter_shapes(manifest.config)
        expected = sum(4 * int(np.prod(shape)) for name, shape in shapes.items() if name != "positions.weight")
        frequencies = 4 * manifest.config.head_dim // 2 if manifest.config.rope else 0
        assert work.weight_bytes(manifest, "fp32") == expected + frequencies
        assert manifest.config.tied


def test_weight_bytes_when_a_head_is_stored_then_the_embedding_is_not_read(llama_bundle: Path):
    manifest = open_bundle(llama_bundle).manifest
    tensors = dict(manifest.tensors)
    tensors["head.weight"] = tensors["embedding.weight"]
    untied = dataclasses.replace(manifest, tensors=tensors)
    assert work.weight_bytes(untied, "fp32") == work.weight_bytes(manifest, "fp32")
    del tensors["embedding.weight"]
    assert work.weight_bytes(dataclasses.replace(manifest, tensors=tensors), "fp32") == work.weight_bytes(manifest, "fp32")


def test_weight_bytes_when_half_precision_then_follows_what_it_runs_in(llama_fp16_bundle: Path):
    manifest = open_bundle(llama_fp16_bundle).manifest
    whole = sum(int(np.prod(shape)) for shape in parameter_shapes(manifest.config).values())
    frequencies = 4 * manifest.config.head_dim // 2
    assert work.weight_bytes(manifest, "fp16") == 2 * whole + frequencies
    assert work.weight_bytes(manifest, "fp32") == 4 * whole + frequencies


def test_cache_bytes_when_layers_have_windows_then_each_reads_what_it_sees():
    config = dataclasses.replace(LLAMA_LIKE, window=8, window_layers=(1,))
    # Keys and values of 3 rows, 2 heads of 16 dims, float32: two layers see 100 tokens, one sees 8.
    assert work.cache_bytes(config, "fp32", 3, 100) == 2 * 3 * 2 * 16 * 4 * (100 + 8 + 100)
    assert work.cache_bytes(config, "fp16", 1, 4) == 2 * 2 * 16 * 2 * 12


@pytest.mark.parametrize("config", [LLAMA_LIKE, GPT2_LIKE, dataclasses.replace(LLAMA_LIKE, window=5, window_layers=(0, 2))])
def test_prefill_flops_when_counted_product_by_product_then_agrees(config):
    length, batch = 13, 2
    d, query, key, inner = 64, config.n_heads * 16, config.n_kv_heads * 16, config.d_ff
    expected = 0
    for layer in range(3):
        projections = d * query + 2 * d * key + query * d + d * inner * (3 if config.gated else 2)
        window = config.window if layer in config.window_layers else length
        pairs = sum(1 for q in range(length) for k in range(length) if 0 <= q - k < window)
        expected += 2 * length * projections + 2 * 2 * pairs * config.n_heads * 16
    expected += 2 * d * 131
    assert work.prefill_flops(config, batch, length) == batch * expected


# Memory


@LINUX
def test_memory_when_an_array_comes_and_goes_then_the_peak_keeps_it_until_reset():
    # In a process of its own: what other tests give back meanwhile would count too.
    program = """
import numpy as np
from tformer_deploy.bench import memory
assert memory.reset_peak()
before, shared = memory.peak_mib(), memory.proportional_mib()
array = np.ones(64 << 17)  # 64 MiB
held = memory.proportional_mib()
assert held - shared > 55, (held, shared)
del array
assert memory.peak_mib() - before > 55, (memory.peak_mib(), before)
assert memory.proportional_mib() < held - 55, (memory.proportional_mib(), held)
memory.reset_peak()
assert memory.peak_mib() - before < 10, (memory.peak_mib(), before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_memory_when_the_kernel_does_not_say_then_pss_is_none_and_the_peak_still_known(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(memory, "_PROC", tmp_path / "absent")
    assert memory.proportional_mib() is None
    assert not memory.reset_peak()
    assert memory.peak_mib() > 10


# Limits


def test_limits_when_sampled_then_are_of_a_machine(monkeypatch):
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 24)
    sample = LimitProbe(1).sample()
    assert 0.1 < sample.read_gb_per_s < 5000
    assert sample.gemm_gflops is not None
    assert 0.1 < sample.gemm_gflops < 50000


def test_limits_when_onnx_is_missing_then_says_so_and_gives_the_bandwidth_alone(monkeypatch):
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 24)
    monkeypatch.setitem(sys.modules, "onnx", None)
    probe = LimitProbe(None)
    assert "onnx is not installed" in str(probe.missing)
    assert probe.sample().gemm_gflops is None


# Figures


def test_figures_when_times_are_known_then_are_medians_quantiles_and_shares():
    point = Point(batch=2, prompt_length=10, new_tokens=4)
    runs = [Run(0.2, (0.1, 0.1, 0.1, 0.1)), Run(0.4, (0.3, 0.1, 0.1, 0.1)), Run(0.3, (0.2, 0.2, 0.2, 0.2))]
    seen = figures(point, runs, [Limits(2.0, 1.0), Limits(1.0, None), Limits(2.0, 4.0)], LLAMA_LIKE, "fp32", weights=1000)
    assert seen.ttft_ms == pytest.approx(300)
    assert seen.tpot_ms == pytest.approx(150)
    assert seen.itl_p50_ms == pytest.approx(100)
    assert 200 < seen.itl_p99_ms <= 300
    assert seen.prefill_tokens_per_s == pytest.approx(20 / 0.3)
    assert seen.decode_tokens_per_s == pytest.approx(2 / 0.15)
    read = 1000 + work.cache_bytes(LLAMA_LIKE, "fp32", 2, 12.5)
    shares = sorted([read / 0.1 / 2e9, read / 0.15 / 1e9, read / 0.2 / 2e9])
    assert seen.read_utilisation == pytest.approx(shares[1])
    flops = work.prefill_flops(LLAMA_LIKE, 2, 10)
    assert seen.flop_utilisation == pytest.approx((flops / 0.2 / 1e9 + flops / 0.3 / 4e9) / 2)


def test_figures_when_there_are_no_limits_then_shares_are_none():
    seen = figures(Point(1, 4, 2), [Run(1.0, (1.0, 1.0))], [None], LLAMA_LIKE, "fp32", 1000)
    assert (seen.read_utilisation, seen.flop_utilisation) == (None, None)


def test_measure_when_run_then_feeds_each_token_back_and_times_every_step():
    session = CountingSession()
    run = measure(session, [[1, 2, 3], [4, 5, 6]], Point(2, 3, 3, capacity=64))
    assert session.calls == [("prefill", 2, 3, 64), ("decode", (0, 1)), ("decode", (5, 6)), ("decode", (5, 6))]
    assert len(run.steps) == 3
    assert min(run.first, *run.steps) > 0


# Sweep


def test_sweep_when_run_then_warms_up_before_limits_exist_and_interleaves_points_and_limits(monkeypatch):
    session = CountingSession()
    FixedProbe.session = session
    monkeypatch.setattr(sweep, "LimitProbe", FixedProbe)
    wanted = sweep.points([1, 2], [4], 2, None, 256)
    done = sweep.run_sweep(session, wanted, 2, 1000, 3, True, lambda _: None)
    order = [call[1] if call[0] == "prefill" else call[0] for call in session.calls if call[0] != "decode"]
    assert order == [1, 2, "probe made", "limits", 1, "limits", 2, "limits", 1, "limits", 2]
    assert ("probe made", 3) in session.calls
    assert done.limits == Limits(1.0, 1.0)
    assert [len(r.runs) for r in done.results] == [2, 2]


def test_sweep_when_the_backend_is_no_processor_then_measures_no_limits_and_says_so(monkeypatch):
    session = CountingSession()
    FixedProbe.session = session
    monkeypatch.setattr(sweep, "LimitProbe", FixedProbe)
    done = sweep.run_sweep(session, [Point(1, 4, 2)], 1, 1000, None, False, lambda _: None)
    assert done.limits is None
    assert done.results[0].figures.read_utilisation is None
    assert "processors only" in done.notes[0]


@pytest.mark.parametrize(
    ("length", "new", "capacity", "words"),
    [(250, 7, None, "make 257 tokens"), (10, 7, 16, "expected 17"), (10, 7, 257, "to 256")],
)
def test_points_when_they_do_not_fit_then_refuses(length: int, new: int, capacity: int | None, words: str):
    with pytest.raises(UsageError, match=words):
        sweep.points([1], [3, length], new, capacity, 256)


# The command


def test_bench_when_swept_then_prints_a_table_a_picture_and_one_json_line(
    llama_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch
):
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 24)
    monkeypatch.setattr(limits, "GEMM_SIDE", 64)
    picture = tmp_path / "sweep.png"
    flags = [
        "--prompt-length",
        "5",
        "--prompt-length",
        "40",
        "--batch",
        "1",
        "--batch",
        "3",
        "--new-tokens",
        "4",
        "--repeats",
        "2",
    ]
    assert cli.run(["bench", str(llama_bundle), *flags, "--threads", "1", "--capacity", "200", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out.splitlines()
    result = json.loads(out[-1])
    assert any("decode tok/s" in line for line in out)
    assert [(p["batch"], p["prompt_length"]) for p in result["points"]] == [(1, 5), (1, 40), (3, 5), (3, 40)]
    for name, value in result["points"][0].items():
        assert result[name] == value
    assert all(p["ttft_ms"] > 0 and p["itl_p50_ms"] <= p["itl_p99_ms"] and p["capacity"] == 200 for p in result["points"])
    assert all(p["read_utilisation"] > 0 and p["flop_utilisation"] > 0 for p in result["points"])
    assert result["limits"]["gemm_gflops"] > 0
    assert result["versions"]["onnxruntime"]
    assert (result["threads"], result["profile"], result["dtype"]) == (1, "auto", "fp32")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("profile", ["portable", "cpu"])
def test_bench_when_a_profile_is_asked_for_then_that_one_is_opened(
    llama_bundle: Path, profile: str, capsys: pytest.CaptureFixture, monkeypatch
):
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 24)
    seen = []
    from tformer_deploy.commands import bench

    def opening(*args: object, **named: object):
        seen.append(original(*args, **named))
        return seen[-1]

    original = bench.open_session
    monkeypatch.setattr(bench, "open_session", opening)
    flags = ["--prompt-length", "4", "--new-tokens", "2", "--repeats", "1", "--json", "--profile", profile]
    assert cli.run(["bench", str(llama_bundle), *flags]) == 0
    assert type(seen[0].backend).__name__ == {"portable": "OnnxRuntimeBackend", "cpu": "CpuBackend"}[profile]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert json.loads(lines[0])["profile"] == profile


def test_bench_when_matplotlib_is_missing_then_refuses_before_it_measures(
    llama_bundle: Path, capsys, monkeypatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.run(["bench", str(llama_bundle), "--plot", str(tmp_path / "x.png")]) == CapabilityError.exit_code
    error = capsys.readouterr().err
    assert "matplotlib" in error
    assert "tformer-deploy[plot]" in error


def test_bench_when_the_picture_cannot_be_written_then_says_so(llama_bundle: Path, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 24)
    flags = ["--prompt-length", "4", "--new-tokens", "2", "--repeats", "1", "--plot", str(tmp_path / "absent" / "x.png")]
    assert cli.run(["bench", str(llama_bundle), *flags]) == StorageError.exit_code
    assert "x.png cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "words"), [("int8", "matrices in int8, the rest in fp32"), (None, ": fp32, ")])
def test_bench_when_matrices_are_quantised_then_title_and_json_say_so(
    llama_checkpoint: Path, kind, words, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 24)
    bundle = api.export(llama_checkpoint, tmp_path / "b", quantize=kind, check=False)
    assert cli.run(["bench", str(bundle), "--prompt-length", "4", "--new-tokens", "2", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    shown = " ".join(out.split())
    assert words in shown
    assert "of GEMM, of read: share" in shown
    assert json.loads(out.splitlines()[-1])["quantization"] == kind
