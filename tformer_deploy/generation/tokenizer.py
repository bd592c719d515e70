"""Text ↔ ids, from the bundle's ``tokenizer.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from tformer_deploy.errors import InputError
from tformer_deploy.generation.chat import render
from tformer_deploy.generation.tokenizer_process import TokenizerProcess
from tformer_deploy.strict_json import parse_object

if TYPE_CHECKING:
    from collections.abc import Sequence

# Ids of the prompt that are decoded before a completion: some decoders drop the first token's leading space.
_CONTEXT = 4
_INCOMPLETE = "\ufffd"


class Assets(Protocol):
    """Files that came with a checkpoint, by name: a ``Bundle``, or what will become one."""

    def asset(self, name: str) -> bytes | None:
        """Its bytes; None where there is none."""


class Tokenizer:
    """A bundle's tokenizer and chat template."""

    def __init__(self, data: bytes, template: str | None = None, bos_token: str = "", eos_token: str = "") -> None:
        self._process = TokenizerProcess(data)
        self._template, self._bos, self._eos = template, bos_token, eos_token

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with what the tokenizer's own post-processor adds.

        Raises:
            InputError: The text holds lone surrogates, or a character that has no token.
            ResourceError: It takes too long or too much memory.
        """
        _require_text(text, "The text")
        return self._process.encode(text, special=True)

    def encode_chat(self, text: str) -> list[int]:
        """Ids of one user turn in the checkpoint's chat template, which writes its own special tokens.

        Raises:
            InputError: There is no template, or it is faulty.
            ResourceError: It takes too long or too much memory.
        """
        if self._template is None:
            raise InputError("The bundle has no chat template.", "Leave --chat out.")
        _require_text(text, "The text")
        prompt = render(self._template, [{"role": "user", "content": text}], self._bos, self._eos)
        _require_text(prompt, "What the chat template writes")
        return self._process.encode(prompt, special=False)

    def decode(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """The text that ``ids`` add after ``prompt``; ids that the tokenizer does not know are empty."""
        return self._process.decode(list(ids), list(prompt[-_CONTEXT:]))

    def decode_so_far(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """As :meth:`decode`, without what may be an incomplete character at the end: what may be shown while more is coming.

        Decoders that fall back to bytes spoil a whole run of them until its last character is complete.
        """
        return self.decode(ids, prompt).rstrip(_INCOMPLETE)

    def name(self, index: int) -> str:
        """An id as it may stand in a message: with its token, where it has one."""
        token = self._process.token(index)
        return f"{index}" if token is None else f"{index} ({token[:80]!a})"


def load_tokenizer(source: Assets) -> Tokenizer | None:
    """The tokenizer of a bundle; None where it has none.

    Raises:
        InputError: It is damaged.
        ResourceError: Loading takes too long or too much memory.
    """
    data = source.asset("tokenizer.json")
    if data is None:
        return None
    raw = source.asset("tokenizer_config.json")
    config = parse_object(raw, "tokenizer_config.json") if raw else {}
    separate = source.asset("chat_template.jinja")
    try:
        template = separate.decode("utf-8") if separate is not None else _template(config.get("chat_template"))
    except UnicodeDecodeError as e:
        hint = "Get the file again from where the checkpoint came."
        raise InputError(f"chat_template.jinja is not UTF-8: byte {e.start}.", hint) from None
    return Tokenizer(data, template, _token(config.get("bos_token")), _token(config.get("eos_token")))


def _require_text(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        message = f"{what} holds the lone surrogate {text[e.start]!a} (character {e.start + 1}), which is no character."
        raise InputError(message, "Write the text in valid Unicode.") from None


def _template(value: Any) -> str | None:
    """One template, or a list of named ones of which ``default`` counts."""
    if isinstance(value, list):
        value = next((t.get("template") for t in value if isinstance(t, dict) and t.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _token(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
