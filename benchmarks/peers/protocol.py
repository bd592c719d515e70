"""How run.py and a worker talk: JSON lines over the worker's stdin and stdout. Plain Python: every peer's environment runs it.

A worker says ``{"ready": true, "versions": …, "load_s": …}`` once it is loaded. To ``{"rows": [[ids] …], "new_tokens": n}`` it answers
``{"first_s": …, "steps_s": […], "tokens": [[ids] …], "memory": {…}}``; to what it cannot do, ``{"error": "one line"}``.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    OnStep = Callable[[list[int]], None]


class Model(Protocol):
    """A loaded model of a peer."""

    def run(self, rows: list[list[int]], new_tokens: int, on_step: OnStep) -> None:
        """Greedy completion of rows of one length; never stops early.

        Args:
            rows: Token ids of each prompt.
            new_tokens: Tokens to make for each, at least 1.
            on_step: Called with the next token of every row as soon as all of them are known.
        """


class Peer(Protocol):
    """One module of this folder: how a peer is installed, given the weights, and loaded.

    Attributes:
        REQUIREMENTS: What pip installs, pinned.
        PRECISIONS: What it can run.
        REMOVED: Where present, what is uninstalled again.
        BUILD: Where present, variables of pip's environment.
        PACKAGES: Whose versions are stamped.
    """

    REQUIREMENTS: tuple[str, ...]
    PRECISIONS: tuple[str, ...]
    PACKAGES: tuple[str, ...]

    def convert(self, checkpoint: Path, precision: str, folder: Path) -> None:
        """Writes the peer's own form of a Hugging Face checkpoint into a new folder."""

    def load(self, folder: Path, precision: str, threads: int) -> Model:
        """The model, ready to run."""


def main(peer: Peer) -> None:
    """``PEER.py convert CHECKPOINT PRECISION FOLDER`` or ``PEER.py serve FOLDER PRECISION THREADS``."""
    action, *arguments = sys.argv[1:]
    if action == "convert":
        checkpoint, precision, folder = arguments
        peer.convert(Path(checkpoint), precision, Path(folder))
    elif action == "serve":
        folder, precision, threads = arguments
        serve(lambda: peer.load(Path(folder), precision, int(threads)), peer.PACKAGES)
    else:
        raise SystemExit(f"{action!r} is neither convert nor serve.")


def serve(load: Callable[[], Model], packages: tuple[str, ...]) -> None:
    """Loads the model and answers requests until stdin ends."""
    # Libraries print what they like on stdout; answers go where stdout was.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: dict[str, object]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    started = time.perf_counter()
    try:
        model = load()
    except Exception as e:
        say({"error": one_line(e)})
        return
    say({"ready": True, "versions": versions(packages), "load_s": time.perf_counter() - started})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say(_timed(model, request["rows"], request["new_tokens"]))
        except Exception as e:
            say({"error": one_line(e)})


def _timed(model: Model, rows: list[list[int]], new_tokens: int) -> dict[str, object]:
    times = [time.perf_counter()]
    steps: list[list[int]] = []

    def on_step(tokens: list[int]) -> None:
        times.append(time.perf_counter())
        steps.append([int(token) for token in tokens])

    model.run(rows, new_tokens, on_step)
    if len(steps) != new_tokens or any(len(step) != len(rows) for step in steps):
        raise ValueError(f"{len(steps)} steps of {[len(s) for s in steps][:3]} tokens for {new_tokens} of {len(rows)} rows")
    seconds = [b - a for a, b in itertools.pairwise(times)]
    tokens = [list(row) for row in zip(*steps, strict=True)]
    return {"first_s": seconds[0], "steps_s": seconds[1:], "tokens": tokens, "memory": memory()}


def memory() -> dict[str, float | None]:
    """Proportional and peak resident memory of this process, MiB; None where the kernel does not say."""
    return {"pss_mib": _field("smaps_rollup", "Pss"), "peak_mib": _field("status", "VmHWM")}


def _field(file: str, name: str) -> float | None:
    try:
        lines = Path("/proc/self", file).read_text("utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), None)


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Those of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def one_line(error: BaseException) -> str:
    """An error as a line that can stand in a table's note."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]
