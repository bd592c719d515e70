"""``export`` and ``seal`` as people call them: the same bytes every time, nothing half done, errors that name things."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import GPT2_LIKE, LLAMA_LIKE, ROOT, hot_decoder

import tformer_deploy
from tformer_deploy import api
from tformer_deploy.bundle import open_bundle
from tformer_deploy.checkpoints import open_checkpoint
from tformer_deploy.cli import run
from tformer_deploy.errors import InputError, ResourceError, StorageError, UsageError
from tformer_deploy.exporters.onnx import export as export_module
from tformer_deploy.exporters.onnx import export_bundle
from tformer_deploy.exporters.onnx.graph import build_graph
from tformer_deploy.exporters.onnx.lint import graph_faults
from tformer_deploy.exporters.onnx.weights import bundle_tensors, weights_size, write_weights

SMALL = replace(LLAMA_LIKE, n_layers=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "small"
    hot_decoder(SMALL).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def small_bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tformer_deploy.export(checkpoint, tmp_path_factory.mktemp("small") / "b", check=False)


@pytest.fixture
def no_graphs(monkeypatch, small_bundle):
    """Tracing replaced by the finished graph of the same checkpoint, for tests of everything around it."""
    import onnx_ir as ir

    def finished(config, dtype, phase, tensors, build_id, quantized=False):
        model = ir.load(small_bundle / f"{phase}.onnx")
        model.metadata_props["tformer_deploy.build"] = build_id
        return model

    monkeypatch.setattr(export_module, "build_graph", finished)


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_export_when_repeated_elsewhere_by_another_process_then_gives_the_same_bytes(checkpoint, small_bundle, tmp_path):
    # Another copy of the package, of the checkpoint (of the same name), another hash seed, time zone and user folder.
    install = tmp_path / "elsewhere" / "lib"
    shutil.copytree(ROOT / "tformer_deploy", install / "tformer_deploy")
    shutil.copytree(ROOT / "exporters", install / "tformer_deploy" / "exporters")
    copy = shutil.copytree(checkpoint, tmp_path / "deep" / "er" / "small")
    code = (
        f"import sys; sys.path.insert(0, {str(install)!r}); import tformer_deploy; "
        f"assert tformer_deploy.__file__.startswith({str(install)!r}); tformer_deploy.export({str(copy)!r}, 'out', check=False); "
        f"assert sys.modules['tformer_deploy.exporters'].__file__.startswith({str(install)!r})"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345", "TZ": "Asia/Tokyo", "LC_ALL": "C", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert hashes(tmp_path / "out") == hashes(small_bundle)


def test_export_when_done_then_says_what_it_is_made_of(checkpoint, small_bundle):
    manifest = open_bundle(small_bundle, verify="full").manifest
    opened = open_checkpoint(checkpoint)
    assert (manifest.source.name, manifest.source.format, manifest.source.family) == ("small", "safetensors", "tformer")
    assert manifest.source.sha256 == opened.sha256()
    assert manifest.config == SMALL
    assert str(checkpoint.parent) not in (small_bundle / "manifest.json").read_text()
    assert manifest.files["weights.bin"].size <= weights_size(SMALL, "fp32")
    data = (small_bundle / "weights.bin").read_bytes()
    for name, record in manifest.tensors.items():
        assert record.offset % 4096 == 0
        if name != "rope.frequencies":
            assert data[record.offset : record.offset + record.size] == opened.read(name).numpy().tobytes(), name


def test_export_when_a_decoder_is_given_then_equals_its_saved_checkpoint(small_bundle, tmp_path, no_graphs):
    path = tformer_deploy.export(hot_decoder(SMALL), tmp_path / "b", check=False)
    ours, saved = hashes(path), hashes(small_bundle)
    assert ours["weights.bin"] == saved["weights.bin"]


@pytest.mark.parametrize("config", [LLAMA_LIKE, GPT2_LIKE], ids=["llama", "gpt2"])
def test_export_when_bf16_then_both_graphs_are_clean_and_weights_are_rounded_to_nearest(config, tmp_path):
    decoder = hot_decoder(replace(config, n_layers=1))
    decoder.save_pretrained(tmp_path / "c")
    path = tformer_deploy.export(tmp_path / "c", tmp_path / "b", dtype="bf16", check=False)
    bundle = open_bundle(path)
    for name, parameter in decoder.named_parameters():
        stored = bundle.tensor(name)
        assert stored.dtype.name == "bfloat16"
        assert stored.view("uint16").tolist() == parameter.detach().to(torch.bfloat16).view(torch.uint16).tolist()
    if config.rope:
        assert bundle.manifest.tensors["rope.frequencies"].dtype == "fp32"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_graph_when_built_in_bf16_then_another_dtype_is_a_fault(checkpoint, tmp_path, phase):
    tensors, _ = write_weights(tmp_path / "w", bundle_tensors(open_checkpoint(checkpoint), "bf16"))
    graph = build_graph(SMALL, "bf16", phase, tensors, "x")
    assert list(graph_faults(graph, SMALL, "bf16", phase)) == []
    assert any("BFLOAT16" in f for f in graph_faults(graph, SMALL, "fp32", phase))


def test_export_when_a_value_does_not_fit_fp16_then_names_the_tensor(tmp_path, no_graphs):
    decoder = hot_decoder(SMALL)
    with torch.no_grad():
        decoder.blocks[0].feed_forward.up.weight[3, 5] = -70000.0
    with pytest.raises(InputError, match=r"blocks\.0\.feed_forward\.up\.weight.*-70000") as e:
        tformer_deploy.export(decoder, tmp_path / "b", dtype="fp16", check=False)
    assert "bf16" in str(e.value.hint)
    assert list(tmp_path.iterdir()) == []
    tformer_deploy.export(decoder, tmp_path / "b", dtype="fp32", check=False)


def test_weights_when_a_source_gives_what_is_not_finite_then_names_the_tensor(tmp_path):
    class Source:
        config = SMALL
        tensors = {"embedding.weight": None}  # noqa: RUF012

        def read(self, name, dtype=None):
            return torch.full((4, 4), float("nan")).to(dtype)

    with pytest.raises(InputError, match=r"embedding\.weight"):
        write_weights(tmp_path / "w", bundle_tensors(Source(), "fp32"))


def test_export_when_max_length_is_given_then_bounds_rows_and_not_weights(checkpoint, small_bundle, tmp_path, no_graphs):
    path = tformer_deploy.export(checkpoint, tmp_path / "b", max_length=100, check=False)
    manifest = open_bundle(path).manifest
    assert (manifest.max_length, manifest.config) == (100, SMALL)
    for wrong in (0, 257):
        with pytest.raises(UsageError, match="256"):
            tformer_deploy.export(checkpoint, tmp_path / "c", max_length=wrong, check=False)
    assert not (tmp_path / "c").exists()


def test_export_when_output_and_checkpoint_overlap_then_refuses_and_touches_nothing(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "c")
    (tmp_path / "link").symlink_to(copy)
    before = hashes(copy)
    for output in (copy, copy / "b", tmp_path / "link" / "b", tmp_path):
        with pytest.raises(UsageError):
            tformer_deploy.export(copy, output, check=False, force=True)
    assert hashes(copy) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "link"]


def test_export_when_the_check_is_red_or_fails_then_leaves_what_was_there(checkpoint, tmp_path, no_graphs):
    seen = []

    def red(folder: Path) -> None:
        seen.append(open_bundle(folder, verify="full").manifest.config)
        raise api.ParityError("red")

    for old in (False, True):
        path = tmp_path / "b"
        if old:
            tformer_deploy.export(checkpoint, path, check=False)
            before = hashes(path)
        with pytest.raises(api.ParityError):
            export_bundle(open_checkpoint(checkpoint), path, force=True, verify=red)
        assert [p.name for p in tmp_path.iterdir()] == (["b"] if old else [])
        assert not old or hashes(path) == before
    assert seen == [SMALL, SMALL]


@pytest.mark.parametrize(
    ("code", "error"), [(1, api.ParityError), (3, InputError), (5, StorageError), (6, ResourceError), (-9, ResourceError)]
)
def test_check_in_child_when_it_ends_badly_then_raises_of_that_kind(monkeypatch, code, error):
    check = {"group": "decode", "metric": "max abs", "value": 0.5, "gate": 0.1, "relation": "<=", "verdict": "red", "detail": ""}
    report = json.dumps({"checks": [check, check | {"metric": "other", "verdict": "green"}]})
    done = subprocess.CompletedProcess([], code, stdout=report, stderr="what went wrong")
    monkeypatch.setattr(api.subprocess, "run", lambda *a, **k: done)
    with pytest.raises(error) as e:
        api.check_in_child(Path("b"), Path("c"))
    if code == 1:
        found = "1 of 2 checks are red; no bundle is kept.\n  decode: max abs is 0.5; the line is <= 0.1"
        assert e.value.message == f"The exported graphs differ from PyTorch: {found}"
    else:
        assert "what went wrong" in e.value.message


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, errno.EFBIG])
def test_export_when_the_nth_write_fails_then_leaves_nothing_or_the_old_bundle(
    checkpoint, tmp_path, monkeypatch, no_graphs, fault
):
    path = tmp_path / "b"
    tformer_deploy.export(checkpoint, path, check=False, max_length=9)
    before = hashes(path)
    states: list[dict[str, str]] = []
    calls, fail_at = [0], [0]
    real_open, real_fsync = Path.open, os.fsync

    class Failing:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            step()
            return self.file.write(data)

    def step():
        calls[0] += 1
        if calls[0] == fail_at[0]:
            raise OSError(fault, os.strerror(fault))

    def opened(self, mode="r", *args, **options):
        file = real_open(self, mode, *args, **options)
        return Failing(file) if "w" in mode else file

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr(os, "fsync", lambda descriptor: (step(), real_fsync(descriptor)))
    for n in (1, 2, 9, 20, 28, 30, 31, 32, 33, 34, 35, 200):
        calls[0], fail_at[0] = 0, n
        code = run(["export", str(checkpoint), "-o", str(path), "--force", "--no-check"])
        assert [p.name for p in tmp_path.iterdir()] == ["b"]
        if calls[0] < n:
            assert code == 0
            break
        assert code == 5
        states.append(hashes(path))
    else:
        pytest.fail("it never succeeded")
    assert before in states
    assert all(state in (before, hashes(path)) for state in states)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_export_when_the_disk_is_too_small_then_says_how_much_is_needed(checkpoint, tmp_path, capsys, no_graphs):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine forbids mounts")
    try:
        assert run(["export", str(checkpoint), "-o", str(disk / "b"), "--no-check"]) == 5
        assert "MiB free; the weights need" in capsys.readouterr().err
        # Room for the weights and not for the rest.
        need = weights_size(SMALL, "fp32") + 8192
        subprocess.run(["mount", "-o", f"remount,size={need // 1024}k", str(disk)], check=True)
        assert run(["export", str(checkpoint), "-o", str(disk / "b"), "--no-check"]) == 5
        assert "No space left" in capsys.readouterr().err
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_export_when_killed_at_many_moments_then_the_next_one_works_and_clears_up(checkpoint, small_bundle, tmp_path):
    path = tmp_path / "b"
    command = [sys.executable, "-m", "tformer_deploy.cli", "export", str(checkpoint), "-o", str(path), "--no-check", "--force"]
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    whole = time.perf_counter() - started
    for i in range(10):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(whole * (0.3 + 0.07 * i))
        child.send_signal(signal.SIGKILL)
        child.wait()
        open_bundle(path, verify="full")
    subprocess.run(command, check=True, capture_output=True)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    assert hashes(path) == hashes(small_bundle)


def test_export_command_when_run_then_prints_sizes_and_what_was_not_checked(checkpoint, tmp_path, capsys, no_graphs):
    path = tmp_path / "my bundle"
    assert run(["export", str(checkpoint), "-o", str(path), "--no-check"]) == 0
    out = capsys.readouterr()
    assert "weights.bin" in out.out
    assert "Not checked against PyTorch" in out.out
    assert f"check '{path}'" in out.out
    assert "weights" in out.err
    assert run(["export", str(checkpoint), "-o", str(path), "--no-check"]) == 2
    assert "--force" in capsys.readouterr().err
    assert run(["export", str(checkpoint), "-o", str(path), "--no-check", "--force", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["checked"] is False
    assert result["core_sha256"] == open_bundle(path).core_sha256
    assert run(["export", str(tmp_path / "absent"), "-o", str(tmp_path / "x")]) == 3


def test_export_command_when_checked_then_a_green_bundle_is_there(checkpoint, tmp_path, capsys):
    path = tmp_path / "b"
    assert run(["export", str(checkpoint), "-o", str(path)]) == 0
    assert "quick suite green" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b"]


def test_seal_command_when_the_graph_breaks_a_rule_then_seals_and_warns(small_bundle, tmp_path, capsys):
    import onnx

    path = shutil.copytree(small_bundle, tmp_path / "b")
    model = onnx.load(path / "decode.onnx", load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "Attention":
            del node.input[3:]
    onnx.save(model, path / "decode.onnx")
    assert run(["seal", str(path)]) == 0
    out = capsys.readouterr()
    assert "Changed: decode.onnx" in out.out
    assert "must take the mask" in out.err
    assert run(["seal", str(tmp_path / "absent")]) == 3


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_export_when_weights_are_large_then_holds_one_tensor_at_a_time(tmp_path):
    # 240 MiB in tensors of 16 MiB: far more than the bound on what the weights may add.
    config = replace(SMALL, n_layers=5, d_model=1024, d_ff=4096, head_dim=64, n_heads=16, n_kv_heads=16)
    hot_decoder(config).save_pretrained(tmp_path / "c")
    code = """
import re, sys
from pathlib import Path
from tformer_deploy.checkpoints import open_checkpoint
from tformer_deploy.exporters.onnx.weights import bundle_tensors, write_weights
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
checkpoint = open_checkpoint(sys.argv[1]); before = peak()
write_weights(Path(sys.argv[2]), bundle_tensors(checkpoint, "fp32"))
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c"), str(tmp_path / "w")], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "w").stat().st_size > 230 * 2**20
    assert float(done.stdout) < 100  # MiB
