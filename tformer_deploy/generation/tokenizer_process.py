"""Talks to the process that runs a bundle's tokenizer.

A ``tokenizer.json`` is foreign: its regular expressions can take for ever, its replacements can fill the memory, and the native
library holds Python's lock meanwhile or aborts. So it runs in a child with limits, and what goes wrong there is an error here.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from tformer_deploy.errors import InputError, ResourceError, escaped
from tformer_deploy.generation.tokenizer_child import LOAD_PER_MIB, MIB, SECONDS, TEXT_PER_MIB

_CHILD = Path(__file__).with_name("tokenizer_child.py")
_BUSY = 3  # wall-clock seconds for one of CPU: the machine may have others to serve
_HINTS = {
    "be read": "Use a tokenizer.json that the tokenizers library loads, or run token ids.",
    "encode the text": "Change the text, or give its token ids.",
}


class TokenizerProcess:
    """A loaded ``tokenizer.json``; started again where it was ended by a limit.

    Raises:
        InputError: It does not load; the message says why.
        ResourceError: Loading takes too long or too much memory.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        with self._lock:
            self._start()

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of ``text``; ``special``: with what the tokenizer's own post-processor adds.

        Raises:
            InputError: The text cannot be encoded.
            ResourceError: It takes too long or too much memory.
        """
        ids: list[int] = self._ask({"encode": text, "special": special}, "encode the text")
        return ids

    def decode(self, ids: list[int], context: list[int]) -> str:
        """The text that ``ids`` add after ``context``; ids that the tokenizer does not know are empty."""
        text: str = self._ask({"decode": ids, "context": context}, "decode")
        return text

    def token(self, index: int) -> str | None:
        """The token of an id, None where there is none."""
        token: str | None = self._ask({"token": index}, "look up a token")
        return token

    def _ask(self, request: dict[str, Any], what: str) -> Any:
        with self._lock:
            if self._process is None:
                self._start()
            return self._exchange(json.dumps(request).encode(), what)

    def _start(self) -> None:
        environment = os.environ | {"RUST_BACKTRACE": "0", "TOKENIZERS_PARALLELISM": "false"}
        # -P: nothing beside the script is importable; the script itself imports the standard library and tokenizers alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment, bufsize=0,
        )  # fmt: skip
        self._end = weakref.finalize(self, _close, self._process)
        self._exchange(self._data, "be read")

    def _exchange(self, data: bytes, what: str) -> Any:
        assert self._process is not None
        seconds = SECONDS + (LOAD_PER_MIB if data is self._data else TEXT_PER_MIB) * len(data) / 2**20
        answer = _exchange(self._process, data, time.monotonic() + _BUSY * seconds)
        if answer is None or "value" not in answer:
            code = self._stop() if answer is None else None
            raise self._failure(answer, code, what, seconds)
        return answer["value"]

    def _stop(self) -> int:
        """Ends the process; its return code."""
        assert self._process is not None
        assert self._end is not None
        process, self._process = self._process, None
        self._end()
        return process.returncode

    def _failure(self, answer: dict[str, str] | None, code: int | None, what: str, seconds: float) -> InputError | ResourceError:
        hint = _HINTS.get(what, _HINTS["be read"])
        limit = f"tokenizer.json cannot {what} within {seconds:.0f} s and {MIB} MiB"
        if answer is not None and "error" in answer:
            reason = answer["error"].removeprefix("Cannot instantiate Tokenizer from buffer: ")
            return InputError(f"tokenizer.json cannot {what}: {escaped(reason)}.", hint)
        if answer is not None:
            return ResourceError(f"{limit}: {escaped(answer['limit'])}.", hint)
        if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE):
            return InputError(f"tokenizer.json cannot {what}: the tokenizers library crashed (signal {-code}).", hint)
        return ResourceError(f"{limit}.", hint)


def _exchange(process: subprocess.Popen[bytes], data: bytes, deadline: float) -> dict[str, Any] | None:
    """The answer to one frame; None where the process ended or did not answer in time."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(struct.pack("<I", len(data)))
        view = memoryview(data)
        while view:
            view = view[process.stdin.write(view) :]
    except OSError:
        return None
    header = _read(process.stdout.fileno(), 4, deadline)
    if header is None:
        return None
    content = _read(process.stdout.fileno(), struct.unpack("<I", header)[0], deadline)
    answer: dict[str, Any] | None = None if content is None else json.loads(content)
    return answer


def _read(descriptor: int, count: int, deadline: float) -> bytes | None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    content = bytearray()
    while len(content) < count:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return None
        piece = os.read(descriptor, min(count - len(content), 1 << 20))
        if not piece:
            return None
        content += piece
    return bytes(content)


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(0.2)  # an idle one ends when its input does
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
