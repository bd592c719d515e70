"""benchmarks/peers: the protocol with real processes, conversions read back, tables from known values, one run end to end."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from conftest import ROOT

from tformer_deploy.checkpoints import open_checkpoint

PEERS = ROOT / "benchmarks" / "peers"

# A peer that counts up from each prompt's last id, chatters on stdout, and fails where it is told to.
COUNTING = """
import os, sys, time
import protocol
REQUIREMENTS, PRECISIONS, PACKAGES = (), ("fp32",), ("numpy", "no-such-package")
def convert(checkpoint, precision, folder):
    folder.mkdir()
    print("Error: the left shoe is missing", file=sys.stderr)
    raise RuntimeError("the right one too")
def load(folder, precision, threads):
    print("chatter")
    os.system("echo chatter of a child")
    if precision == "int4":
        raise ValueError("no\\nint4 here")
    return Model()
class Model:
    def run(self, rows, new_tokens, on_step):
        if len(rows) == 3:
            raise MemoryError("three rows")
        if len(rows) == 5:
            time.sleep(60)
        if len(rows) == 4:
            print("last words", file=sys.stderr, flush=True)
            os._exit(7)
        for i in range(new_tokens - (len(rows) == 2)):
            print("chatter")
            on_step([row[-1] + 1 + i for row in rows])
if __name__ == "__main__":
    protocol.main(sys.modules[__name__])
"""


@pytest.fixture(autouse=True)
def peers_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(PEERS))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a peer ``counting`` beside the protocol, which environments and workers are told to use."""
    (tmp_path / "counting_peer.py").write_text(COUNTING)
    (tmp_path / "protocol.py").write_text((PEERS / "protocol.py").read_text())
    monkeypatch.setattr(module("environments"), "HERE", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def entry(folder: Path, precision: str = "fp32"):
    return module("workers").Entry("counting", "counting", precision, Path(sys.executable), folder / "model" / "x")


# The protocol


def test_worker_when_it_chatters_then_answers_are_read_all_the_same(counting: Path):
    with module("workers").Worker(entry(counting), 1, counting) as worker:
        assert set(worker.ready["versions"]) == {"numpy"}
        for last in (5, 8):
            answer = worker.run([[1, last]], 3)
            assert answer["tokens"] == [[last + 1, last + 2, last + 3]]
            assert answer["first_s"] > 0
            assert len(answer["steps_s"]) == 2
    if Path("/proc/self/smaps_rollup").exists():
        assert 1 < answer["memory"]["pss_mib"] <= answer["memory"]["peak_mib"] + 1


def test_worker_when_a_request_fails_then_the_error_is_one_line_and_the_next_one_is_answered(counting: Path):
    unmet = module("environments").UnmetError
    with module("workers").Worker(entry(counting), 1, counting) as worker:
        with pytest.raises(unmet, match="MemoryError: three rows"):
            worker.run([[1]] * 3, 2)
        with pytest.raises(unmet, match="1 steps of"):  # one step too few is no result
            worker.run([[1]] * 2, 2)
        assert worker.run([[1]], 2)["tokens"] == [[2, 3]]


def test_worker_when_it_cannot_load_or_dies_then_says_why(counting: Path):
    unmet = module("environments").UnmetError
    with pytest.raises(unmet, match=r"^ValueError: no int4 here$"):
        module("workers").Worker(entry(counting, "int4"), 1, counting)
    with module("workers").Worker(entry(counting), 1, counting) as worker:
        with pytest.raises(unmet, match="ended with 7: last words"):
            worker.run([[1]] * 4, 2)
        with pytest.raises(unmet, match="ended with 7"):
            worker.run([[1]], 2)


def test_worker_when_it_hangs_then_is_given_up(counting: Path, monkeypatch: pytest.MonkeyPatch):
    with module("workers").Worker(entry(counting), 1, counting) as worker:
        monkeypatch.setattr(module("workers"), "ANSWER_S", 0.5)
        with pytest.raises(module("environments").UnmetError, match="no answer within"):
            worker.run([[1]] * 5, 2)


# Environments and conversions


def test_model_when_the_conversion_fails_then_its_own_error_is_named_and_nothing_stays(counting: Path):
    environments, checkpoint = module("environments"), counting / "shape"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    peer = module("counting_peer")
    with pytest.raises(environments.UnmetError, match=r"RuntimeError: the right one too \(shape-counting-fp32-convert.log\)"):
        environments.model_of("counting", peer, Path(sys.executable), checkpoint, "fp32", counting)
    assert not list((counting / "models" / "shape").iterdir())


def test_model_when_it_was_converted_then_is_reused_until_the_config_changes(counting: Path):
    environments, checkpoint = module("environments"), counting / "shape"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    peer, transformers = module("counting_peer"), module("transformers_peer")
    script = counting / "transformers_peer.py"
    script.write_text((PEERS / "transformers_peer.py").read_text())
    arguments = ("transformers", transformers, Path(sys.executable), checkpoint, "fp32", counting)
    folder = environments.model_of(*arguments)
    assert (folder / "checkpoint").read_text() == str(checkpoint.resolve())
    script.write_text("raise SystemExit('Error: converted again')")
    assert environments.model_of(*arguments) == folder
    (checkpoint / "config.json").write_text("{ }")
    with pytest.raises(environments.UnmetError, match="converted again"):
        environments.model_of(*arguments)
    assert peer.PRECISIONS == ("fp32",)


def test_environment_when_pip_refuses_then_its_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    environments = module("environments")
    peer = ModuleType("broken")
    peer.REQUIREMENTS = (str(tmp_path / "no-such-folder"),)
    with pytest.raises(environments.UnmetError, match=r"no-such-folder.*\(broken-install.log\)"):
        environments.python_of("broken", peer, tmp_path)
    assert not (tmp_path / "env" / "broken" / "installed.json").exists()


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("a\nValueError: real\nsubprocess.CalledProcessError: Command\n", "ValueError: real"),
        ("a\n  ERROR: No matching distribution\nb\n", "ERROR: No matching distribution"),
        ("only words\n\n", "only words"),
        ("", "it printed nothing"),
    ],
)
def test_error_line_when_a_log_is_read_then_is_the_telling_one(log: str, line: str):
    assert module("environments").error_line(log) == line


