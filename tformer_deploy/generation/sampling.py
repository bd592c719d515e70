"""Sampling as a pure function of (logits, options, row seed, token position): the batch a row lies in changes nothing."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tformer_deploy.errors import TformerError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_SEED = 2**64 - 1
_FIRST_SORTED = 512


class LogitsError(TformerError):
    """The model gave logits that no token can be chosen from (exit 1: a result, not a wrong input)."""

    exit_code = 1


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
    """The next token id: the first of the kept ones, likeliest first, whose cumulative probability exceeds the random number.

    Args:
        logits: [V].
        options: The filters.
        seed: The row's.
        position: Tokens before this one in the row, prompt included.
        history: Those tokens.

    Raises:
        LogitsError: A logit is NaN or +inf, or all are -inf.
    """
    scores = logits.astype(np.float64)
    top = scores.max()
    if not np.isfinite(top):
        raise LogitsError(f"The logits of token {position} have the maximum {top}.", "Check the bundle: tformer-deploy check.")
    if options.repetition_penalty != 1.0 and len(history):
        seen = np.unique(np.asarray(history))
        penalty = options.repetition_penalty
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
        top = scores.max()
    if options.temperature == 0:
        return int(scores.argmax())
    u = uniform(seed, position)
    # Subtracting first keeps tiny temperatures finite.
    ids, cumulative, total = _likeliest((scores - top) / options.temperature, options, u)
    return int(ids[min(int(np.searchsorted(cumulative, u * total, side="right")), len(ids) - 1)])


def kept(scores: NDArray[np.float64], options: SamplingOptions) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids that pass the filters, likeliest first and then by id, and their probabilities."""
    ids, cumulative, total = _likeliest(scores - scores.max(), options, 1.0)
    return ids, np.diff(cumulative, prepend=0.0) / total


def _likeliest(
    scores: NDArray[np.float64], options: SamplingOptions, share: float
) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
    """Kept ids, likeliest first and then by id, as far as ``share`` of their weight needs them.

    Sorting a whole vocabulary for each token would cost more than a decode step; the likeliest few hundred nearly always do.

    Returns:
        Ids, their cumulative weights, and the weight of all kept ids; the largest weight is 1.
    """
    candidates = np.arange(len(scores))
    if 0 < options.top_k < len(scores):
        candidates = _largest(scores, candidates, options.top_k)
    weights = np.exp(scores)
    total = float(weights[candidates].sum())
    count = _FIRST_SORTED
    while True:
        some = _largest(scores, candidates, count)
        ids = some[np.argsort(-scores[some], kind="stable")]
        cumulative = weights[ids].cumsum()
        end = _end(weights[ids], cumulative, total, options)
        if end < len(ids):
            return ids[:end], cumulative[:end], float(cumulative[end - 1])
        filtered = options.top_p < 1 or options.min_p > 0
        if len(ids) == len(candidates) or (not filtered and cumulative[-1] > share * total):
            return ids, cumulative, float(cumulative[-1]) if len(ids) == len(candidates) else total
        count *= 16


def _largest(scores: NDArray[np.float64], candidates: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The candidates with the ``count`` largest scores and all that tie with the last of them, ascending by id."""
    if count >= len(candidates):
        return candidates
    found = scores[candidates]
    chosen: NDArray[np.int64] = candidates[found >= np.partition(found, len(found) - count)[len(found) - count]]
    return chosen


def _end(weights: NDArray[np.float64], cumulative: NDArray[np.float64], total: float, options: SamplingOptions) -> int:
    """How many of the sorted ids top_p and min_p keep; both keep a leading part, at least one."""
    end = len(weights)
    if options.top_p < 1:
        end = min(end, 1 + int(np.searchsorted(cumulative, options.top_p * total, side="left")))
    if options.min_p > 0:
        end = min(end, int(np.searchsorted(-weights, -options.min_p, side="right")))
    return max(end, 1)
