"""The oracle tests are tested by mutation: faults that product and oracle share must show against transformers, or goldens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")
from mutation.gate import undisturbed
from mutation.generation_table import GENERATION
from mutation.goldens import GoldenBench, GoldenMutant
from mutation.mutant import judge
from mutation.oracle import LINE, OracleBench, OracleMutant
from mutation.oracle_table import ORACLE

from tformer_deploy.checkpoints.families import FAMILIES


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[OracleBench]:
    with undisturbed():
        yield OracleBench(tmp_path_factory.mktemp("cases"))


@pytest.fixture(scope="module")
def goldens() -> GoldenBench:
    return GoldenBench()


@pytest.mark.parametrize("mutant", ORACLE, ids=str)
def test_mutant_when_compared_with_transformers_then_its_metrics_are_red(bench: OracleBench, mutant: OracleMutant):
    control = bench.control(mutant)
    assert all(reading.value <= LINE / 4 for reading in control.values()), control  # the line is far above the noise
    outcome = judge(mutant, bench.measure(mutant), control)
    assert outcome.verdict == ("equivalent" if mutant.equivalent else "caught"), outcome.detail
    assert not any(reading.red for reading in bench._readings(mutant.case, False).values())  # the fault is out again


@pytest.mark.parametrize("mutant", GENERATION, ids=str)
def test_mutant_when_compared_with_written_answers_then_its_metrics_are_red(goldens: GoldenBench, mutant: GoldenMutant):
    control = goldens.control(mutant)
    assert not any(reading.red for reading in control.values()), control
    outcome = judge(mutant, goldens.measure(mutant), control)
    assert outcome.verdict == "caught", outcome.detail


def test_mutant_table_when_read_then_covers_every_family():
    shown = {word for mutant in ORACLE for word in [mutant.case.split()[0]]}
    names = {"gpt_bigcode": "bigcode", "gpt_neox": "neox", "gemma3_text": "gemma3"}
    assert {names.get(family, family) for family in FAMILIES} - {"tformer"} == shown
