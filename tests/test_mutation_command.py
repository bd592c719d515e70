"""The mutation command itself: a survivor fails it and is named, and so do a false equivalent and a red control."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from mutation import oracle, run
from mutation.gate import ONE_MORE, GateBench, GateMutant
from mutation.gate_table import DECODE, GATE, PREFILL, put
from mutation.goldens import COMPLETIONS, GoldenBench, GoldenMutant
from mutation.mutant import Bench, Mutant, Reading, judge
from mutation.oracle import ONE_PASS, OracleBench, OracleMutant
from mutation.oracle_table import ORACLE

ROOT = Path(__file__).resolve().parent.parent


def outcome_of(mutants: list[Mutant], make=run.benches) -> tuple[int, list[str], dict]:
    """Exit code, the lines, and the last of them as JSON."""
    lines: list[str] = []
    code = run.main([], mutants, make, lambda line: lines.extend(line.splitlines()))
    return code, lines, json.loads(lines[-1])


def test_table_when_counted_then_has_enough_of_both_tags_under_names_of_their_own():
    tags = [m.tag for m in run.MUTANTS if not m.equivalent]
    assert tags.count("gate") >= 60
    assert tags.count("oracle-test") >= 40
    assert len({str(m) for m in run.MUTANTS}) == len(run.MUTANTS)


def test_command_when_mutants_that_do_nothing_are_put_in_then_names_them_and_exits_1(llama_bundle, llama_checkpoint):
    idle: list[Mutant] = [
        put(lambda graph: None, "llama", "decode", DECODE, ONE_MORE, name="idle"),
        OracleMutant("idle", "oracle-test", "oracle", "gpt2", (ONE_PASS,), case="gpt2"),
        GoldenMutant("idle", "oracle-test", "goldens", "stopping", (COMPLETIONS,)),
    ]
    caught = [m for m in ORACLE if str(m) == "gpt2-positions-from-one"]

    def make(folder: Path) -> dict[str, Bench]:
        return run.benches(folder) | {"gate": GateBench(folder, {"llama": (llama_bundle, llama_checkpoint)})}

    code, lines, totals = outcome_of([*idle, *caught], make)
    assert code == 1
    assert totals["survivors"] == ["llama/decode-idle", "gpt2-idle", "stopping-idle"]
    assert totals["passed"] is False
    assert lines[-2] == "gate: 0/1 (0 %)   oracle-test: 1/3 (33 %)"
    assert [line.split()[0] for line in lines[:4]] == ["missed", "missed", "missed", "caught"]
    assert "NOT RED" in lines[0]
    assert totals["red_controls"] == []


def test_command_when_a_mutant_that_shows_is_called_equivalent_then_it_survives():
    shown = next(m for m in ORACLE if str(m) == "gpt2-positions-from-one")
    code, lines, totals = outcome_of([replace(shown, red=(), equivalent="positions do not matter")])
    assert (code, totals["survivors"], totals["equivalent"]) == (1, ["gpt2-positions-from-one"], [])
    assert "not equivalent: effect" in lines[0]


def test_command_when_a_mutant_cannot_be_measured_then_it_survives():
    def broken() -> None:
        raise ValueError("no such function")

    code, lines, totals = outcome_of(
        [OracleMutant("broken", "oracle-test", "oracle", "gpt2", (ONE_PASS,), fault=broken, case="gpt2")]
    )
    assert (code, totals["survivors"]) == (1, ["gpt2-broken"])
    assert "cannot be measured: ValueError: no such function" in lines[0]


def test_command_when_a_site_is_red_with_nothing_changed_then_exits_1(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(oracle, "LINE", 0.0)
    code, _, totals = outcome_of([m for m in ORACLE if str(m) == "gpt2-positions-from-one"])
    assert (code, totals["survivors"], totals["red_controls"]) == (1, [], ["oracle: gpt2"])


def test_command_when_run_from_a_checkout_then_prints_scores_and_json_last():
    words = ["stopping-", "gpt2-key-biases"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutation", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "gate: none chosen   oracle-test: 16/16 (100 %)" in lines
    totals = json.loads(lines[-1])
    assert totals["passed"] is True
    assert totals["equivalent"] == ["gpt2-key-biases-dropped"]


def test_command_when_no_mutant_is_named_so_then_exits_2_and_when_listed_then_runs_none():
    lines: list[str] = []
    assert run.main(["no-such-fault"], say=lines.append) == 2
    assert "no-such-fault" in lines[0]
    lines.clear()
    assert run.main(["--list"], say=lines.append) == 0
    assert len(lines) == len(run.MUTANTS)


def _reading(value: float, red: bool) -> Reading:
    return Reading(value, "<= 1", red, distance=True)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ({DECODE: _reading(5, True), ONE_MORE: _reading(5, True), PREFILL: _reading(0, False)}, "caught"),
        ({DECODE: _reading(5, True), ONE_MORE: _reading(0, False), PREFILL: _reading(0, False)}, "missed"),
        ({DECODE: _reading(5, True), ONE_MORE: _reading(5, True), PREFILL: _reading(5, True)}, "missed"),  # not of prefill
        ({ONE_MORE: _reading(5, True)}, "missed"),  # not measured
    ],
)
def test_verdict_when_a_named_metric_is_green_or_another_graphs_is_red_then_is_missed(found, verdict):
    mutant = put(lambda graph: None, "llama", "decode", DECODE, ONE_MORE, name="some")
    assert judge(mutant, found, dict.fromkeys(found, _reading(0, False))).verdict == verdict


@pytest.mark.parametrize(
    ("effect", "verdict"), [(1e-6, "equivalent"), (2e-6, "equivalent"), (2.1e-6, "missed"), (float("nan"), "missed")]
)
def test_verdict_when_an_equivalent_moves_a_metric_then_it_is_under_twice_the_noise_of_that_metric(effect, verdict):
    mutant = GateMutant("some", "gate", "gate", "llama/prefill", equivalent="it is", phase="prefill")
    control = {PREFILL: _reading(1e-6, False), DECODE: _reading(1.0, False)}  # what did not move is no noise of it
    assert judge(mutant, {PREFILL: _reading(effect, False), DECODE: _reading(1.0, False)}, control).verdict == verdict
    assert judge(mutant, {PREFILL: _reading(1e-6, True), DECODE: _reading(1.0, False)}, control).verdict == "missed"


def test_mutant_when_it_names_no_metric_and_no_reason_then_is_refused():
    with pytest.raises(AssertionError, match="name the metrics"):
        GateMutant("some", "gate", "gate", "llama/prefill")
    assert all(m.red or m.equivalent for m in GATE)


def test_benches_when_made_then_there_is_one_for_every_mutant(tmp_path: Path):
    made = run.benches(tmp_path)
    assert {m.bench for m in run.MUTANTS} == set(made)
    assert isinstance(made["oracle"], OracleBench)
    assert isinstance(made["goldens"], GoldenBench)
