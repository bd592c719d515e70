"""A batch job: rows → buckets → completions → sink."""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tformer_deploy.batch.planner import DEFAULT_EDGES, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tformer_deploy.batch.rows import Code, Row
    from tformer_deploy.batch.sink import Sink
    from tformer_deploy.generation import Completion, Generator, Request

# Rows held at a time: enough to fill every bucket.
WINDOW = 4096


@dataclass(frozen=True)
class Summary:
    """What a job did; ``cut_short`` rows ended at ``max_length`` with fewer tokens than were asked for."""

    rows: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    padding_share: float
    cut_short: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, prefill included."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0


def run_job(
    rows: Iterable[Row],
    generator: Generator,
    sink: Sink,
    max_batch: int,
    edges: Sequence[int] = DEFAULT_EDGES,
    on_row: Callable[[], None] = lambda: None,
) -> Summary:
    """Runs every row; each gets exactly one result.

    Rows are taken in windows, so that memory does not grow with the file; buckets are made within a window.

    Args:
        rows: In input order.
        generator: Over the loaded model.
        sink: Takes the results.
        max_batch: Rows that run together.
        edges: Bucket edges, in prompt tokens.
        on_row: Called after each result.
    """
    started, job = time.perf_counter(), _Job(generator, sink, on_row)
    iterator = iter(rows)
    while window := list(itertools.islice(iterator, WINDOW)):
        job.run_window(window, max_batch, edges)
    padding = generator.session.counters.padding_share
    seconds = time.perf_counter() - started
    return Summary(job.rows, job.failed, job.prompt_tokens, job.completion_tokens, seconds, padding, job.cut_short)


class _Job:
    """Counts, and turns what comes back into result rows."""

    def __init__(self, generator: Generator, sink: Sink, on_row: Callable[[], None]) -> None:
        self._generator, self._sink, self._on_row = generator, sink, on_row
        self.rows = self.failed = self.prompt_tokens = self.completion_tokens = self.cut_short = 0

    def run_window(self, window: Sequence[Row], max_batch: int, edges: Sequence[int]) -> None:
        first = self.rows
        self.rows += len(window)
        good: list[tuple[int, Row, Request]] = []
        for index, row in enumerate(window, first):
            if row.request is None:
                assert row.error is not None
                self._fail(index, row, row.error.code, row.error.message)
            else:
                good.append((index, row, row.request))
        for bucket in plan([len(request.input_ids) for _, _, request in good], edges):
            taken = [good[i] for i in bucket]
            done = functools.partial(self._finish, [(index, row) for index, row, _ in taken])
            self._generator.generate([request for _, _, request in taken], max_batch, done)

    def _finish(self, taken: list[tuple[int, Row]], place: int, completion: Completion) -> None:
        index, row = taken[place]
        if completion.error is not None:
            self._fail(index, row, "bad_logits", completion.error)
            return
        result = result_row(row, completion)
        self.prompt_tokens += result["prompt_tokens"]
        self.completion_tokens += result["completion_tokens"]
        assert row.request is not None
        self.cut_short += completion.finish_reason == "length" and len(completion.output_ids) < row.request.max_new_tokens
        self._put(index, result)

    def _fail(self, index: int, row: Row, code: Code, message: str) -> None:
        self.failed += 1
        self._put(index, {"id": row.id, "line": row.line, "error": {"code": code, "message": message}})

    def _put(self, index: int, result: dict[str, Any]) -> None:
        self._sink.put(index, result)
        self._on_row()


def result_row(row: Row, completion: Completion) -> dict[str, Any]:
    """The output row of a completion."""
    assert row.request is not None
    return {
        "id": row.id,
        "text": completion.text,
        "output_ids": list(completion.output_ids),
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(row.request.input_ids),
        "completion_tokens": len(completion.output_ids),
    }
