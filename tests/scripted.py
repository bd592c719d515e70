"""A model that says what a test tells it to, and a tokenizer of bytes and a few words."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import tokenizers
from tokenizers import decoders, models, processors

from tformer_deploy.generation import Generator, Request, Tokenizer

VOCAB = 300
BOS, EOS = 256, 257
WORDS = {258: "ab", 259: "a", 260: "b", 261: "xa", 262: "by", 263: "▁hi"}


def byte_tokenizer_json(post_processor: bool = False) -> bytes:
    """Ids 0 … 255 are bytes, then a few words; ids from 264 on are the model's alone."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"<s>": BOS, "</s>": EOS} | {word: i for i, word in WORDS.items()}
    raw = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")], byte_fallback=True, unk_token="<s>"))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens(["<s>", "</s>"])
    raw.enable_truncation(4)
    raw.enable_padding(length=9, pad_id=0)
    if post_processor:
        raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    return raw.to_str().encode()


@functools.lru_cache  # a process each
def byte_tokenizer(post_processor: bool = False, template: str | None = None) -> Tokenizer:
    """Over :func:`byte_tokenizer_json`."""
    return Tokenizer(byte_tokenizer_json(post_processor), template, "<s>", "</s>")


class Scripted:
    """A session whose rows continue as ``scripts`` say, by the first id of their prompt; then with id 299."""

    def __init__(self, scripts: dict[int, list[int]], max_length: int) -> None:
        self.backend = SimpleNamespace(max_length=max_length, max_batch=None)
        self.scripts, self.rows = scripts, list[list[int]]()

    def _logits(self, rows: list[list[int]]) -> np.ndarray:
        logits = np.zeros((len(rows), VOCAB), np.float32)
        for i, row in enumerate(rows):
            script = self.scripts.get(row[0], [])
            done = len(row) - 1
            logits[i, script[done] if done < len(script) else VOCAB - 1] = 9
        return logits

    def prefill(self, rows: list[list[int]]) -> np.ndarray:
        self.rows = [list(row) for row in rows]
        return self._logits(self.rows)

    def refill(self, slots: list[int], rows: list[list[int]]) -> np.ndarray:
        for slot, row in zip(slots, rows, strict=True):
            self.rows[slot] = list(row)
        return self._logits([self.rows[slot] for slot in slots])

    def decode(self, tokens: list[int]) -> np.ndarray:
        for row, token in zip(self.rows, tokens, strict=True):
            row.append(token)
        return self._logits(self.rows)

    def retire(self, slots: list[int]) -> None:
        for slot in slots:
            self.rows[slot] = [-1]

    def compact(self) -> list[int]:
        kept = [i for i, row in enumerate(self.rows) if row[0] != -1]
        self.rows = [self.rows[i] for i in kept]
        return kept


def scripted(*scripts: list[int], eos: tuple[int, ...] = (EOS,), max_length: int = 10_000) -> Generator:
    """A generator whose rows continue as the scripts say: the first for prompts that begin with 0, and so on."""
    return Generator(Scripted(dict(enumerate(scripts)), max_length), byte_tokenizer(), eos)  # type: ignore[arg-type]


def request(first: int = 0, **fields) -> Request:
    """A prompt of one id, which chooses the script."""
    return Request((first,), **fields)
