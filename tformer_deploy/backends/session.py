"""Ragged rows of token ids over one backend: the padding, lengths, capacities and limits that every caller needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from tformer_deploy.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Logits: TypeAlias = NDArray[np.float32]

    from tformer_deploy.backends.base import Backend, KVCache
    from tformer_deploy.reference.decoder import Decoder


# Tokens (padding included) that one prefill call computes. The graph's attention makes S × S scores for each row and
# head, so this bounds memory; beyond some hundred tokens a larger call is no faster.
PREFILL_TOKENS = 2048


@dataclass
class Counters:
    """Tokens that a session computed. ``*_computed`` counts padding and idle rows too."""

    prefill_tokens: int = 0
    prefill_computed: int = 0
    decode_tokens: int = 0
    decode_computed: int = 0

    @property
    def padding_share(self) -> float:
        """Share of the computed tokens that no row asked for; 0 when nothing was computed."""
        computed = self.prefill_computed + self.decode_computed
        return 1 - (self.prefill_tokens + self.decode_tokens) / computed if computed else 0.0


class Session:
    """A loaded model with the caches of one batch of rows.

    Row i keeps its number until :meth:`compact`. A row's logits depend on that row alone.

    Attributes:
        backend: What executes the graphs.
        counters: Tokens computed so far.
        prefill_tokens: Bound on the tokens of one prefill call; a longer row is one call by itself.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.counters = Counters()
        self.prefill_tokens = PREFILL_TOKENS
        self._lengths: list[int] = []
        self._retired: list[bool] = []
        self._cache: KVCache | None = None

    @classmethod
    def from_decoder(cls, decoder: Decoder) -> Session:
        """A session over the PyTorch reference."""
        from tformer_deploy.backends.torch import TorchBackend

        return cls(TorchBackend(decoder))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in each row's cache; 0 for a retired row."""
        return tuple(self._lengths)

    @property
    def capacity(self) -> int:
        """Tokens for which the caches have room now; 0 before the first prefill."""
        return 0 if self._cache is None else self._cache.capacity

    def prefill(self, rows: Sequence[Sequence[int]], capacity: int | None = None) -> Logits:
        """Starts a new batch.

        Args:
            rows: Token ids of each row, at least one each; lengths may differ.
            capacity: Tokens that a row will hold at most, refused now if that is too many. Room is made as rows grow: attention
                over a cache may cost its capacity, not its length.

        Returns:
            Logits [B, V] float32 after each row's last token.

        Raises:
            InputError: No row, an empty row, an id outside the vocabulary, or more tokens than ``max_length``.
        """
        longest = self._check(rows, [0] * len(rows))
        if not rows:
            raise InputError("prefill was given no row.", "Pass at least one row of token ids.")
        wanted = max(longest, capacity or 0)
        if wanted > self.backend.max_length:
            raise InputError(f"A capacity of {wanted} is asked for; max_length is {self.backend.max_length}.")
        self._cache = None  # frees the last batch before the next one is allocated
        self._cache = self.backend.allocate(len(rows), self.backend.capacity_for(longest))
        self._lengths, self._retired = [0] * len(rows), [False] * len(rows)
        return self._fill(list(range(len(rows))), rows)

    def decode(self, tokens: Sequence[int]) -> Logits:
        """One new token for each row → logits [B, V]. The tokens of retired rows are ignored.

        Raises:
            InputError: Another number of tokens than rows, an id outside the vocabulary, or a row at ``max_length``.
        """
        return self.extend([[token] for token in tokens])

    def extend(self, rows: Sequence[Sequence[int]]) -> Logits:
        """Several new tokens for each row (a second turn, a chunk) → logits [B, V] after each row's last one.

        Raises:
            InputError: As :meth:`decode`; also an empty row.
        """
        cache, rows = self._live(), self._checked(rows)
        width = max(map(len, rows))
        # Padding is written too, behind each row's own tokens, and must find room.
        needed = max(self._lengths) + width
        if needed > self.backend.max_length and width > 1:
            return self._extend_each(rows)
        cache = self._grow(cache, needed)
        ids, positions = _padded(rows)
        logits = self.backend.decode(ids, np.array(self._lengths, dtype=np.int64), positions, cache)
        self.counters.decode_computed += ids.size
        self._advance(rows)
        return logits[:, 0]

    def verify(self, rows: Sequence[Sequence[int]]) -> list[Logits]:
        """Several new tokens for each row, as :meth:`extend` → logits of each row after every one of them, [len(row), V].

        Tokens that turn out wrong are taken back with :meth:`rewind`.

        Raises:
            InputError: As :meth:`extend`.
        """
        cache, rows = self._live(), self._checked(rows)
        width = max(map(len, rows))
        if max(self._lengths) + width > self.backend.max_length:
            raise InputError(f"{width} new tokens pass max_length {self.backend.max_length} in a row.", "Give fewer.")
        cache = self._grow(cache, max(self._lengths) + width)
        ids, _ = _padded(rows)
        positions = np.tile(np.arange(width, dtype=np.int64), (len(rows), 1))
        logits = self.backend.decode(ids, np.array(self._lengths, dtype=np.int64), positions, cache)
        self.counters.decode_computed += ids.size
        self._advance(rows)
        return [logits[i, : len(row)] for i, row in enumerate(rows)]

    def rewind(self, lengths: Sequence[int]) -> None:
        """Gives up each row's tokens from ``lengths`` on; retired rows stay empty.

        Raises:
            InputError: A length is negative or above the row's own.
        """
        for i, (length, held) in enumerate(zip(lengths, self._lengths, strict=True)):
            if not 0 <= length <= held:
                raise InputError(f"Row {i} holds {held} tokens and cannot go back to {length}.")
        self._lengths = list(lengths)

    def retire(self, rows: Sequence[int]) -> None:
        """Gives up the contents of these rows: they cost a decode step until refilled or dropped by :meth:`compact`."""
        for row in rows:
            self._lengths[row], self._retired[row] = 0, True

    def refill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Logits:
        """Starts new prompts in these rows (ascending numbers), whatever they held → logits [len(rows), V].

        Raises:
            InputError: As :meth:`prefill`.
        """
        longest = self._check(prompts, [0] * len(prompts))
        self._grow(self._live(), longest)
        for row in rows:
            self._lengths[row], self._retired[row] = 0, False
        return self._fill(list(rows), prompts)

    def compact(self) -> list[int]:
        """Drops the retired rows, copying the others together; returns the old numbers of the rows that stay."""
        cache = self._live()
        kept = [i for i, retired in enumerate(self._retired) if not retired]
        if kept and len(kept) < len(self._retired):
            self._cache = cache.resize(kept, cache.capacity)
            self._lengths, self._retired = [self._lengths[i] for i in kept], [False] * len(kept)
        return kept

    def read_cache(self, row: int) -> list[tuple[Logits, Logits]]:
        """Copies of one row's keys and values, layer by layer, each [K, length, D] float32.

        Raises:
            InputError: There is no such row, or no batch yet.
        """
        self._live()
        if not 0 <= row < len(self._lengths):
            raise InputError(f"There is no row {row}; the batch has the rows 0 to {len(self._lengths) - 1}.")
        view, length = self._live().rows(row, row + 1), self._lengths[row]
        layers = (view.read(layer) for layer in range(self.backend.config.n_layers))
        return [(key[0, :, :length].copy(), value[0, :, :length].copy()) for key, value in layers]

    def _fill(self, rows: list[int], prompts: Sequence[Sequence[int]]) -> Logits:
        """Prefills rows in calls of neighbouring rows, each at most ``prefill_tokens`` with its padding."""
        cache, parts = self._live(), []
        for start, stop in self._calls(rows, prompts):
            ids, positions = _padded(prompts[start:stop])
            view = cache.rows(rows[start], rows[stop - 1] + 1)
            parts.append(self.backend.prefill(ids, positions, view)[:, 0])
            self.counters.prefill_computed += ids.size
        for row, prompt in zip(rows, prompts, strict=True):
            self._lengths[row] = len(prompt)
            self.counters.prefill_tokens += len(prompt)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _calls(self, rows: list[int], prompts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Cuts the rows into runs ``start … stop - 1`` of adjacent numbers within the token budget."""
        calls, start, limit = [], 0, self.backend.max_batch
        for i in range(1, len(rows) + 1):
            if i < len(rows) and rows[i] == rows[i - 1] + 1 and (limit is None or i + 1 - start <= limit):
                widths = [len(p) for p in prompts[start : i + 1]]
                # Padding beyond an eighth costs more than another call.
                if max(widths) * len(widths) <= self.prefill_tokens and max(widths) * len(widths) * 7 <= sum(widths) * 8:
                    continue
            calls.append((start, i))
            start = i
        return calls

    def _extend_each(self, rows: Sequence[Sequence[int]]) -> Logits:
        """Row by row without padding, where the padding of the shorter ones would pass ``max_length``."""
        longest = max(n + len(row) for n, row in zip(self._lengths, rows, strict=True))
        cache = self._grow(self._live(), longest)
        parts = []
        for i, row in enumerate(rows):
            ids, positions = _padded([row])
            past = np.array(self._lengths[i : i + 1], dtype=np.int64)
            parts.append(self.backend.decode(ids, past, positions, cache.rows(i, i + 1))[:, 0])
            self.counters.decode_computed += len(row)
            if not self._retired[i]:
                self._lengths[i] += len(row)
                self.counters.decode_tokens += len(row)
        return np.concatenate(parts)

    def _checked(self, rows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """New tokens for every row, a stand-in for retired ones."""
        if len(rows) != len(self._lengths):
            raise InputError(f"{len(rows)} rows of new tokens for a batch of {len(self._lengths)}; expected one for each row.")
        live = [[0] if retired else row for row, retired in zip(rows, self._retired, strict=True)]
        self._check(live, self._lengths)
        return live

    def _advance(self, rows: Sequence[Sequence[int]]) -> None:
        for i, row in enumerate(rows):
            if not self._retired[i]:
                self._lengths[i] += len(row)
                self.counters.decode_tokens += len(row)

    def _grow(self, cache: KVCache, needed: int) -> KVCache:
        if needed > cache.capacity:
            cache = cache.resize(list(range(cache.batch)), self.backend.capacity_for(needed))
            self._cache = cache
        return cache

    def _live(self) -> KVCache:
        if self._cache is None:
            raise InputError("The session holds no batch yet.", "Call prefill first.")
        return self._cache

    def _check(self, rows: Sequence[Sequence[int]], past: Sequence[int]) -> int:
        """The longest row's length with its past, after refusing what no graph may be given."""
        vocab, limit, longest = self.backend.config.vocab_size, self.backend.max_length, 0
        for i, (row, held) in enumerate(zip(rows, past, strict=True)):
            if not hasattr(row, "__len__"):
                raise InputError(f"Row {i} is {row!r}; expected a list of token ids.", "Pass a list of rows: [[1, 2, 3]].")
            if not len(row):
                raise InputError(f"Row {i} is empty.", "Give each row at least one token id.")
            bad = [token for token in row if not 0 <= token < vocab]
            if bad:
                raise InputError(f"Row {i} holds the token id {bad[0]}; ids go from 0 to {vocab - 1}.")
            total = held + len(row)
            if total > limit:
                raise InputError(f"Row {i} would hold {total} tokens; max_length is {limit}.", "Shorten the row.")
            longest = max(longest, total)
        return longest


def _padded(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Right-padded ids [B, S] and the position of each row's last token [B, 1]. The pad id 0 is never looked at."""
    ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return ids, np.array([[len(row) - 1] for row in rows], dtype=np.int64)