@pytest.mark.parametrize("peer", ["transformers", "genai", "ctranslate2", "llamacpp", "openvino", "ours"])
def test_peer_when_imported_here_then_needs_none_of_its_packages_and_pins_its_own(peer: str):
    code = f"import sys; sys.path.insert(0, {str(PEERS)!r}); import {peer}_peer as p; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for package in ("torch", "onnxruntime", "onnxruntime_genai", "ctranslate2", "llama_cpp", "openvino", "numpy"):
        assert f"'{package}'" not in loaded
    found = module(f"{peer}_peer")
    assert set(found.PRECISIONS) <= set(module("run").PRECISIONS)
    assert peer == "ours" or "==" in found.REQUIREMENTS[0]


def test_checkpoint_when_written_as_gguf_then_our_own_reader_finds_the_same_weights_and_back(tmp_path: Path):
    checkpoints = module("checkpoints")
    folder = checkpoints.prepare("tiny", tmp_path)
    written = tmp_path / "again.gguf"
    module("gguf_writer").write_gguf(folder, written)
    original, read = open_checkpoint(folder), open_checkpoint(written)
    assert read.config == original.config
    for name in original.tensors:
        assert torch.equal(original.read(name, torch.float32), read.read(name, torch.float32)), name
    back = open_checkpoint(checkpoints.prepare(str(written), tmp_path / "back"))
    for name in original.tensors:
        assert torch.equal(original.read(name, torch.float32), back.read(name, torch.float32)), name


def test_checkpoint_when_gpt2_is_written_as_gguf_then_every_tensor_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import gguf

    checkpoints = module("checkpoints")
    shape = checkpoints.SHAPES["gpt2"] | {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_inner": 128,
        "vocab_size": 300,
        "n_positions": 64,
    }
    monkeypatch.setitem(checkpoints.SHAPES, "gpt2", shape)
    folder = checkpoints.prepare("gpt2", tmp_path)
    module("gguf_writer").write_gguf(folder, tmp_path / "gpt2.gguf")
    tensors = {t.name: np.array(t.data) for t in gguf.GGUFReader(str(tmp_path / "gpt2.gguf")).tensors}
    assert len(tensors) == 4 + 2 * 12
    original = open_checkpoint(folder)
    assert np.array_equal(tensors["position_embd.weight"], original.read("positions.weight").numpy())
    for i in range(2):
        # Ours are [in, out], GGUF's [out, in]; query, key and value lie one after the other.
        parts = [original.read(f"blocks.{i}.attention.{part}.weight").numpy().T for part in ("query", "key", "value")]
        assert np.array_equal(tensors[f"blk.{i}.attn_qkv.weight"], np.concatenate(parts))
        assert np.array_equal(
            tensors[f"blk.{i}.ffn_down.weight"], original.read(f"blocks.{i}.feed_forward.down.weight").numpy().T
        )


