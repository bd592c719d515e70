"""What a command says to do next: after a refusal, a red result, or work that is done."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from fault_files import Console, console, write_llama

from tformer_deploy import api, cli
from tformer_deploy.bundle import open_bundle
from tformer_deploy.bundle.engines import SIDECAR
from tformer_deploy.bundle.writer import refuse_existing
from tformer_deploy.errors import InputError, UsageError

__all__ = ["console"]


@pytest.mark.parametrize("kind", ["not there", "a folder"])
def test_verify_report_when_there_is_no_report_then_says_how_to_write_one(
    kind: str, console: Console, llama_bundle: Path, tmp_path: Path
):
    path = tmp_path / "missing.json" if kind == "not there" else tmp_path
    console.refused(
        3, (f"is {kind}", "check BUNDLE --checkpoint PATH --report FILE"), "check", llama_bundle, "--verify-report", path
    )


def test_check_when_there_is_no_checkpoint_then_the_last_line_asks_for_one(console: Console, llama_bundle: Path):
    code, out, err = console.run("check", llama_bundle)
    assert code == 1
    assert "self-consistent only" in out
    assert err.splitlines()[-1].endswith("→ Give --checkpoint PATH, what the bundle was made from.")


def test_run_when_the_prompts_are_plain_text_then_is_refused_as_a_whole(console: Console, llama_bundle: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("First Citizen:\n" * 1000)
    out = console.output / "out.jsonl"
    console.refused(3, ('PROMPTS is JSONL: write {"prompt"',), "run", llama_bundle, tmp_path / "text.txt", "-o", out)


def test_run_when_rows_fail_then_the_first_reason_is_said_once(console: Console, llama_bundle: Path, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1]}\n{"prompt": "a"}\n{"prompt": "b"}\n')
    code, _, err = console.run("run", llama_bundle, tmp_path / "rows.jsonl", "-o", tmp_path / "out.jsonl", "--max-new-tokens", 1)
    assert code == 1
    assert err.count("no_tokenizer: prompt needs a tokenizer") == 1
    assert "Note: line 2 failed: no_tokenizer" in err


def test_run_when_the_outputs_folder_is_absent_then_says_to_make_it(console: Console, llama_bundle: Path, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1]}\n')
    out = tmp_path / "absent" / "out.jsonl"
    console.refused(5, ("absent is not there", "Make it first"), "run", llama_bundle, tmp_path / "rows.jsonl", "-o", out)


def test_export_when_a_hubs_name_is_given_then_says_that_nothing_is_fetched(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    console.export_refused("gpt2", "gpt2 does not exist", "nothing is fetched from a hub")


def test_export_when_a_bundle_is_given_then_says_what_it_is(console: Console, llama_bundle: Path):
    console.export_refused(llama_bundle, "is a bundle, not a checkpoint")


def test_export_when_the_checkpoint_has_no_tokenizer_then_warns_and_proposes_a_row_of_ids(console: Console, tmp_path: Path):
    write_llama(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint" / "tokenizer.json").exists()
    code, out, err = console.run("export", tmp_path / "checkpoint", "-o", tmp_path / "b")
    assert code == 0
    assert "Warning: The checkpoint has no tokenizer" in err
    (line,) = (line for line in out.splitlines() if line.startswith("Next: "))
    assert line == f"""Next: echo '{{"input_ids": [1, 2, 3]}}' | tformer-deploy run {tmp_path / "b"} - -o -"""
    (tmp_path / "rows").write_text('{"input_ids": [1, 2, 3]}\n')
    assert console.run("run", tmp_path / "b", tmp_path / "rows", "-o", tmp_path / "out.jsonl")[0] == 0


def test_inspect_when_it_counts_parameters_then_what_follows_from_the_config_is_none(console: Console, llama_bundle: Path):
    code, out, _ = console.run("inspect", llama_bundle, "--json")
    assert code == 0
    tensors = open_bundle(llama_bundle).manifest.tensors
    assert "rope.frequencies" in tensors
    assert json.loads(out)["weights"]["parameters"] == sum(
        math.prod(tensor.shape) for name, tensor in tensors.items() if name != "rope.frequencies"
    )


def test_seal_when_something_changed_then_the_next_command_names_the_bundle(console: Console, llama_bundle: Path, tmp_path: Path):
    path = Path(shutil.copytree(llama_bundle, tmp_path / "b"))
    with (path / "weights.bin").open("r+b") as file:
        file.write(b"\0\0\0\0")
    code, out, _ = console.run("seal", path)
    assert code == 0
    assert f"Next: tformer-deploy check {path} --checkpoint PATH, where PATH is {open_bundle(path).manifest.source.name}" in out


def test_engine_folder_when_it_exists_then_another_path_is_not_proposed(tmp_path: Path):
    (tmp_path / SIDECAR).write_text("{}")
    with pytest.raises(UsageError) as e:
        refuse_existing(tmp_path, False, SIDECAR, "another --dtype")
    assert e.value.hint == "Give --force to replace it, or another --dtype."


def test_range_scan_when_its_file_is_absent_then_the_flag_is_named(llama_fp16_bundle: Path, tmp_path: Path):
    with pytest.raises(InputError, match=r"The --range-scan file .*nope\.txt is no file"):
        api.build_engine(llama_fp16_bundle, range_scan=tmp_path / "nope.txt")


def test_field_when_misspelt_then_the_likely_one_is_proposed(console: Console, llama_bundle: Path, tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1], "max_new_token": 1}) + "\n")
    _, _, err = console.run("run", llama_bundle, tmp_path / "rows.jsonl", "-o", tmp_path / "out.jsonl", "--max-new-tokens", 1)
    assert "'max_new_token' (meant is max_new_tokens?)" in err


def test_inspect_when_the_path_looks_like_markup_then_shows_it_as_it_is(llama_bundle: Path, tmp_path: Path, capsys):
    path = shutil.copytree(llama_bundle, tmp_path / "[red]x[" / "y]")
    assert cli.run(["inspect", str(path)]) == 0
    assert "[red]x[/y]" in capsys.readouterr().out.replace("\n", "")
