"""tformer-deploy itself: the profile that it chooses for this processor. Runs in the environment of run.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import protocol

if TYPE_CHECKING:
    from protocol import Model, OnStep

REQUIREMENTS = ()
PRECISIONS = ("fp32", "int8", "int4")
PACKAGES = ("tformer-deploy", "onnxruntime")


def convert(checkpoint: Path, precision: str, folder: Path) -> None:
    from tformer_deploy import export

    if precision == "fp32":
        export(checkpoint, folder, check=False)
    else:
        # Without a calibration, which changes the values and not the speed.
        export(checkpoint, folder, quantize=precision, block=128, check=False)


def load(folder: Path, precision: str, threads: int) -> Model:
    from tformer_deploy.backends import open_session
    from tformer_deploy.bundle import open_bundle

    session = open_session(open_bundle(folder), threads=threads)
    for note in session.backend.notes:
        print(note)
    return _Model(session)


class _Model:
    def __init__(self, session: Any) -> None:
        self._session = session

    def run(self, rows: list[list[int]], new_tokens: int, on_step: OnStep) -> None:
        tokens = self._session.prefill(rows).argmax(-1).tolist()
        on_step(tokens)
        for _ in range(new_tokens - 1):
            tokens = self._session.decode(tokens).argmax(-1).tolist()
            on_step(tokens)


if __name__ == "__main__":
    protocol.main(sys.modules[__name__])
