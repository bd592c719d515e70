"""Arrays that wait in files: a list like any other, which leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import LLAMA_LIKE, hot_decoder

from tformer_deploy.parity.oracle import ask
from tformer_deploy.parity.plan import make_plan
from tformer_deploy.parity.spool import Spool


def arrays() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.normal(size=(n, 7)).astype(np.float32) for n in (3, 0, 5)]


def filled() -> Spool:
    spool = Spool()
    for array in arrays():
        spool.append(array)
    return spool


def test_spool_when_read_then_is_the_list_that_was_written():
    spool = filled()
    assert len(spool) == 3
    for found, wanted in zip(spool, arrays(), strict=True):
        assert found.dtype == np.float32
        assert np.array_equal(found, wanted)
    assert [len(a) for a in spool[1:]] == [0, 5]
    for bad in (3, -1):
        with pytest.raises(IndexError):
            spool[bad]


def test_spool_when_an_array_is_changed_by_a_reader_then_refuses():
    with pytest.raises(ValueError, match="read-only"):
        filled()[0][0, 0] = 1


def test_spool_when_it_goes_then_its_files_go():
    spool = filled()
    folder = Path(spool._folder.name)
    assert len(list(folder.iterdir())) == 3
    del spool
    assert not folder.exists()


def test_oracle_when_asked_then_its_logits_are_not_held_in_memory():
    plan = make_plan(LLAMA_LIKE, LLAMA_LIKE.max_length, "quick")
    oracle = ask(hot_decoder(LLAMA_LIKE), plan)
    assert all(isinstance(logits, np.memmap) for logits in oracle.logits)
    assert [len(logits) for logits in oracle.logits] == [len(row) for row in plan.rows]
    assert oracle.not_finite == 0
