from __future__ import annotations

import math

import numpy as np
import pytest
from sampling_rule import draws, goldens, slow_sample

from tformer_deploy.errors import UsageError
from tformer_deploy.generation.sampling import SamplingOptions, kept, row_seed, sample, uniform


def test_sample_when_compared_with_the_published_goldens_then_gives_the_same_ids():
    for case, logits in goldens():
        options = SamplingOptions(**case["options"])
        assert [sample(logits, options, case["seed"], p, case["history"]) for p in range(8)] == case["ids"], case


def test_sample_when_compared_with_the_slow_rule_then_agrees():
    for seed, (logits, options, history) in enumerate(draws(300)):
        assert sample(logits, options, seed, 7, history) == slow_sample(logits, options, seed, 7, history)


@pytest.mark.parametrize(("top_p", "size"), [(0.6, 2), (0.85, 3), (1.0, 4), (0.0, 1)])
def test_kept_when_top_p_is_crossed_by_a_token_then_that_token_stays(top_p: float, size: int):
    scores = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    ids, probabilities = kept(scores, SamplingOptions(temperature=1.0, top_p=top_p))
    assert len(ids) == size
    assert probabilities.sum() == pytest.approx(1)


def test_kept_when_compared_with_transformers_warpers_then_has_the_same_support():
    torch = pytest.importorskip("torch")
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    random = np.random.default_rng(1)
    for _ in range(100):
        logits = random.standard_normal(50) * 2  # no ties: there the order is our own
        wanted = torch.tensor(logits)[None]
        for warper in (TopKLogitsWarper(8), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)):
            wanted = warper(torch.tensor([[0]]), wanted)
        ids, _ = kept(logits, SamplingOptions(1.0, 8, 0.8, 0.05))
        assert set(ids.tolist()) == set(torch.isfinite(wanted[0]).nonzero()[:, 0].tolist())


def test_sample_when_drawn_often_then_follows_the_probabilities():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(probabilities).astype(np.float32)
    n = 4000
    counts = np.bincount([sample(logits, SamplingOptions(temperature=1.0), 5, p, []) for p in range(n)], minlength=4)
    assert ((counts - n * probabilities) ** 2 / (n * probabilities)).sum() < 16.27  # chi-square, 3 degrees, p = 0.001


def test_sample_when_temperature_is_tiny_then_is_greedy_and_when_one_then_is_not():
    logits = np.array([1.0, 3.0, 2.9], dtype=np.float32)
    assert {sample(logits, SamplingOptions(temperature=1e-9), s, 0, []) for s in range(50)} == {1}
    assert len({sample(logits, SamplingOptions(temperature=1.0), s, 0, []) for s in range(50)}) > 1


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_k": True}, {"top_p": 1.1},
     {"top_p": -0.1}, {"min_p": 2}, {"repetition_penalty": 0}, {"temperature": "1"}],
)  # fmt: skip
def test_options_when_out_of_range_then_are_refused_by_name(options: dict):
    with pytest.raises(UsageError, match=next(iter(options))):
        SamplingOptions(**options)


def test_seeds_when_line_or_position_changes_then_change():
    assert len({row_seed(0, line) for line in range(100)}) == 100
    assert len({uniform(3, p) for p in range(100)}) == 100
    assert row_seed(1, 2) == int.from_bytes(__import__("hashlib").sha256(b"1:2").digest()[:8], "little")
