"""Ctrl-C is never lost: not inside garbage collection, not while modules are imported."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref

import pytest

from tformer_deploy import cli
from tformer_deploy.interrupts import collect_garbage, insistent_signals, signals_wait


class Knot:
    """Lives until the garbage is collected."""

    def __init__(self) -> None:
        self.me = self


def test_collection_when_a_signal_comes_inside_a_callback_then_is_raised_afterwards(capsys):
    gc.collect()
    knot = Knot()
    kept = weakref.ref(knot, lambda _: signal.raise_signal(signal.SIGINT))
    del knot
    with pytest.raises(KeyboardInterrupt):
        collect_garbage()
    assert kept() is None
    assert "Exception ignored" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_when_it_must_wait_then_its_own_handler_runs_once_at_the_end(number):
    came: list[str] = []
    before = signal.signal(number, lambda *_: came.append("handled"))
    try:
        with signals_wait():
            signal.raise_signal(number)
            signal.raise_signal(number)
            came.append("inside")
    finally:
        signal.signal(number, before)
    assert came == ["inside", "handled"]


def test_signals_when_in_another_thread_then_are_left_alone():
    failures: list[BaseException] = []

    def work() -> None:
        try:
            collect_garbage()
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []


@pytest.mark.parametrize("error", [ImportError("numpy._core.umath failed to import"), RecursionError()])
def test_command_when_ctrl_c_becomes_another_error_then_still_ends_with_130(monkeypatch, capsys, error):
    def main(**_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None

    monkeypatch.setattr(cli.cli, "main", main)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert cli.run(["doctor"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Stopped by Ctrl-C" in capsys.readouterr().err


def test_command_when_ctrl_c_is_ignored_then_stays_so(monkeypatch):
    monkeypatch.setattr(cli.cli, "main", lambda **_: 0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert cli.run(["doctor"]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_when_its_exception_is_lost_then_is_raised_again(number, error, recwarn):
    """The first one comes inside a callback, where Python drops it."""
    knot = Knot()
    kept = weakref.ref(knot, lambda _: signal.raise_signal(number))
    started = time.monotonic()
    with pytest.raises(error), insistent_signals(again=0.1) as came:  # noqa: PT012
        del knot
        gc.collect()
        while time.monotonic() - started < 10:
            time.sleep(0.01)
    assert came == [number]
    assert kept() is None
    assert time.monotonic() - started < 5


def test_signal_when_the_command_has_ended_then_is_not_raised_again():
    with pytest.raises(KeyboardInterrupt), insistent_signals(again=0.05):
        signal.raise_signal(signal.SIGINT)
    time.sleep(0.2)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
