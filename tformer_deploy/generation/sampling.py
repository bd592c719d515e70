"""Sampling as a pure function of (logits, options, row seed, token position): the batch a row lies in changes nothing."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen; the filters apply in the order of the fields.

    Attributes:
        repetition_penalty: Logits of ids already in the row are divided by it where positive, multiplied where negative.
        temperature: Logits are divided by it; 0 is greedy.
        top_k: Keep the k largest logits, and any that ties with the last of them; 0 keeps all.
        top_p: Keep the smallest set of the likeliest tokens that reaches this probability, at least one.
        min_p: Keep tokens of at least this share of the likeliest one's probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0, math.inf), ("top_p", 0, 1), ("min_p", 0, 1)):
            value = getattr(self, name)
            if not _number(value) or not low <= value <= high:
                raise UsageError(f"{name} is {value!r}; expected a number from {low} to {high}.", f"Choose another {name}.")
        if type(self.top_k) is not int or self.top_k < 0:
            raise UsageError(f"top_k is {self.top_k!r}; expected a whole number from 0.", "Choose another top_k; 0 keeps all.")
        if not _number(self.repetition_penalty) or self.repetition_penalty <= 0:
            found = f"repetition_penalty is {self.repetition_penalty!r}"
            raise UsageError(f"{found}; expected a number above 0.", "Choose another one; 1 changes nothing.")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def row_seed(job_seed: int, line: int) -> int:
    """The seed of a row that gives none: the first 8 bytes, little-endian, of sha256 of ``"<job seed>:<line index>"``."""
    return int.from_bytes(hashlib.sha256(f"{job_seed}:{line}".encode()).digest()[:8], "little")


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of one token: numpy's Philox with ``key=seed`` and ``counter=position``."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def sample(logits: NDArray[np.float32], options: SamplingOptions, seed: int, position: int, history: Sequence[int]) -> int:
    """The next token id.

    Args:
        logits: [V].
        options: The filters.
        seed: The row's.
        position: Tokens before this one in the row, prompt included.
        history: Those tokens.
    """
    scores = logits.astype(np.float64)
    if options.repetition_penalty != 1.0 and len(history):
        seen = np.unique(np.asarray(history))
        penalty = options.repetition_penalty
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    if options.temperature == 0:
        return int(scores.argmax())
    # Subtracting first keeps tiny temperatures finite.
    ids, probabilities = kept((scores - scores.max()) / options.temperature, options)
    index = int(np.searchsorted(probabilities.cumsum(), uniform(seed, position), side="right"))
    return int(ids[min(index, len(ids) - 1)])


def kept(scores: NDArray[np.float64], options: SamplingOptions) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids that pass the filters, likeliest first and then by id, and their probabilities."""
    order = np.lexsort((np.arange(len(scores)), -scores))
    if 0 < options.top_k < len(scores):
        order = order[scores[order] >= scores[order[options.top_k - 1]]]
    probabilities = _softmax(scores[order])
    if options.top_p < 1:
        before = np.concatenate(([0.0], probabilities.cumsum()[:-1]))
        keep = before < options.top_p
        keep[0] = True
        order, probabilities = order[keep], _softmax(scores[order[keep]])
    if options.min_p > 0:
        keep = probabilities >= options.min_p * probabilities[0]
        order, probabilities = order[keep], _softmax(scores[order[keep]])
    return order, probabilities


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(scores - scores.max())
    result: NDArray[np.float64] = weights / weights.sum()
    return result
