"""Ctrl-C and SIGTERM at moments when Python would lose the exception that they raise."""

from __future__ import annotations

import _thread
import contextlib
import gc
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

# Seconds after which a signal that a command has not ended for is raised again.
_AGAIN = 3.0


@contextlib.contextmanager
def insistent_signals(again: float = _AGAIN) -> Iterator[list[int]]:
    """Within it Ctrl-C raises KeyboardInterrupt and SIGTERM SystemExit(143), and again every few seconds until it is left.

    One exception alone may be lost: Python drops what is raised inside a finaliser or a weak reference's callback, and torch
    has many. Where Ctrl-C is ignored it stays so.

    Args:
        again: Seconds between two.

    Yields:
        The signals that came.
    """
    came: list[int] = []
    left = threading.Event()

    def insist(number: int) -> None:
        while not left.wait(again):
            _thread.interrupt_main(signal.Signals(number))

    def handle(number: int, frame: FrameType | None) -> None:
        if number not in came:
            came.append(number)
            threading.Thread(target=insist, args=(number,), daemon=True).start()
        if number == signal.SIGTERM:
            raise SystemExit(143)
        signal.default_int_handler(number, frame)

    kept = {signal.SIGTERM: signal.signal(signal.SIGTERM, handle)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        kept[signal.SIGINT] = signal.signal(signal.SIGINT, handle)
    try:
        yield came
    finally:
        left.set()
        for number, handler in kept.items():
            signal.signal(number, handler)


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