def test_prepare_when_nothing_is_known_by_that_name_then_refuses(tmp_path: Path):
    with pytest.raises(ValueError, match=r"none of 0\.5b, gpt2"):
        module("checkpoints").prepare("no-such-shape", tmp_path)


# Figures and tables


def test_value_when_answers_are_known_then_rates_follow():
    tables = module("tables")
    answer = {"first_s": 0.5, "steps_s": [0.1, 0.3], "memory": {"pss_mib": 7.0}, "cold_s": 1.5}
    assert tables.value(tables.Metric("decode 8x32", "tok/s", "8x32", True), answer, 8, 32) == pytest.approx(16 / 0.4)
    assert tables.value(tables.Metric("prefill 256", "tok/s", "1x256", True), answer, 1, 256) == pytest.approx(512)
    assert tables.value(tables.Metric("memory (PSS)", "MiB", "x", False), answer, 1, 1) == 7
    assert tables.value(tables.Metric("cold start", "s", "cold", False), answer, 1, 1) == 1.5


def test_ratio_when_one_round_is_disturbed_then_medians_are_compared():
    tables = module("tables")
    speed, time = tables.Metric("decode 1x32", "tok/s", "1x32", True), tables.Metric("cold start", "s", "cold", False)
    assert tables.ratio(speed, [10, 1, 12], [5, 100, 4]) == 2
    assert tables.ratio(time, [1.0], [3.0]) == 3


def test_agreement_when_rows_part_then_counts_up_to_there():
    assert module("tables").agreement([[1, 2, 3, 4], [9, 2, 3, 4]], [[1, 2, 9, 4], [1, 2, 3, 4]]) == 2 / 8


def test_table_when_a_peer_is_missing_then_its_cells_are_unmet_and_it_is_never_the_best(capsys: pytest.CaptureFixture):
    tables = module("tables")
    metric = tables.Metric("decode 1x32", "tok/s", "1x32", True)
    group = {
        "entries": {"ours fp32": {"decode 1x32": [30.0]}, "a": {"decode 1x32": [10.0]}, "b": {"decode 1x32": [20.0]}, "c": {}},
        "ours": "ours fp32", "agreement": {"a": 1.0, "b": None}, "agreement_with": "a fp32",
        "unmet": {"c": "1x32: MemoryError: [x]", "d": "ERROR: no wheel"},
    }  # fmt: skip
    tables.print_tables(group, [metric], "t")
    out = capsys.readouterr().out
    assert "10 (3.00×)" in out
    assert "ours fp32 / best peer │ 1.50×" in out
    assert out.count("unmet") == 4  # the cells of c and d, and a line for each
    assert "unmet: c: 1x32: MemoryError: [x]" in out
    assert "unmet: d: ERROR: no wheel" in out


# The command


def test_run_when_one_peer_installs_and_one_does_not_then_compares_the_one_and_names_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    run, environments = module("run"), module("environments")

    def python_of(peer: str, *_: object) -> Path:
        if peer == "genai":
            raise environments.UnmetError("ERROR: no such wheel (genai-install.log)")
        return Path(sys.executable)  # the tests' environment has torch and transformers

    monkeypatch.setattr(run, "python_of", python_of)
    monkeypatch.setattr(
        sys, "argv",
        ["run.py", "--checkpoint", "tiny", "--out", str(tmp_path), "--peer", "transformers", "--peer", "genai", "--precision", "fp32",
         "--decode", "1x8", "--decode", "3x5", "--prefill", "20", "--new-tokens", "3", "--rounds", "1", "--cold", "1", "--threads", "1"],
    )  # fmt: skip
    run.main()
    out = capsys.readouterr().out
    saved = json.loads((tmp_path / "results.json").read_text())
    group = saved["checkpoints"]["tiny"]["fp32"]
    assert set(group["entries"]) == {"ours fp32", "transformers"}
    assert group["unmet"] == {"genai": "ERROR: no such wheel (genai-install.log)"}
    for values in group["entries"].values():
        assert {name: len(found) for name, found in values.items()} == dict.fromkeys(
            ["decode 1x8", "decode 3x5", "prefill 20", "memory (PSS)", "cold start"], 1
        )
        assert all(number > 0 for found in values.values() for number in found)
    assert group["agreement"] == {"ours fp32": 1.0, "transformers": 1.0}
    assert group["agreement_with"] == "transformers fp32"
    assert set(json.loads(out.splitlines()[-1])["versions"]) >= {"onnxruntime", "tformer-deploy", "torch", "transformers"}
    assert "unmet: genai: ERROR: no such wheel" in out
