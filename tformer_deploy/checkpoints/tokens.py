"""Token ids that steer generation, and the tokenizer's files, of a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tformer_deploy.checkpoints.files import read_small
from tformer_deploy.errors import InputError, escaped
from tformer_deploy.strict_json import parse_object

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_UNREAD = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_AGAIN = "Get the file again from where it came."
_VALUES = 6_000_000  # in tokenizer.json: vocabularies of 256 thousand tokens and their merges take two million
_LIMITS = {GENERATION: 1 << 22, TOKENIZER: 1 << 28, TOKENIZER_CONFIG: 1 << 26, TEMPLATE: 1 << 22}


@dataclass
class Tokens:
    """Ids and files beside the weights."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    assets: dict[str, bytes] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def read_tokens(folder: Path, config: dict[str, Any], vocab_size: int) -> Tokens:
    """Reads what there is beside ``config.json``.

    Args:
        folder: The checkpoint.
        config: Its ``config.json``.
        vocab_size: Ids outside are dropped with a warning, for the model cannot emit them.

    Raises:
        InputError: A file is damaged, or an id is not a whole number.
    """
    assets = {name: read_small(folder / name, limit) for name, limit in _LIMITS.items() if _there(folder / name)}
    settings = {name: parse_object(assets[name], name) for name in (GENERATION, TOKENIZER_CONFIG) if name in assets}
    generation, tokenizer_config = settings.get(GENERATION, {}), settings.get(TOKENIZER_CONFIG, {})
    if TEMPLATE not in assets and (template := _template(tokenizer_config)) is not None:
        assets[TEMPLATE] = template.encode("utf-8")
    ids = token_ids(parse_object(assets[TOKENIZER], TOKENIZER, _VALUES)) if TOKENIZER in assets else {}
    warnings: list[str] = []
    eos: set[int] = set()
    for place, data in ((GENERATION, generation), (CONFIG, config)):
        eos |= _in_vocabulary(place, "eos_token_id", _ids(place, "eos_token_id", data.get("eos_token_id")), vocab_size, warnings)
    eos |= _in_vocabulary(
        TOKENIZER_CONFIG, "eos_token", _named(tokenizer_config, "eos_token", ids, warnings), vocab_size, warnings
    )
    bos: list[int] = []
    for place, data in ((CONFIG, config), (GENERATION, generation)):
        bos += sorted(
            _in_vocabulary(place, "bos_token_id", _ids(place, "bos_token_id", data.get("bos_token_id")), vocab_size, warnings)
        )
    bos += _in_vocabulary(
        TOKENIZER_CONFIG, "bos_token", _named(tokenizer_config, "bos_token", ids, warnings), vocab_size, warnings
    )
    warnings += compare_sizes(ids.values(), vocab_size)
    if tokenizer_config.get("auto_map"):
        warnings.append(f"{TOKENIZER_CONFIG} names code of its own (auto_map), which is never executed.")
    if TOKENIZER not in assets and (unread := [name for name in _UNREAD if _there(folder / name)]):
        warnings.append(f"{', '.join(unread)} is not read: without a {TOKENIZER} the bundle takes token ids only.")
    return Tokens(tuple(sorted(eos)), bos[0] if bos else None, assets, tuple(warnings))


def token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Token → id of a parsed ``tokenizer.json`` (the whole vocabulary and the added tokens).

    Raises:
        InputError: It has no vocabulary of a known form, an id is no id, or two tokens share one.
    """
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, list) and all(isinstance(item, list) and item and isinstance(item[0], str) for item in vocab):
        vocab = {item[0]: index for index, item in enumerate(vocab)} if len({item[0] for item in vocab}) == len(vocab) else None
    if not isinstance(vocab, dict) or not isinstance(added, list):
        raise InputError(f"{TOKENIZER} has no vocabulary of a known form.", _AGAIN)
    ids: dict[str, int] = {}
    tokens: dict[int, str] = {}
    for token, index in vocab.items():
        _add(token, index, ids, tokens)
    for item in added:
        if not isinstance(item, dict) or not isinstance(item.get("content"), str) or "id" not in item:
            raise InputError(f"{TOKENIZER} has an added token without content and id: {escaped(repr(item)[:80])}.", _AGAIN)
        _add(item["content"], item["id"], ids, tokens)
    return ids


def _add(token: str, index: Any, ids: dict[str, int], tokens: dict[int, str]) -> None:
    """Records a token; the same token under the same id may come again as an added one."""
    if type(index) is not int or not 0 <= index < 2**31:
        raise InputError(
            f"{TOKENIZER}: the token {_quoted(token)} has the id {escaped(repr(index)[:40])}; "
            "expected a whole number from 0 to 2147483647.", _AGAIN,
        )  # fmt: skip
    if tokens.setdefault(index, token) != token:
        raise InputError(f"{TOKENIZER} gives the id {index} to {_quoted(tokens[index])} and to {_quoted(token)}.", _AGAIN)
    if ids.setdefault(token, index) != index:
        raise InputError(f"{TOKENIZER} gives {_quoted(token)} the ids {ids[token]} and {index}.", _AGAIN)


def _quoted(token: str) -> str:
    return escaped(repr(token[:80]))


def compare_sizes(ids: Iterable[int], vocab_size: int) -> list[str]:
    """Warns where tokenizer and model disagree on the size of the vocabulary."""
    highest = max(ids, default=None)
    if highest is None or highest == vocab_size - 1:
        return []
    if highest >= vocab_size:
        return [
            f"The tokenizer's ids go up to {highest}, the model's to {vocab_size - 1}: a prompt with a higher one is refused."
        ]
    return [f"The model's ids go up to {vocab_size - 1}, the tokenizer's to {highest}: a higher one would decode to nothing."]


def _there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _ids(place: str, key: str, value: Any) -> list[int]:
    """An id, a list of ids or null."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if type(item) is not int:
            raise InputError(
                f"{place}: {key} is {escaped(repr(value)[:80])}; expected a whole number or a list of them.",
                f"Correct {key} in {place}.",
            )
    return values


def _in_vocabulary(place: str, key: str, ids: list[int], vocab_size: int, warnings: list[str]) -> set[int]:
    outside = [index for index in ids if not 0 <= index < vocab_size]
    if outside:
        warnings.append(f"{place}: {key} {repr(outside)[:80]} is outside the vocabulary of {vocab_size} and is ignored.")
    return set(ids) - set(outside)


def _named(tokenizer_config: dict[str, Any], key: str, ids: dict[str, int], warnings: list[str]) -> list[int]:
    """The id of the token that ``tokenizer_config.json`` names, as a string or as an object with ``content``."""
    value = tokenizer_config.get(key)
    token = value.get("content") if isinstance(value, dict) else value
    if token is None:
        return []
    if not isinstance(token, str) or token not in ids:
        warnings.append(f"{TOKENIZER_CONFIG}: {key} {escaped(repr(token)[:80])} is not a token of {TOKENIZER} and is ignored.")
        return []
    return [ids[token]]


def _template(tokenizer_config: dict[str, Any]) -> str | None:
    """The chat template where it is kept inside ``tokenizer_config.json``: a string, or the one named ``default``."""
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list):
        value = next((t.get("template") for t in value if isinstance(t, dict) and t.get("name") == "default"), None)
    return value if isinstance(value, str) else None
