"""Text ↔ ids, from the bundle's ``tokenizer.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tokenizers

from tformer_deploy.errors import InputError
from tformer_deploy.generation.chat import render
from tformer_deploy.strict_json import parse_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tformer_deploy.bundle import Bundle

# Ids of the prompt that are decoded before a completion: some decoders drop the first token's leading space.
_CONTEXT = 4
_INCOMPLETE = "\ufffd"


class Tokenizer:
    """A bundle's tokenizer and chat template."""

    def __init__(self, data: bytes, template: str | None = None, bos_token: str = "", eos_token: str = "") -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as e:
            hint = "Export the checkpoint again with a tokenizer that loads."
            raise InputError(f"tokenizer.json cannot be read: {e}", hint) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._template, self._bos, self._eos = template, bos_token, eos_token

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with what the tokenizer's own post-processor adds.

        Raises:
            InputError: The text holds lone surrogates.
        """
        _require_text(text)
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, text: str) -> list[int]:
        """Ids of one user turn in the checkpoint's chat template, which writes its own special tokens.

        Raises:
            InputError: There is no template, or it is faulty.
        """
        if self._template is None:
            raise InputError("The bundle has no chat template.", "Leave --chat out.")
        _require_text(text)
        prompt = render(self._template, [{"role": "user", "content": text}], self._bos, self._eos)
        return list(self._tokenizer.encode(prompt, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """The text that ``ids`` add after ``prompt``; ids that the tokenizer does not know are empty."""
        context = list(prompt[-_CONTEXT:])
        before = self._tokenizer.decode(context, skip_special_tokens=True)
        after: str = self._tokenizer.decode([*context, *ids], skip_special_tokens=True)
        if after.startswith(before):
            return after[len(before) :]
        # A character of several tokens may be completed by the new ones.
        alone: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return alone

    def decode_so_far(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """As :meth:`decode`, without what may be an incomplete character at the end: what may be shown while more is coming.

        Decoders that fall back to bytes spoil a whole run of them until its last character is complete.
        """
        return self.decode(ids, prompt).rstrip(_INCOMPLETE)


def load_tokenizer(bundle: Bundle) -> Tokenizer | None:
    """The bundle's tokenizer; None where it has none.

    Raises:
        InputError: It is damaged.
    """
    data = bundle.asset("tokenizer.json")
    if data is None:
        return None
    raw = bundle.asset("tokenizer_config.json")
    config = parse_json(raw, "tokenizer_config.json") if raw else {}
    if not isinstance(config, dict):
        raise InputError(f"tokenizer_config.json holds a JSON {type(config).__name__}; expected an object.")
    separate = bundle.asset("chat_template.jinja")
    try:
        template = separate.decode("utf-8") if separate is not None else _template(config.get("chat_template"))
    except UnicodeDecodeError as e:
        raise InputError(f"chat_template.jinja is not UTF-8: byte {e.start}.") from None
    return Tokenizer(data, template, _token(config.get("bos_token")), _token(config.get("eos_token")))


def _require_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("The text holds a lone surrogate, which is no character.") from None


def _template(value: Any) -> str | None:
    """One template, or a list of named ones of which ``default`` counts."""
    if isinstance(value, list):
        value = next((t.get("template") for t in value if isinstance(t, dict) and t.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _token(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
