"""How text is cut before byte-level BPE, by the name that llama.cpp gave it (``tokenizer.ggml.pre``).

A name stands for the tokenizer of one family of models; what is built is that family's own normalizer and steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tokenizers import Regex, pre_tokenizers

_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CASED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CASED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_WITH_SLASH}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CASED}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CASED}?"
    rf"|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")


class PreTokenizer(NamedTuple):
    """What comes before the merges.

    Attributes:
        steps: Cuts, one after another; the last ones turn bytes into printable characters.
        nfc: Text is composed (Unicode NFC) first.
        adds_bos: A text begins with the begin-of-text token where the file does not say.
        ignores_merges: A whole piece that is a token is that token, whatever the merges say.
    """

    steps: tuple[Any, ...]
    nfc: bool = False
    adds_bos: bool = False
    ignores_merges: bool = False

    def step(self) -> Any:
        """For ``Tokenizer.pre_tokenizer``."""
        return self.steps[0] if len(self.steps) == 1 else pre_tokenizers.Sequence(list(self.steps))


def known_pre_tokenizers() -> dict[str, PreTokenizer]:
    """Name → what it means."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's own pattern
    digits = pre_tokenizers.Digits(individual_digits=True)
    falcon = (
        pre_tokenizers.Punctuation("contiguous"), words, pre_tokenizers.Digits(individual_digits=False), _split("[0-9][0-9][0-9]"),
    )  # fmt: skip
    llama3 = PreTokenizer(_by(_LLAMA3), adds_bos=True, ignores_merges=True)
    cl100k, neox, qwen2 = PreTokenizer(_by(_LLAMA3)), PreTokenizer((words,), nfc=True), PreTokenizer(_by(_QWEN2), nfc=True)
    return {
        "gpt-2": PreTokenizer((words,)), "phi-2": PreTokenizer((words,)), "olmo": neox, "mpt": neox,
        "smollm": PreTokenizer((digits, words)), "starcoder": PreTokenizer((digits, words)), "refact": PreTokenizer((digits, words)),
        "command-r": PreTokenizer((digits, words), nfc=True),
        "llama-bpe": llama3, "llama3": llama3, "llama-v3": llama3,
        "dbrx": cl100k, "smaug-bpe": cl100k,
        "qwen2": qwen2, "deepseek-r1-qwen": qwen2, "stablelm2": qwen2,
        "tekken": PreTokenizer(_by(_TEKKEN), adds_bos=True, ignores_merges=True),
        "gpt-4o": PreTokenizer(_by(_GPT4O)),
        "falcon": PreTokenizer(falcon),
        "bloom": PreTokenizer(_by(_BLOOM)),
        "deepseek-coder": PreTokenizer(_by(*_DEEPSEEK_CODER)),
    }  # fmt: skip


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _by(*patterns: str) -> tuple[Any, ...]:
    """Pieces that match, and what lies between them; then bytes as characters."""
    return (*map(_split, patterns), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
