"""A batch job: rows → buckets → completions → sink."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tformer_deploy.batch.planner import DEFAULT_EDGES, plan
from tformer_deploy.generation import Completion, Generator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tformer_deploy.batch.rows import Row
    from tformer_deploy.batch.sink import Sink


@dataclass(frozen=True)
class Summary:
    """What a job did."""

    rows: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    padding_share: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, prefill included."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0


def run_job(
    rows: Sequence[Row],
    generator: Generator,
    sink: Sink,
    max_batch: int,
    edges: Sequence[int] = DEFAULT_EDGES,
    on_row: Callable[[], None] = lambda: None,
) -> Summary:
    """Runs every row; each gets exactly one result.

    Args:
        rows: In input order.
        generator: Over the loaded model.
        sink: Takes the results.
        max_batch: Rows that run together.
        edges: Bucket edges, in prompt tokens.
        on_row: Called after each result.
    """
    started, prompt_tokens, completion_tokens, failed = time.perf_counter(), 0, 0, 0
    good: list[int] = []
    for index, row in enumerate(rows):
        if row.error is not None:
            failed += 1
            sink.put(index, {"id": row.id, "line": row.line, "error": {"code": row.error.code, "message": row.error.message}})
            on_row()
        else:
            good.append(index)
    requests = [request for i in good if (request := rows[i].request) is not None]

    def done(index: int, completion: Completion) -> None:
        nonlocal prompt_tokens, completion_tokens
        row = rows[index]
        assert row.request is not None
        prompt_tokens += len(row.request.input_ids)
        completion_tokens += len(completion.output_ids)
        sink.put(index, result_row(row, completion))
        on_row()

    for bucket in plan([len(r.input_ids) for r in requests], edges):
        indices = [good[i] for i in bucket]
        generator.generate([requests[i] for i in bucket], max_batch, lambda i, c, at=indices: done(at[i], c))  # type: ignore[misc]
    padding = generator.session.counters.padding_share
    return Summary(len(rows), failed, prompt_tokens, completion_tokens, time.perf_counter() - started, padding)


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
