"""Planner, rows, job and sink without a real model where none is needed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import LLAMA_LIKE, hot_decoder
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_deploy.backends import Session
from tformer_deploy.batch import job
from tformer_deploy.batch.job import run_job
from tformer_deploy.batch.planner import plan
from tformer_deploy.batch.rows import LINE_LIMIT, Defaults, Row, read_rows, scan
from tformer_deploy.batch.sink import OrderedFile
from tformer_deploy.errors import InputError, UsageError
from tformer_deploy.generation import Generator, SamplingOptions

DEFAULTS = Defaults(SamplingOptions(), 4, (), 0)


def rows_of(data: bytes, defaults: Defaults = DEFAULTS) -> list[Row]:
    scan(io.BytesIO(data))
    return list(read_rows(io.BytesIO(data), LLAMA_LIKE, 256, None, defaults))


def code(line: bytes) -> str | None:
    (row,) = rows_of(line)
    return None if row.error is None else row.error.code


class ListSink:
    def __init__(self) -> None:
        self.rows: dict[int, dict] = {}

    def put(self, index: int, row: dict) -> None:
        assert index not in self.rows
        self.rows[index] = row


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3000), max_size=60), st.lists(st.integers(1, 2000), min_size=1, max_size=6, unique=True))
def test_plan_when_given_any_lengths_then_every_row_is_in_one_bucket_that_holds_it(lengths: list[int], edges: list[int]):
    edges = sorted(edges)
    buckets = plan(lengths, edges)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(lengths)))
    for bucket in buckets:
        longest, shortest = max(lengths[i] for i in bucket), min(lengths[i] for i in bucket)
        assert not [e for e in edges if shortest <= e < longest]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"input_ids": [1]}', None),
        (b'{"input_ids": [1], "temperature": 1}', None),
        (b'{"input_ids": [1], "max_new_tokens": 0}', None),
        (b'{"input_ids": [1], "seed": 18446744073709551615}', None),
        (b'{"input_ids": [1], "seed": 18446744073709551616}', "invalid_field"),
        (b'{"input_ids": [1], "seed": -1}', "invalid_field"),
        (b'{"input_ids": [1], "temperature": "hot"}', "invalid_field"),
        (b'{"input_ids": [1], "temperature": true}', "invalid_field"),
        (b'{"input_ids": [1], "temperature": null}', "invalid_field"),
        (b'{"input_ids": [1], "top_k": 1.5}', "invalid_field"),
        (b'{"input_ids": [1], "top_p": 1.1}', "invalid_field"),
        (b'{"input_ids": [1], "max_new_tokens": -1}', "invalid_field"),
        (b'{"input_ids": [1], "max_new_tokens": true}', "invalid_field"),
        (b'{"input_ids": [1], "stop": ""}', "invalid_field"),
        (b'{"input_ids": [1], "stop": [1]}', "invalid_field"),
        (b'{"input_ids": [1], "stop": "a"}', "no_tokenizer"),
        (b'{"input_ids": [1], "id": 1.5}', "invalid_field"),
        (b'{"input_ids": [1], "id": null}', "invalid_field"),
        (b'{"input_ids": [1], "id": "\\ud800"}', "invalid_field"),
        (b'{"input_ids": [true]}', "invalid_field"),
        (b'{"input_ids": "1"}', "invalid_field"),
        (b'{"input_ids": [131]}', "token_out_of_range"),
        (b'{"input_ids": [-1]}', "token_out_of_range"),
        (b'{"input_ids": []}', "empty_prompt"),
        (b'{"prompt": "a"}', "no_tokenizer"),
        (b'{"prompt": 5}', "invalid_field"),
        (b'{"prompt": "a", "input_ids": [1]}', "missing_prompt"),
        (b"{}", "missing_prompt"),
        (b"[]", "invalid_json"),
        (b"null", "invalid_json"),
        (b'"str"', "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"input_ids": [1], "temperature": NaN}', "invalid_json"),
        (b'{"input_ids": [1], "temperature": 1e999}', "invalid_json"),
        (b'{"input_ids": [1], "input_ids": [2]}', "invalid_json"),
        (b'{"input_ids": [' + b"9" * 5000 + b"]}", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"input_ids": [1], "id": "\xff"}', "invalid_utf8"),
        (b'{"id": "' + b"x" * LINE_LIMIT + b'"}', "line_too_long"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_rows_when_a_line_is_read_then_it_is_a_request_or_one_of_the_documented_errors(line: bytes, expected: str | None):
    assert code(line) == expected


def test_rows_when_a_prompt_is_too_long_then_the_error_has_both_numbers_and_the_flag():
    rows = rows_of(json.dumps({"input_ids": [1] * 256}).encode() + b"\n" + json.dumps({"input_ids": [1] * 257}).encode())
    assert rows[0].error is None
    assert rows[1].error is not None
    assert rows[1].error.code == "prompt_too_long"
    assert all(word in rows[1].error.message for word in ("257", "256", "--max-length"))


def test_rows_when_lines_end_in_any_way_then_line_numbers_stay_right():
    separator = "\u2028".encode()
    data = b'\xef\xbb\xbf{"input_ids": [1]}\r\n\r\n{"id": "a' + separator + b'b", "input_ids": [1]}\n\n{"input_ids": [1]}'
    assert [(row.id, row.line, row.error) for row in rows_of(data)] == [(1, 1, None), ("a\u2028b", 3, None), (5, 5, None)]


def test_rows_when_an_overlong_line_stands_between_then_the_next_one_is_read():
    rows = rows_of(b"x" * (3 * LINE_LIMIT) + b'\n{"input_ids": [1]}\n')
    assert [(row.line, row.error and row.error.code) for row in rows] == [(1, "line_too_long"), (2, None)]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"id": 1, "input_ids": [1]}\n\n{"id": "1", "input_ids": [2]}', ("Lines 1 and 3", "'1'")),
        (b'{"id": "a"}\n{"id": "a", "input_ids": [2]}', ("Lines 1 and 2",)),
        (json.dumps({"id": "x" * 10_000}).encode() * 1 + b"\n" + json.dumps({"id": "x" * 10_000}).encode(), ("Lines 1 and 2",)),
        ('{"input_ids": [1]}'.encode("utf-16"), ("UTF-16",)),
        (b"\x1f\x8b\x08\x00", ("gzip",)),
    ],
)
def test_scan_when_the_file_as_a_whole_is_bad_then_it_is_refused(data: bytes, words: tuple[str, ...]):
    with pytest.raises(InputError) as caught:
        scan(io.BytesIO(data))
    assert all(word in caught.value.message for word in words)


def test_scan_when_a_bad_line_stands_where_another_row_has_that_number_as_id_then_nothing_is_refused():
    assert scan(io.BytesIO(b'{bad\n{"id": 1, "input_ids": [1]}')).rows == 2


def test_scan_when_rows_have_unknown_fields_then_names_them():
    assert scan(io.BytesIO(b'{"input_ids": [1], "tempreature": 1}\n{"input_ids": [1], "note": 2}')).unknown == (
        "note",
        "tempreature",
    )


def test_seed_when_a_row_gives_none_then_depends_on_the_job_and_the_line_alone():
    data = b'{"input_ids": [1]}\n{"input_ids": [1]}\n{"input_ids": [1], "seed": 3}'
    seeds = [[row.request.seed for row in rows_of(data, Defaults(SamplingOptions(), 4, (), job))] for job in (0, 0, 1)]
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1] != seeds[2][1]
    assert [s[2] for s in seeds] == [3, 3, 3]


def reference_job(data: bytes, max_batch: int = 3) -> tuple[job.Summary, dict[int, dict]]:
    sink = ListSink()
    generator = Generator(Session.from_decoder(hot_decoder(LLAMA_LIKE)), None, [])
    return run_job(rows_of(data), generator, sink, max_batch), sink.rows


def test_job_when_windows_are_small_then_results_are_the_same(monkeypatch):
    random = np.random.default_rng(0)
    data = b"\n".join(json.dumps({"input_ids": random.integers(0, 131, n).tolist()}).encode() for n in random.integers(1, 80, 13))
    data += b"\n{bad\n"
    summary, whole = reference_job(data)
    monkeypatch.setattr(job, "WINDOW", 4)
    again, windowed = reference_job(data, max_batch=1)
    assert whole == windowed
    assert sorted(whole) == list(range(14))
    assert (
        (summary.rows, summary.failed, summary.completion_tokens)
        == (again.rows, again.failed, again.completion_tokens)
        == (14, 1, 52)
    )
    assert 0 <= summary.padding_share < 1


def test_job_when_logits_are_not_finite_then_that_row_alone_fails():
    class Poisoned(Session):
        """The row whose prompt starts with 9 gets NaN."""

        def _fill(self, rows, prompts):
            logits = super()._fill(rows, prompts)
            for i, prompt in enumerate(prompts):
                if prompt[0] == 9:
                    logits[i, 3] = np.nan
            return logits

    sink = ListSink()
    rows = rows_of(b'{"input_ids": [1]}\n{"id": "bad", "input_ids": [9]}\n{"input_ids": [2]}')
    session = Poisoned.from_decoder(hot_decoder(LLAMA_LIKE))
    summary = run_job(rows, Generator(session, None, []), sink, 3)
    assert summary.failed == 1
    assert sink.rows[1]["error"]["code"] == "bad_logits"
    assert (sink.rows[1]["id"], sink.rows[1]["line"]) == ("bad", 2)
    assert [sink.rows[i]["completion_tokens"] for i in (0, 2)] == [4, 4]


def test_sink_when_results_come_in_any_order_then_the_file_has_the_order_of_the_input(tmp_path: Path):
    with OrderedFile(tmp_path / "o", force=False) as sink:
        for index in (2, 0, 1):
            sink.put(index, {"id": index, "text": "é\u2028"})
    lines = (tmp_path / "o").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [{"id": i, "text": "é\u2028"} for i in range(3)]
    assert os.listdir(tmp_path) == ["o"]


def test_sink_when_the_job_breaks_off_then_the_old_output_stays_and_nothing_else(tmp_path: Path):
    (tmp_path / "o").write_text("old")

    def broken() -> None:
        with OrderedFile(tmp_path / "o", force=True) as sink:
            sink.put(0, {"id": 0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert (tmp_path / "o").read_text() == "old"
    assert os.listdir(tmp_path) == ["o"]


def test_sink_when_the_disk_is_full_then_no_output_is_named(tmp_path: Path, monkeypatch):
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"), OrderedFile(tmp_path / "o", force=False) as sink:
        sink.put(0, {"id": 0})
    assert os.listdir(tmp_path) == []


def test_sink_when_a_killed_run_left_its_temporary_file_then_it_is_removed_and_a_live_one_is_not(tmp_path: Path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, alive = tmp_path / f"o.tformer-tmp-{ended.pid}", tmp_path / f"o.tformer-tmp-{os.getppid()}"
    other = tmp_path / f"p.tformer-tmp-{ended.pid}"
    for path in (dead, alive, other):
        path.write_text("")
    with OrderedFile(tmp_path / "o", force=False):
        pass
    assert sorted(os.listdir(tmp_path)) == sorted(["o", alive.name, other.name])


@pytest.mark.parametrize("kind", ["file", "folder", "fifo", "link"])
def test_sink_when_the_output_exists_then_only_a_file_can_be_replaced_and_only_by_force(tmp_path: Path, kind: str):
    path = tmp_path / "o"
    {
        "file": lambda: path.write_text("old"), "folder": path.mkdir, "fifo": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
    }[kind]()  # fmt: skip
    with pytest.raises(UsageError):
        OrderedFile(path, force=False)
    if kind == "file":
        OrderedFile(path, force=True)
    else:
        with pytest.raises(UsageError, match="no regular file"):
            OrderedFile(path, force=True)
