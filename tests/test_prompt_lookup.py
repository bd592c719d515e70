"""Prompt lookup: the same tokens, in fewer steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import LLAMA_LIKE

from tformer_deploy.backends import Session, open_session
from tformer_deploy.bundle import open_bundle
from tformer_deploy.errors import InputError
from tformer_deploy.generation import Generator, Request, SamplingOptions
from tformer_deploy.generation.lookup import guess
from tformer_deploy.reference import Decoder


@pytest.mark.parametrize(
    ("history", "count", "wanted"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 3, 4, 5, 1, 2, 3], 9, [4, 5, 1, 2, 3]),
        ([1, 2, 3, 9, 1, 2, 3, 7, 1, 2, 3], 1, [7]),  # the last place of several
        ([5, 2, 3, 8, 1, 2, 3], 1, [8]),  # two tokens, where three did not occur
        ([9, 3, 1, 2, 3], 4, []),  # one is too few
        ([7, 7, 7, 7], 3, [7]),
        ([1], 3, []),
        ([], 3, []),
        ([1, 2, 1, 2], 0, []),
    ],
)
def test_guess_when_the_end_occurred_before_then_is_what_followed(history, count, wanted):
    assert guess(history, count) == wanted


class Counting:
    """Counts what a session computes."""

    def __init__(self, session: Session) -> None:
        self.steps, self._decode = 0, session.backend.decode
        session.backend.decode = self  # type: ignore[method-assign]

    def __call__(self, *inputs):
        self.steps += 1
        return self._decode(*inputs)


def requests(**changes: object) -> list[Request]:
    rng = np.random.default_rng(3)
    rows = [[5, 6, 7, 8] * 4, rng.integers(0, 131, 9).tolist(), [9] * 12, rng.integers(0, 131, 3).tolist() * 5, [4, 5]]
    return [Request(tuple(row), max_new_tokens=40 - 3 * i, seed=i, **changes) for i, row in enumerate(rows)]


OPTIONS = {
    "greedy": SamplingOptions(),
    "sampled": SamplingOptions(temperature=0.7, top_k=20),
    "penalised": SamplingOptions(temperature=0.9, top_p=0.9, repetition_penalty=1.2),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("profile", ["auto", "portable"])
def test_tokens_when_guessed_then_are_those_of_single_steps(llama_bundle: Path, options: str, batch: int, profile):
    bundle = open_bundle(llama_bundle)
    wanted = Generator(open_session(bundle, profile=profile), None, (2,)).generate(requests(options=OPTIONS[options]), batch)
    generator = Generator(open_session(bundle, profile=profile), None, (2,), lookup=4)
    assert generator.generate(requests(options=OPTIONS[options]), batch) == wanted
    assert 0 <= generator.right <= generator.guessed


def repeating() -> Session:
    """A model that says the token after the last one, whatever came before."""
    decoder = Decoder(replace(LLAMA_LIKE, n_layers=1, vocab_size=11, tied=False)).eval()
    for block in decoder.blocks:
        block.attention.out.weight.data.zero_()
        block.feed_forward.down.weight.data.zero_()
    decoder.embedding.weight.data.zero_()
    decoder.head.weight.data.zero_()
    for token in range(11):
        decoder.embedding.weight.data[token, token] = 1.0
        decoder.head.weight.data[token, (token + 1) % 11] = 1.0
    return Session.from_decoder(decoder)


def test_steps_when_guesses_are_right_then_are_few():
    request = Request((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1), max_new_tokens=50)
    single, several = repeating(), repeating()
    counts = Counting(single), Counting(several)
    wanted = Generator(single, None, ()).generate([request])
    generator = Generator(several, None, (), lookup=7)
    assert generator.generate([request]) == wanted
    assert [c.steps for c in counts] == [49, 7]
    assert (generator.guessed, generator.right) == (42, 42)


def test_row_when_it_ends_within_a_guess_then_takes_no_more():
    request = Request((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1), max_new_tokens=50)
    assert Generator(repeating(), None, (5,), lookup=7).generate([request])[0].output_ids == (2, 3, 4, 5)


def test_row_when_the_model_is_full_then_guesses_do_not_pass_the_end(llama_bundle: Path):
    bundle = open_bundle(llama_bundle)
    rows = [Request((5, 6, 7, 8) * 60, max_new_tokens=100), Request((5, 6) * 5, max_new_tokens=20)]
    wanted = Generator(open_session(bundle), None, ()).generate(rows)
    assert Generator(open_session(bundle), None, (), lookup=8).generate(rows) == wanted
    assert len(wanted[0].output_ids) == LLAMA_LIKE.max_length - 240


def test_session_when_tokens_are_taken_back_then_goes_on_as_if_they_had_not_been(llama_bundle: Path):
    session, plain = (open_session(open_bundle(llama_bundle)) for _ in range(2))
    for s in (session, plain):
        s.prefill([[1, 2, 3], [4, 5, 6, 7]])
    session.verify([[8, 9, 10], [11]])
    session.rewind([4, 5])
    plain.decode([8, 11])
    assert session.lengths == plain.lengths == (4, 5)
    assert np.abs(session.decode([12, 13]) - plain.decode([12, 13])).max() < 1e-5
    with pytest.raises(InputError, match="cannot go back to 9"):
        session.rewind([9, 5])
