"""The mutants of sampling and stopping, and the written answers that must then differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mutation.goldens import COMPLETIONS, SAMPLING_METRICS, SLOW_RULE, GoldenMutant
from mutation.mutant import Metric
from mutation.oracle import Fault
from mutation.shared_faults import patched
from tformer_deploy.generation import Generator, generator, sampling
from tformer_deploy.generation.sampling import SamplingOptions


def put(name: str, site: str, fault: Fault, *red: Metric) -> GoldenMutant:
    """A mutant that all metrics of its site show where none is named."""
    named = red or (SAMPLING_METRICS if site == "sampling" else (COMPLETIONS,))
    return GoldenMutant(name, "oracle-test", "goldens", site, named, fault=fault)


# --- Sampling --------------------------------------------------------------------------------------------------------------


def options(change: Callable[[SamplingOptions], SamplingOptions]) -> Fault:
    """Tokens are chosen by other options than were asked for."""
    right = sampling.sample
    return patched(sampling, "sample", lambda logits, asked, *rest: right(logits, change(asked), *rest))


def without(**fields: float) -> Fault:
    """An option is not looked at."""
    return options(lambda asked: replace(asked, **fields))


def random_numbers(change: Callable[[int, int], tuple[int, int]]) -> Fault:
    """Of another seed and position."""
    right = sampling.uniform
    return patched(sampling, "uniform", lambda seed, position: right(*change(seed, position)))


def top_p_without_the_crossing_token() -> Fault:
    right = sampling._end

    def end(weights: Any, cumulative: Any, total: float, asked: SamplingOptions) -> int:
        found = right(weights, cumulative, total, asked)
        return max(1, found - 1) if asked.top_p < 1 else found

    return patched(sampling, "_end", end)


def history(change: Callable[[Sequence[int]], Sequence[int]]) -> Fault:
    """The tokens that a repetition is looked for in are others."""
    right = sampling.sample
    return patched(
        sampling, "sample", lambda logits, asked, seed, position, before: right(logits, asked, seed, position, change(before))
    )


def last_of_equals() -> Fault:
    """Greedy choice takes the last of the largest logits."""
    right = sampling.sample

    def sample(logits: np.ndarray, asked: SamplingOptions, *rest: Any) -> int:
        if asked.temperature == 0 and asked.repetition_penalty == 1:
            return len(logits) - 1 - int(logits[::-1].argmax())
        return right(logits, asked, *rest)

    return patched(sampling, "sample", sample)


def ties_cut() -> Fault:
    """Exactly ``top_k`` tokens are kept, whatever ties with the last of them."""
    right = sampling._largest
    return patched(sampling, "_largest", lambda scores, candidates, count: right(scores, candidates, count)[:count])


_SAMPLING = [
    put("temperature-ignored", "sampling", options(lambda asked: replace(asked, temperature=1.0 if asked.temperature else 0.0))),
    put("temperature-divides-twice", "sampling", options(lambda asked: replace(asked, temperature=asked.temperature**2))),
    put("always-greedy", "sampling", without(temperature=0.0)),
    put("seed-ignored", "sampling", random_numbers(lambda seed, position: (0, position))),
    put("position-ignored", "sampling", random_numbers(lambda seed, position: (seed, 0))),
    put("position-one-on", "sampling", random_numbers(lambda seed, position: (seed, position + 1))),
    put("top-k-ignored", "sampling", without(top_k=0), SLOW_RULE),
    put("top-k-one-more", "sampling", options(lambda asked: replace(asked, top_k=asked.top_k and asked.top_k + 1)), SLOW_RULE),
    put("top-k-one-fewer", "sampling", options(lambda asked: replace(asked, top_k=asked.top_k and max(1, asked.top_k - 1))), SLOW_RULE),
    put("top-k-cuts-ties", "sampling", ties_cut(), SLOW_RULE),
    put("top-p-ignored", "sampling", without(top_p=1.0)),
    put("top-p-drops-the-crossing-token", "sampling", top_p_without_the_crossing_token()),
    put("min-p-ignored", "sampling", without(min_p=0.0), SLOW_RULE),
    put("repetition-penalty-ignored", "sampling", without(repetition_penalty=1.0), SLOW_RULE),
    put("repetition-rewarded", "sampling", options(lambda asked: replace(asked, repetition_penalty=1 / asked.repetition_penalty)), SLOW_RULE),
    put("repetition-in-the-last-token-only", "sampling", history(lambda before: before[-1:]), SLOW_RULE),
    put("last-of-equals", "sampling", last_of_equals(), SLOW_RULE),
]  # fmt: skip

# --- Stopping ----------------------------------------------------------------------------------------------------------------


def end_ids(change: Callable[[Sequence[int]], Sequence[int]]) -> Fault:
    """Other ids end a row."""
    right = Generator.__init__
    return patched(Generator, "__init__", lambda self, session, tokenizer, eos: right(self, session, tokenizer, change(eos)))


def row(change: Callable[[Any], None]) -> Fault:
    """A row begins otherwise."""
    right = generator._Row.__init__

    def begin(self: Any, *rest: Any) -> None:
        right(self, *rest)
        change(self)

    return patched(generator._Row, "__init__", begin)


def _set(**fields: Callable[[Any], object]) -> Fault:
    def change(made: Any) -> None:
        for name, value in fields.items():
            setattr(made, name, value(made))

    return row(change)


def stop_strings(change: Callable[[Any], bool]) -> Fault:
    """Stop strings are looked for otherwise."""
    return patched(generator._Row, "_look_for_stop", change)


def _cut(self: Any, choose: Callable[[list[tuple[int, str]]], int], text: str | None = None) -> bool:
    """Cuts the text where ``choose`` says, of places and stop strings."""
    if not self.request.stop:
        return False
    text = self.text() if text is None else text
    found = [(text.find(s), s) for s in self.request.stop if s in text]
    if found:
        self.cut = text[: choose(found)]
    return bool(found)


def _last_token_alone(self: Any) -> bool:
    if not self.request.stop or self.tokenizer is None:
        return False
    return _cut(self, lambda found: min(found)[0], self.tokenizer.decode(self.ids[-1:], self.request.input_ids))


def _not_with_the_last_token(self: Any) -> bool:
    return len(self.ids) < self.room and _cut(self, lambda found: min(found)[0])


def end_id_in_the_text() -> Fault:
    """The id that ends a text is decoded too; here it is seen as what it is called."""
    right = generator._Row.text

    def text(self: Any, so_far: bool = False) -> str:
        ended = bool(self.ids) and self.ids[-1] in self.eos
        return right(self, so_far) + ("</s>" if ended else "")

    return patched(generator._Row, "text", text)


def reason(change: Callable[[str], str]) -> Fault:
    """A completion gives another reason."""
    right = generator._Row.completion

    def completion(self: Any) -> object:
        found = right(self)
        return replace(found, finish_reason=change(found.finish_reason))

    return patched(generator._Row, "completion", completion)


def prompt_in_the_completion() -> Fault:
    """The ids are those of the whole row."""
    right = generator._Row.completion
    return patched(generator._Row, "completion", lambda self: replace(right(self), output_ids=tuple(self.history)))


_STOPPING = [
    put("end-ids-ignored", "stopping", end_ids(lambda eos: ())),
    put("first-end-id-only", "stopping", end_ids(lambda eos: tuple(eos)[:1])),
    put("end-id-in-the-text", "stopping", end_id_in_the_text()),
    put("end-id-of-the-prompt-ends-the-row", "stopping", _set(room=lambda made: 0 if set(made.history) & made.eos else made.room)),
    put("one-token-too-many", "stopping", _set(room=lambda made: made.room + 1)),
    put("one-token-too-few", "stopping", _set(room=lambda made: made.room - 1)),
    put("max-length-ignored", "stopping", _set(room=lambda made: made.request.max_new_tokens)),
    put("prompt-not-counted", "stopping", _set(room=lambda made: min(made.request.max_new_tokens, made.room + 1) if made.room else 0)),
    put("prompt-in-the-completion", "stopping", prompt_in_the_completion()),
    put("stop-strings-ignored", "stopping", stop_strings(lambda self: False)),
    put("stop-string-stays-in-the-text", "stopping", stop_strings(lambda self: _cut(self, lambda found: min(at + len(s) for at, s in found)))),
    put("first-stop-string-listed-counts", "stopping", stop_strings(lambda self: _cut(self, lambda found: found[0][0]))),
    put("stop-string-within-one-token-only", "stopping", stop_strings(_last_token_alone)),
    put("stop-string-missed-with-the-last-token", "stopping", stop_strings(_not_with_the_last_token)),
    put("reason-always-length", "stopping", reason(lambda found: "length")),
    put("reason-always-stop", "stopping", reason(lambda found: "stop")),
]  # fmt: skip
GENERATION = [*_SAMPLING, *_STOPPING]
