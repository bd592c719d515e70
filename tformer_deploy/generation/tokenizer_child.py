"""The child process of ``tokenizer_process.py``: runs the tokenizers library on a file of foreign origin.

Frames on stdin and stdout: 4 bytes little-endian length, then the bytes. The first frame in is ``tokenizer.json``, every other
one a JSON request; every frame out is ``{"value": …}``, ``{"error": why}`` or ``{"limit": why}``. A limit that is reached in
native code ends the process without an answer.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import struct
import sys
from typing import Any

SECONDS = 3  # of CPU, for one request
LOAD_PER_MIB, TEXT_PER_MIB = 0.25, 2.0  # and on top of it for each MiB of tokenizer.json, or of a request
MIB, TIMES = 2048, 32  # address space, and on top of it this often the size of tokenizer.json
_TEXT = 1 << 24  # characters of an answer


def main() -> None:
    """Answers until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    data = _read()
    if data is None:
        return
    space = (MIB << 20) + TIMES * len(data)
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    tokenizer: _Tokenizer | None = None
    request: bytes | None = data
    while request is not None:
        _limit_cpu(SECONDS + (LOAD_PER_MIB if tokenizer is None else TEXT_PER_MIB) * len(request) / 2**20)
        try:
            if tokenizer is None:
                tokenizer = _Tokenizer(data)
                answer: dict[str, Any] = {"value": None}
            else:
                answer = {"value": tokenizer.answer(json.loads(request))}
        except MemoryError:
            answer = {"limit": "memory"}
        except BaseException as e:  # a panic of the library is no Exception
            # Its regular expressions give up after so many steps back.
            kind = "limit" if "retry-limit" in str(e) else "error"
            answer = {kind: str(e)[:300].strip() or type(e).__name__}
        _write(json.dumps(answer).encode())
        if tokenizer is None:
            return
        request = _read()


class _Tokenizer:
    """The loaded tokenizer."""

    def __init__(self, data: bytes) -> None:
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_buffer(data)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        if getattr(self.tokenizer.model, "dropout", None):
            self.tokenizer.model.dropout = None  # for training: the same text would get other ids each time
        raw: dict[str, Any] = json.loads(data)
        self.added: set[int] = set()
        for item in raw.get("added_tokens") or []:
            found = self.tokenizer.token_to_id(item["content"])
            if found != item["id"]:  # the library counts on by itself where ids have a gap
                raise ValueError(f"the added token {item['content']!r} has the id {item['id']}, the library gives it {found}")
            self.added.add(item["id"])
        model = raw["model"]
        self.drops = model.get("type", "BPE") == "BPE" and model.get("unk_token") is None
        self.bytes: Any = None
        level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        # It may leave spaces out of offsets; but a space has its byte, as every character has.
        self.by_bytes = '"ByteLevel"' in json.dumps([raw.get("pre_tokenizer"), raw.get("post_processor")])
        if self.drops and self.by_bytes and any(self.tokenizer.token_to_id(c) is None for c in level.alphabet()):
            self.bytes = level
        for text in ("", "a"):  # what breaks on every text
            self._probe(text)

    def _probe(self, text: str) -> None:
        try:
            self.tokenizer.encode(text)
        except Exception:
            return

    def answer(self, request: dict[str, Any]) -> Any:
        """The ids of a text, the text of ids after others, or the token of an id."""
        if "encode" in request:
            return self.encode(request["encode"], request["special"])
        if "decode" in request:
            return self.decode(request["decode"], request["context"])
        return self.tokenizer.id_to_token(request["token"])

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids; refuses a text of which some character would be dropped without a trace."""
        encoding = self.tokenizer.encode(text, add_special_tokens=special)
        if self.drops:
            normalizer = self.tokenizer.normalizer
            plain = text if normalizer is None else normalizer.normalize_str(text)
            lost = self._lost(plain, encoding if plain == text else self.tokenizer.encode(plain))
            if lost is not None:
                raise ValueError(f"it has no token for {plain[lost]!a} (character {lost + 1}) and none for unknown text")
        ids: list[int] = encoding.ids
        return ids

    def _lost(self, text: str, encoding: Any) -> int | None:
        """The first character that no token stands for."""
        covered, whole = bytearray(len(text)), bytearray(len(text))
        for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            covered[start:end] = b"\1" * (end - start)
            if index in self.added:
                whole[start:end] = b"\1" * (end - start)
        known: dict[str, bool] = {}
        for character in set(text) if self.bytes is not None else ():
            known[character] = all(self.tokenizer.token_to_id(b) is not None for b in self._bytes_of(character))
        unknown = next((at for at, character in enumerate(text) if not known.get(character, True) and not whole[at]), None)
        if unknown is not None or all(covered):
            return unknown
        steps = self.tokenizer.pre_tokenizer
        pieces = [("", (0, len(text)))] if steps is None else steps.pre_tokenize_str(text)
        kept = [at for _, (start, end) in pieces for at in range(start, end)]  # the rest was removed on purpose
        lost = [at for at in kept if not covered[at] and not (self.by_bytes and text[at].isspace())]
        if not lost or self.by_bytes:
            return lost[0] if lost else None
        # The library counts on as if nothing had been dropped, so that the gap shows too late.
        return next((at for at in kept if not whole[at] and self.tokenizer.token_to_id(text[at]) is None), lost[0])

    def _bytes_of(self, character: str) -> str:
        return "".join(piece for piece, _ in self.bytes.pre_tokenize_str(character))

    def decode(self, ids: list[int], context: list[int]) -> str:
        """The text that ``ids`` add after ``context``."""
        before = self.tokenizer.decode(context, skip_special_tokens=True)
        after: str = self.tokenizer.decode([*context, *ids], skip_special_tokens=True)
        # A character of several tokens may be completed by the new ones.
        text = after[len(before) :] if after.startswith(before) else str(self.tokenizer.decode(ids, skip_special_tokens=True))
        if len(text) > _TEXT:
            raise MemoryError
        return text


def _limit_cpu(more: float) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = math.ceil(usage.ru_utime + usage.ru_stime + more)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard == resource.RLIM_INFINITY else min(seconds, hard), hard))


def _read() -> bytes | None:
    header = sys.stdin.buffer.read(4)
    if len(header) < 4:
        return None
    (length,) = struct.unpack("<I", header)
    return sys.stdin.buffer.read(length)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
