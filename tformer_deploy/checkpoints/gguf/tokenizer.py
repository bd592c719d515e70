"""Turns the tokenizer inside a GGUF file into ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

Two kinds are known: byte-level BPE (``gpt2``) with a pre-tokenizer that the file names, and SentencePiece BPE (``llama``),
whose merges follow from the scores.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from tformer_deploy.checkpoints.gguf.pre_tokenizers import known_pre_tokenizers
from tformer_deploy.checkpoints.tokens import TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, Tokens, compare_sizes
from tformer_deploy.errors import InputError, escaped

if TYPE_CHECKING:
    from tformer_deploy.checkpoints.gguf.file import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SPACE = "▁"
_LONGEST = 4096  # characters of a token: every way to cut one in two is looked at


class _Vocabulary:
    """The keys ``tokenizer.ggml.*``, checked.

    Raises:
        InputError: A list is missing, of the wrong length or type, or a token comes twice.
    """

    def __init__(self, file: GgufFile) -> None:
        self.place = escaped(file.path.name)
        self._data = file.metadata
        self.tokens: list[str] = self.array("tokens", str, None)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise InputError(f"{self.place}: tokenizer.ggml.tokens has {escaped(twice)!r} twice.", _HINT)
        if (longest := max(map(len, self.tokens), default=0)) > _LONGEST:
            raise InputError(f"{self.place}: tokenizer.ggml.tokens has one of {longest} characters; at most {_LONGEST}.", _HINT)
        self.types: list[int] = self.array("token_type", int, len(self.tokens), [_NORMAL] * len(self.tokens))

    def array(self, key: str, kind: type, length: int | None, default: list[Any] | None = None) -> list[Any]:
        """The list ``tokenizer.ggml.<key>``."""
        value = self._data.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, list) or not all(type(item) is kind for item in value[:1]):
            raise InputError(f"{self.place}: tokenizer.ggml.{key} is missing or not a list of {kind.__name__}.", _HINT)
        if length is not None and len(value) != length:
            raise InputError(f"{self.place}: tokenizer.ggml.{key} has {len(value)} items; expected {length}, as tokens.", _HINT)
        return value

    def token(self, key: str) -> tuple[int, str] | None:
        """The id and text of ``tokenizer.ggml.<key>``, where given."""
        index = self._data.get(f"tokenizer.ggml.{key}")
        if index is None or index == 2**32 - 1:
            return None
        if type(index) is not int or not 0 <= index < len(self.tokens):
            raise InputError(f"{self.place}: tokenizer.ggml.{key} is {index!r}; expected a token's id.", _HINT)
        return index, self.tokens[index]

    def flag(self, key: str, default: bool) -> bool:
        """The truth value ``tokenizer.ggml.<key>``."""
        value = self._data.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise InputError(f"{self.place}: tokenizer.ggml.{key} is {value!r}; expected a truth value.", _HINT)
        return value

    def text(self, key: str) -> str | None:
        """The string ``tokenizer.<key>``, where given."""
        value = self._data.get(f"tokenizer.{key}")
        if value is not None and not isinstance(value, str):
            raise InputError(f"{self.place}: tokenizer.{key} is {value!r:.80}; expected a string.", _HINT)
        return value


_HINT = "Get the file again from where the checkpoint came."
_OTHER = "Export from the model's Hugging Face folder, which has a tokenizer.json."


def read_gguf_tokens(file: GgufFile, vocab_size: int) -> Tokens:
    """Ids and tokenizer of a GGUF file.

    Raises:
        InputError: The tokenizer is damaged or of a kind that is not supported.
    """
    # "no_vocab" is what llama.cpp's converter writes for a model without one.
    if file.metadata.get("tokenizer.ggml.model", "no_vocab") == "no_vocab":
        return Tokens(warnings=("The file has no tokenizer; only token ids can be run.",))
    kind, place = file.metadata["tokenizer.ggml.model"], escaped(file.path.name)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InputError(f"{place}: tokenizer.ggml.model is {kind!r:.80}; supported are {', '.join(_KINDS)}.", _OTHER)
    vocabulary = _Vocabulary(file)
    named = {key: vocabulary.token(f"{key}_token_id") for key in ("bos", "eos", "unknown", "padding")}
    try:
        tokenizer, adds_bos = _KINDS[kind](vocabulary)
        _add_tokens(tokenizer, vocabulary)
        _post_process(tokenizer, vocabulary, adds_bos)
    except InputError:
        raise
    except Exception as e:  # the library's own words, for instance on a begin-of-text token with a colon in it
        raise InputError(f"{place}: no tokenizer can be made of tokenizer.ggml.*: {escaped(str(e)[:200])}.", _OTHER) from None
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for key, ours in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        token = named[key]
        if token is not None:
            settings[ours] = token[1]
    assets = {
        TOKENIZER: tokenizer.to_str(pretty=False).encode("utf-8"),
        TOKENIZER_CONFIG: (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode("utf-8"),
    }
    template = vocabulary.text("chat_template")
    if template is not None:
        assets[TEMPLATE] = template.encode("utf-8")
    eos = {token[0] for key in _EOS_KEYS if (token := vocabulary.token(key)) is not None and token[0] < vocab_size}
    bos = named["bos"]
    warnings = compare_sizes(range(len(vocabulary.tokens)), vocab_size)
    return Tokens(tuple(sorted(eos)), bos[0] if bos else None, assets, tuple(warnings))


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """GPT-2's kind: bytes as printable characters, merges stored."""
    name, known = vocabulary.text("ggml.pre"), known_pre_tokenizers()
    if name is None or name not in known:
        raise InputError(f"{vocabulary.place}: tokenizer.ggml.pre is {name!r}; supported are {', '.join(known)}.", _OTHER)
    pre = known[name]
    merges = []
    for text in vocabulary.array("merges", str, None):
        left, _, right = text.partition(" ")
        if left not in vocabulary.ids or right not in vocabulary.ids or left + right not in vocabulary.ids:
            raise InputError(
                f"{vocabulary.place}: tokenizer.ggml.merges has {escaped(text)!r}, which names an unknown token.", _HINT
            )
        merges.append((left, right))
    model = models.BPE(vocab=vocabulary.ids, merges=merges, fuse_unk=False, ignore_merges=pre.ignores_merges)
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.step()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.adds_bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE: of all pairs that make a token, the one of the highest score is merged first."""
    unknown = vocabulary.token("unknown_token_id")
    if unknown is None:
        raise InputError(f"{vocabulary.place}: tokenizer.ggml.unknown_token_id is missing.", _OTHER)
    scores: list[float] = vocabulary.array("scores", float, len(vocabulary.tokens))
    usable = {token: index for token, index in vocabulary.ids.items() if vocabulary.types[index] == _NORMAL}
    pairs = [
        (-scores[index], usable[token[:cut]], usable[token[cut:]], token[:cut], token[cut:])
        for token, index in usable.items()
        for cut in range(1, len(token))
        if token[:cut] in usable and token[cut:] in usable
    ]
    merges = [(left, right) for _, _, _, left, right in sorted(pairs)]
    model = models.BPE(vocab=vocabulary.ids, merges=merges, unk_token=unknown[1], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = vocabulary.flag("add_space_prefix", True)
    space = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), space]) if prefix else space
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer, True


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _add_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are special; the user's own are found in text as they are."""
    added = [
        AddedToken(token, special=kind in (_CONTROL, _UNKNOWN), normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (_CONTROL, _UNKNOWN, _USER) and token
    ]
    tokenizer.add_tokens(added)


def _post_process(tokenizer: Tokenizer, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    """Begin- and end-of-text tokens around a text, where the file asks for them."""
    bos, eos = vocabulary.token("bos_token_id"), vocabulary.token("eos_token_id")
    first = [bos] if bos is not None and vocabulary.flag("add_bos_token", adds_bos) else []
    last = [eos] if eos is not None and vocabulary.flag("add_eos_token", False) else []
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not first and not last:
        if isinstance(tokenizer.decoder, decoders.ByteLevel):
            tokenizer.post_processor = byte_level
        return

    def pieces(sequence: str, type_id: int) -> list[str]:
        return [f"{text}:{type_id}" for text in (*(t for _, t in first), sequence, *(t for _, t in last))]

    tokenizer.post_processor = processors.TemplateProcessing(
        single=pieces("$A", 0),
        pair=pieces("$A", 0) + pieces("$B", 1),
        special_tokens=[(text, index) for index, text in {*first, *last}],
    )
