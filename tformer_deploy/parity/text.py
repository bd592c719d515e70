"""A text as windows of ids, of which perplexity is taken."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tformer_deploy.errors import InputError, escaped

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tformer_deploy.config import ModelConfig

# Bounded, so that a check of a long text costs no more than of a page, and its logits stay small.
WINDOW, WINDOWS = 256, 8
_BYTES = 256 * 1024


@dataclass(frozen=True)
class Text:
    """Ids of a text.

    Attributes:
        name: What to call it in the report.
        windows: Neighbouring pieces of at least 2 ids; each is a row by itself.
    """

    name: str
    windows: tuple[tuple[int, ...], ...]

    @property
    def predicted(self) -> int:
        """Tokens whose probability is looked at: all but each window's first."""
        return sum(len(window) - 1 for window in self.windows)


def read_beginning(path: Path) -> str:
    """The first characters of a UTF-8 file: more than :data:`WINDOWS` need.

    Raises:
        InputError: There is no such file, it is no plain one, or not UTF-8.
    """
    if not path.is_file():
        raise InputError(f"The text {escaped(str(path))} is no file.", "Name a UTF-8 text file.")
    with path.open("rb") as file:
        data = file.read(_BYTES)
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < _BYTES)
    except UnicodeDecodeError as e:
        raise InputError(f"The text {escaped(str(path))} is not UTF-8: byte {e.start}.", "Convert it to UTF-8.") from None


def cut(name: str, ids: Sequence[int], config: ModelConfig, max_length: int) -> Text:
    """The first windows of a text; no window at all where it has fewer than 2 tokens, which no check lets pass.

    Raises:
        InputError: An id is outside the model's vocabulary.
    """
    bad = next((i for i in ids if not 0 <= i < config.vocab_size), None)
    if bad is not None:
        raise InputError(
            f"The bundle's tokenizer gives the id {bad} for {name}; the model's ids go from 0 to {config.vocab_size - 1}.",
            "Use the tokenizer that belongs to the checkpoint.",
        )
    width = min(WINDOW, max_length, config.max_length)
    pieces = [tuple(ids[start : start + width]) for start in range(0, len(ids), width)][:WINDOWS]
    return Text(name, tuple(piece for piece in pieces if len(piece) > 1))
