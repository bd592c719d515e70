"""Completions of many requests over one session; a row that ends gives its slot to the next request."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tformer_deploy.errors import InputError
from tformer_deploy.generation.lookup import guess
from tformer_deploy.generation.sampling import LogitsError, SamplingOptions, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tformer_deploy.backends import Session
    from tformer_deploy.generation.tokenizer import Tokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """One prompt.

    Attributes:
        input_ids: At least one id.
        options: How tokens are chosen.
        max_new_tokens: Tokens to generate at most; 0 is a valid, empty completion.
        stop: Strings that end the completion; the text is cut before the first of them.
        seed: Of the row's random numbers.
    """

    input_ids: tuple[int, ...]
    options: SamplingOptions = field(default_factory=SamplingOptions)
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Completion:
    """What a request got.

    Attributes:
        output_ids: Generated ids, a generated end-of-text id included.
        text: Their text without that id, cut before a stop string; None without a tokenizer.
        finish_reason: ``stop`` (end of text or stop string) or ``length``.
        error: None, or why the row could not go on: the model's logits were not finite.
    """

    output_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    error: str | None = None


class _Row:
    """A request on its way."""

    def __init__(self, index: int, request: Request, limit: int, eos: frozenset[int], tokenizer: Tokenizer | None) -> None:
        self.index, self.request, self.eos, self.tokenizer = index, request, eos, tokenizer
        self.room = min(request.max_new_tokens, limit - len(request.input_ids))
        self.ids: list[int] = []
        self.history = list(request.input_ids)
        self.cut: str | None = None
        self.error: str | None = None

    def guess(self, count: int) -> list[int]:
        """At most ``count`` tokens that may come next, never more than the row has room for beside the next one."""
        return guess(self.history, min(count, self.room - len(self.ids) - 1))

    def take_while_right(self, logits: NDArray[np.float32], guessed: Sequence[int]) -> tuple[int, bool]:
        """Chooses tokens as long as each is the one that was guessed; how many were chosen, and whether the row has ended.

        ``logits`` [1 + len(guessed), V]: after the row's last token, and after each guess. A token is chosen from its own
        position's logits and random number, as it would be without guesses.
        """
        for i, position in enumerate(logits):
            if self.take(position):
                return i + 1, True
            if i == len(guessed) or self.ids[-1] != guessed[i]:
                return i + 1, False
        return len(logits), False

    def take(self, logits: NDArray[np.float32]) -> bool:
        """Chooses the next token; True when the row has ended."""
        try:
            token = sample(logits, self.request.options, self.request.seed, len(self.history), self.history)
        except LogitsError as e:
            self.error = e.message
            return True
        self.ids.append(token)
        self.history.append(token)
        if self.ids[-1] in self.eos or len(self.ids) >= self.room:
            self._look_for_stop()
            return True
        return self._look_for_stop()

    def _look_for_stop(self) -> bool:
        if not self.request.stop or self.tokenizer is None:
            return False
        text = self.text()
        found = [at for at in (text.find(s) for s in self.request.stop) if at >= 0]
        if found:
            self.cut = text[: min(found)]
        return bool(found)

    def text(self, so_far: bool = False) -> str:
        """Text of the ids without an end-of-text id at their end."""
        assert self.tokenizer is not None
        ids = self.ids[:-1] if self.ids and self.ids[-1] in self.eos else self.ids
        decode = self.tokenizer.decode_so_far if so_far else self.tokenizer.decode
        return decode(ids, self.request.input_ids)

    def completion(self) -> Completion:
        ended = self.cut is not None or bool(self.ids and self.ids[-1] in self.eos)
        text = None if self.tokenizer is None else self.cut if self.cut is not None else self.text()
        return Completion(tuple(self.ids), text, "stop" if ended else "length", self.error)


class Generator:
    """Runs requests over a session.

    Args:
        session: The loaded model.
        tokenizer: For text and stop strings; None works on ids alone.
        eos_token_ids: Ids that end a row.
        lookup: Guess this many tokens a step from the row itself and check them together (0: none). The tokens are the same.

    Attributes:
        guessed: Tokens guessed so far.
        right: Of those, how many were right.
    """

    def __init__(self, session: Session, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int], lookup: int = 0) -> None:
        self.session, self.tokenizer, self.eos = session, tokenizer, frozenset(eos_token_ids)
        self.lookup, self.guessed, self.right = lookup, 0, 0

    def generate(
        self, requests: Sequence[Request], max_batch: int = 16, on_done: Callable[[int, Completion], None] = lambda i, c: None
    ) -> list[Completion]:
        """Completions in the order of the requests.

        Args:
            requests: Any number.
            max_batch: Rows that run together.
            on_done: Called with index and completion as each row ends.

        Raises:
            InputError: A prompt is empty, too long, or stop strings are given without a tokenizer.
        """
        done: dict[int, Completion] = {}

        def finish(row: _Row) -> None:
            done[row.index] = row.completion()
            on_done(row.index, done[row.index])

        waiting = [self._row(i, request) for i, request in enumerate(requests)]
        for row in [r for r in waiting if r.room <= 0]:
            finish(row)
        waiting = [r for r in waiting if r.room > 0]
        limit = self.session.backend.max_batch
        self._run(waiting, min(max_batch, limit) if limit else max_batch, finish)
        return [done[i] for i in range(len(requests))]

    def stream(self, request: Request, on_text: Callable[[str], None]) -> Completion:
        """One completion; ``on_text`` gets its text piece by piece, never a part of a character or of a stop string.

        Raises:
            InputError: As :meth:`generate`.
            LogitsError: The model's logits are not finite.
        """
        row = self._row(0, request)
        if row.room <= 0:
            return row.completion()
        logits, shown = self.session.prefill([list(request.input_ids)]), 0
        held = max((len(s) - 1 for s in request.stop), default=0)
        ended = row.take(logits[0])
        while not ended:
            if self.tokenizer is not None:
                text = row.text(so_far=True)
                if len(text) - held > shown:
                    on_text(text[shown : len(text) - held])
                    shown = len(text) - held
            (ended,) = self._step([row])
        completion = row.completion()
        if completion.error is not None:
            raise LogitsError(completion.error, "Check the bundle with tformer-deploy check.")
        if completion.text is not None and len(completion.text) > shown:
            on_text(completion.text[shown:])
        return completion

    def _row(self, index: int, request: Request) -> _Row:
        limit = self.session.backend.max_length
        if not request.input_ids:
            raise InputError("The prompt is empty.", "Give at least one token.")
        if len(request.input_ids) > limit:
            raise InputError(f"The prompt has {len(request.input_ids)} tokens; max_length is {limit}.", "Shorten it.")
        if request.stop and self.tokenizer is None:
            raise InputError("Stop strings need a tokenizer, and the bundle has none.", "Leave them out.")
        return _Row(index, request, limit, self.eos, self.tokenizer)

    def _run(self, waiting: list[_Row], max_batch: int, finish: Callable[[_Row], None]) -> None:
        if not waiting:
            return
        session = self.session
        slots: list[_Row | None] = list(waiting[:max_batch])
        queue = deque(waiting[max_batch:])
        logits = session.prefill([list(r.request.input_ids) for r in slots if r is not None])
        ended = [i for i, position in enumerate(logits) if self._ended(slots[i], position)]
        while True:
            for i in ended:
                row = slots[i]
                assert row is not None
                finish(row)
                slots[i] = None
            session.retire(ended)
            refilled = ended[: len(queue)]
            for i in refilled:
                slots[i] = queue.popleft()
            if refilled:
                logits = session.refill(refilled, [list(r.request.input_ids) for i in refilled if (r := slots[i]) is not None])
                ended = [i for i, position in zip(refilled, logits, strict=True) if self._ended(slots[i], position)]
                continue
            slots = self._compact(slots)
            if not slots:
                return
            ended = [i for i, over in enumerate(self._step(slots)) if over]

    def _step(self, slots: Sequence[_Row | None]) -> list[bool]:
        """One step of every row: a token each, or as many as were guessed right; which rows have ended."""
        guesses = [self._guess(row) for row in slots]
        last = [0 if row is None else row.ids[-1] for row in slots]
        if not any(guesses):
            logits = self.session.decode(last)
            return [row is not None and row.take(position) for row, position in zip(slots, logits, strict=True)]
        before = self.session.lengths
        checked = self.session.verify([[token, *guess] for token, guess in zip(last, guesses, strict=True)])
        kept, ended = list(before), [False] * len(slots)
        for i, row in enumerate(slots):
            if row is not None:
                taken, ended[i] = row.take_while_right(checked[i], guesses[i])
                kept[i] = before[i] + taken
                self.guessed += len(guesses[i])
                self.right += taken - 1
        self.session.rewind(kept)
        return ended

    def _guess(self, row: _Row | None) -> list[int]:
        """A guess for a row that fits the batch: padding is written for the others too."""
        if row is None or not self.lookup:
            return []
        room = self.session.backend.max_length - max(self.session.lengths) - 1
        return row.guess(min(self.lookup, room)) if room > 0 else []

    @staticmethod
    def _ended(row: _Row | None, logits: NDArray[np.float32]) -> bool:
        assert row is not None
        return row.take(logits)

    def _compact(self, slots: list[_Row | None]) -> list[_Row | None]:
        """Drops empty slots once a quarter of them are: copying the others costs about a step."""
        live = sum(row is not None for row in slots)
        if not live:
            return []
        if (len(slots) - live) * 4 < len(slots):
            return slots
        return [slots[i] for i in self.session.compact()]
