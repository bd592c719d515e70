"""Sampling as README states it, written again for tests: slow, and from the published inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from tformer_deploy.generation.sampling import SamplingOptions

_GOLDENS = Path(__file__).parent / "goldens" / "sampling.json"


def goldens() -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """The published cases, each with its logits; ids of positions 0 to 7 are under ``ids``."""
    for case in json.loads(_GOLDENS.read_text("utf-8")):
        random = np.random.Generator(np.random.Philox(key=case["logits_key"]))
        yield case, random.standard_normal(case["vocab"]).astype(np.float32) * 3


def draws(count: int) -> Iterator[tuple[np.ndarray, SamplingOptions, list[int]]]:
    """Random logits, options and histories; the logits are rounded, so that ties happen, every fourth time of the largest."""
    random = np.random.default_rng(0)
    for i in range(count):
        logits = (random.standard_normal(random.integers(2, 60)) * 3).astype(np.float32)
        logits = logits.round(1) if i % 4 else logits.clip(-3, 3).round()
        options = SamplingOptions(
            float(random.choice([0, 0.3, 1.0, 2.5])), int(random.integers(0, 70)), float(random.choice([0.0, 0.3, 0.9, 1.0])),
            float(random.choice([0.0, 0.1])), float(random.choice([1.0, 1.3])),
        )  # fmt: skip
        yield logits, options, random.integers(0, len(logits), 5).tolist()


def slow_sample(logits: np.ndarray, options: SamplingOptions, seed: int, position: int, history: list[int]) -> int:
    """The documented rule again, in plain Python over lists."""
    temperature, top_k, top_p, min_p, penalty = astuple(options)
    scores = [float(x) for x in logits]
    for i in set(history) if penalty != 1 else ():
        scores[i] = scores[i] / penalty if scores[i] > 0 else scores[i] * penalty
    if temperature == 0:
        return max(range(len(scores)), key=lambda i: (scores[i], -i))
    scores = [s / temperature for s in scores]
    ids = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if top_k:
        ids = [i for i in ids if scores[i] >= scores[ids[min(top_k, len(ids)) - 1]]]

    def shares(ids: list[int]) -> list[float]:
        top = max(scores[i] for i in ids)
        weights = [math.exp(scores[i] - top) for i in ids]
        return [w / sum(weights) for w in weights]

    if top_p < 1:
        total, keep = 0.0, []
        for i, p in zip(ids, shares(ids), strict=True):
            if keep and total >= top_p:
                break
            keep.append(i)
            total += p
        ids = keep
    if min_p:
        p = shares(ids)
        ids = [i for i, x in zip(ids, p, strict=True) if x >= min_p * p[0]]
    u = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
    total = 0.0
    for i, p in zip(ids, shares(ids), strict=True):
        total += p
        if total > u:
            return i
    return ids[-1]
