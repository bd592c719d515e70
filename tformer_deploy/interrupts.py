"""Ctrl-C and SIGTERM at moments when Python would lose the exception that they raise."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def collect_garbage() -> None:
    """Gives memory back; a signal that comes meanwhile waits until it is done."""
    with signals_wait():
        gc.collect()


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Within it SIGINT and SIGTERM wait: raised inside a finaliser or a weak reference's callback, an exception is printed and dropped."""
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread only
        yield
        return
    came: list[int] = []
    kept = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])
