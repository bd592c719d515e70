"""Processes that hold one loaded model each and answer prompts in turn."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments import UnmetError, script, variables

ANSWER_S = 900.0  # a peer that takes longer for one prompt hangs
_LAST_WORDS = 4000


@dataclass(frozen=True)
class Entry:
    """One line of the tables: a peer, or one of our bundles, in one precision."""

    name: str
    peer: str
    precision: str
    python: Path
    folder: Path


class Worker:
    """A started process; use as a context.

    Raises:
        UnmetError: It cannot load the model.
    """

    def __init__(self, entry: Entry, threads: int, out: Path) -> None:
        self.entry = entry
        self._log = out / "logs" / f"{entry.folder.parent.name}-{entry.name.replace(' ', '-')}-serve.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._errors = self._log.open("w")
        command = [
            str(entry.python),
            script(entry.peer),
            "serve",
            str(entry.folder),
            entry.precision,
            str(threads),
        ]
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=variables(out)
        )
        try:
            self.ready = self._answer()
        except UnmetError:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, rows: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """The worker's answer (see protocol.py).

        Raises:
            UnmetError: It cannot run this.
        """
        assert self._process.stdin is not None
        try:
            print(json.dumps({"rows": rows, "new_tokens": new_tokens}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise UnmetError(self._end()) from None
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watch = threading.Timer(ANSWER_S, self._process.kill)
        watch.start()
        line = self._process.stdout.readline()
        late = not watch.is_alive()
        watch.cancel()
        if late:
            raise UnmetError(f"no answer within {ANSWER_S:.0f} s")
        if not line:
            raise UnmetError(self._end())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UnmetError(answer["error"])
        return answer

    def _end(self) -> str:
        code = self._process.wait()
        lines = self._log.read_text(errors="replace")[-_LAST_WORDS:].strip().splitlines()
        return f"the process ended with {code}: {lines[-1] if lines else 'no word'} ({self._log.name})"
