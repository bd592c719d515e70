"""The bench of the oracle test: a fault goes into what product and oracle share, and transformers says what is right.

The product's own gate cannot see such a fault: the config is read once, the weights are turned once, and the graphs are
traced from the Decoder that they are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from families import logits_of

from mutation.cases import CASES, ids
from mutation.mutant import Mutant, Reading, Readings
from tformer_deploy.backends.session import Session
from tformer_deploy.reference import Decoder

Fault = Callable[[], AbstractContextManager[object]]
LINE = 1e-4
ONE_PASS = ("transformers, one pass", "max abs")
STEPS = ("transformers, prefill and 8 steps", "max abs")
SESSION = ("transformers, a session's ragged rows", "max abs")
_LENGTH, _STEPS = 48, 8


@dataclass(frozen=True)
class OracleMutant(Mutant):
    """A fault in config reading, in weight transforms, in the Decoder or in a session.

    Attributes:
        fault: Puts it in while it is entered.
        case: The checkpoint of :data:`CASES` that shows it.
    """

    fault: Fault = field(default=nullcontext, compare=False)
    case: str = "llama"

    @property
    def unchanged(self) -> str:
        """The checkpoint."""
        return self.case


class OracleBench:
    """Makes each checkpoint once and keeps its model; nothing is exported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models: dict[str, torch.nn.Module] = {}
        self.wanted: dict[tuple[str, int], torch.Tensor] = {}
        self.controls: dict[tuple[str, bool], Readings] = {}

    def control(self, mutant: Mutant) -> Readings:
        """The case with nothing changed."""
        assert isinstance(mutant, OracleMutant)
        key = mutant.case, SESSION in mutant.red
        if key not in self.controls:
            self.controls[key] = self._readings(*key)
        return self.controls[key]

    def measure(self, mutant: Mutant) -> Readings:
        """The case with the fault put in."""
        assert isinstance(mutant, OracleMutant)
        self._model(mutant.case)  # a fault is none of transformers'
        with mutant.fault():
            return self._readings(mutant.case, SESSION in mutant.red)

    @torch.inference_mode()
    def _readings(self, case: str, session: bool) -> Readings:
        self._model(case)
        decoder = Decoder.from_pretrained(self.folder / case)
        wanted = self._wanted(case, min(_LENGTH, decoder.config.max_length))
        found = {ONE_PASS: one_pass(decoder, wanted), STEPS: prefill_and_steps(decoder, wanted)}
        if session:
            found[SESSION] = session_rows(decoder, wanted)
        return {
            metric: Reading(value, f"<= {LINE:g}", not (math.isfinite(value) and value <= LINE), distance=True)
            for metric, value in found.items()
        }

    def _model(self, case: str) -> torch.nn.Module:
        if case not in self.models:
            self.models[case] = CASES[case].save(self.folder / case)
        return self.models[case]

    def _wanted(self, case: str, length: int) -> torch.Tensor:
        """Logits [3, length, V] of the rows of ``ids``, as transformers has them."""
        if (case, length) not in self.wanted:
            self.wanted[case, length] = logits_of(self._model(case), ids(3, length))
        return self.wanted[case, length]


def one_pass(decoder: Decoder, wanted: torch.Tensor) -> float:
    """Largest difference over whole rows, without a cache."""
    return _worst(decoder(ids(*wanted.shape[:2])), wanted)


def prefill_and_steps(decoder: Decoder, wanted: torch.Tensor) -> float:
    """Largest difference over a ragged prefill and eight steps, on caches that hold an earlier text's values."""
    config, (batch, length) = decoder.config, wanted.shape[:2]
    rows, lengths = ids(batch, length), torch.tensor([length - _STEPS, 13, 1])
    width = int(lengths.max())
    shape = (batch, config.n_kv_heads, length, config.head_dim)
    caches: list[torch.Tensor] = [torch.full(shape, 3.0) for _ in range(2 * config.n_layers)]
    logits, *caches = decoder.prefill(rows[:, :width], lengths[:, None] - 1, caches)
    at = torch.arange(batch)
    worst = _worst(logits[:, 0], wanted[at, lengths - 1])
    for step in range(_STEPS):
        new = rows[at, lengths + step][:, None]
        logits, *caches = decoder.decode(new, lengths + step, torch.zeros((batch, 1), dtype=torch.int64), caches)
        worst = _worse(worst, _worst(logits[:, 0], wanted[at, lengths + step]))
    return worst


def session_rows(decoder: Decoder, wanted: torch.Tensor) -> float:
    """Largest difference over the life of a session: ragged prompts, steps, a chunk, a row retired, refilled, dropped."""
    session, rows = Session.from_decoder(decoder), ids(*wanted.shape[:2]).tolist()
    lengths, worst = [9, 1, 17], 0.0
    live = [0, 1, 2]  # the text of each slot

    def compare(logits: np.ndarray, texts: list[int]) -> None:
        nonlocal worst
        right = wanted[texts, [lengths[text] - 1 for text in texts]]
        worst = _worse(worst, _worst(torch.from_numpy(logits), right))

    def extend(sizes: list[int]) -> None:
        new = [rows[text][lengths[text] : lengths[text] + size] for text, size in zip(live, sizes, strict=True)]
        for text, size in zip(live, sizes, strict=True):
            lengths[text] += size
        compare(session.extend(new), live)

    compare(session.prefill([rows[text][: lengths[text]] for text in live]), live)
    extend([1, 1, 1])
    extend([2, 5, 3])
    extend([1, 1, 1])
    session.retire([1])
    lengths[1] = 6
    compare(session.refill([1], [rows[1][:6]]), [1])
    extend([1, 1, 1])
    session.retire([0])
    assert session.compact() == [1, 2]
    live = [1, 2]
    extend([1, 1])
    return worst


def _worst(found: torch.Tensor, wanted: torch.Tensor) -> float:
    difference = (found.double() - wanted.double()).abs()
    return float(difference.max()) if bool(torch.isfinite(difference).all()) else math.nan


def _worse(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
