"""Rows of a prompts file. A bad row is an error of that row alone; a file that is no JSONL is refused as a whole."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, Literal

from tformer_deploy.errors import InputError, TformerError
from tformer_deploy.generation import Request, SamplingOptions, Tokenizer
from tformer_deploy.generation.sampling import MAX_SEED, row_seed
from tformer_deploy.strict_json import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tformer_deploy.config import ModelConfig

# The closed list of row error codes; the README documents them.
Code = Literal[
    "invalid_utf8", "invalid_json", "line_too_long", "missing_prompt", "invalid_field", "empty_prompt", "prompt_too_long",
    "token_out_of_range", "no_tokenizer", "bad_logits",
]  # fmt: skip
LINE_LIMIT = 16 * 2**20
_SAMPLING = ("temperature", "top_k", "top_p")
FIELDS = {"id", "prompt", "input_ids", "max_new_tokens", "seed", "stop", *_SAMPLING}
_LONG_ID = 64
_JSONL = 'PROMPTS is JSONL: write {"prompt": "…"} or {"input_ids": […]}, a line each.'


class RowError(Exception):
    """Why one row cannot run."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass(frozen=True)
class Defaults:
    """What a row gets where it says nothing."""

    options: SamplingOptions
    max_new_tokens: int
    stop: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class Row:
    """One line of the file: a request, or the error that it is.

    Attributes:
        id: The row's own, or its line number; None where it cannot be read.
        line: Counted from 1.
        request: None where there is an error.
        error: None where there is a request.
    """

    id: str | int | None
    line: int
    request: Request | None
    error: RowError | None


@dataclass(frozen=True)
class Scan:
    """What a first look at a prompts file found.

    Attributes:
        rows: Lines that are not blank.
        unknown: Names of fields that no row may have, sorted; they are ignored.
    """

    rows: int
    unknown: tuple[str, ...]


def scan(file: IO[bytes]) -> Scan:
    """Reads a whole prompts file once, keeping nothing but ids, before any work is done.

    Raises:
        InputError: The file is UTF-16 or compressed, it has several lines and none begins like a JSON object, or two rows have the same id.
    """
    count, lines, unknown, like_json = 0, dict[str, int](), set[str](), False
    for number, data in _lines(file):
        count += 1
        like_json |= data is None or data.lstrip().startswith(b"{")
        try:
            raw = _parse(data)
            unknown |= raw.keys() - FIELDS
            if "id" in raw:
                _refuse_second(_row_id(raw["id"]), number, lines)
        except RowError:
            continue  # reported when the row is read
    if count > 1 and not like_json:
        raise InputError("No line of the prompts file begins like a JSON object.", _JSONL)
    return Scan(count, tuple(sorted(unknown)))


def read_rows(
    file: IO[bytes], config: ModelConfig, max_length: int, tokenizer: Tokenizer | None, defaults: Defaults
) -> Iterator[Row]:
    """Every row of a prompts file that :func:`scan` let pass, one by one; blank lines count as lines and give no row."""
    for number, data in _lines(file):
        row_id: str | int = number
        try:
            raw = _parse(data)
            row_id = _row_id(raw.get("id", number))
            yield Row(row_id, number, _request(raw, number - 1, config, max_length, tokenizer, defaults), None)
        except RowError as e:
            yield Row(row_id, number, None, e)


def _row_id(value: Any) -> str | int:
    if type(value) is int or (isinstance(value, str) and _is_unicode(value)):
        return value
    raise RowError("invalid_field", f"id is {ascii(value)[:80]}; expected text or a whole number.")


def _is_unicode(text: str) -> bool:
    """False where JSON escapes left a lone surrogate, which no file can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _refuse_second(row_id: str | int, number: int, lines: dict[str, int]) -> None:
    """Results are told apart by their ids: 1 and "1" are the same."""
    key = str(row_id)
    first = lines.setdefault(key if len(key) <= _LONG_ID else hashlib.sha256(key.encode()).hexdigest(), number)
    if first != number:
        raise InputError(f"Lines {first} and {number} both have the id {str(row_id)[:80]!r}.", "Give every row its own id.")


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """(number, content) of each line that is not blank; None for one over the limit, which is skipped in pieces."""
    number = 0
    while data := file.readline(LINE_LIMIT + 1):
        number += 1
        if number == 1:
            if data.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise InputError("The prompts file is UTF-16.", "Save it as UTF-8.")
            if data.startswith(b"\x1f\x8b"):
                raise InputError("The prompts file is compressed with gzip.", "Unpack it first.")
            data = data.removeprefix(b"\xef\xbb\xbf")
        if len(data) > LINE_LIMIT:
            while data and not data.endswith(b"\n"):
                data = file.readline(LINE_LIMIT)
            yield number, None
        elif data.strip():
            yield number, data


def _parse(data: bytes | None) -> dict[str, Any]:
    if data is None:
        raise RowError("line_too_long", f"The line has more than {LINE_LIMIT} bytes.")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise RowError("invalid_utf8", f"Byte {e.start} is 0x{data[e.start]:02x}, which is not UTF-8.") from None
    try:
        raw = parse_json(data, "The line", LINE_LIMIT)  # a text may hold any number of commas
    except InputError as e:
        raise RowError("invalid_json", e.message) from None
    if not isinstance(raw, dict):
        raise RowError("invalid_json", f"The line is a JSON {type(raw).__name__}; expected an object.")
    return raw


def _request(
    raw: dict[str, Any], index: int, config: ModelConfig, max_length: int, tokenizer: Tokenizer | None, defaults: Defaults
) -> Request:
    ids = _ids(raw, config, tokenizer)
    if not ids:
        raise RowError("empty_prompt", "The prompt has no token.")
    if len(ids) > max_length:
        raise RowError("prompt_too_long", f"The prompt has {len(ids)} tokens; max_length is {max_length} (export --max-length).")
    bad = [i for i in ids if not 0 <= i < config.vocab_size]
    if bad:
        name = str(bad[0]) if tokenizer is None or "input_ids" in raw else tokenizer.name(bad[0])
        raise RowError(
            "token_out_of_range", f"The prompt has the token id {name}; the model's go from 0 to {config.vocab_size - 1}."
        )
    try:
        options = replace(defaults.options, **{k: raw[k] for k in _SAMPLING if k in raw})
    except TformerError as e:
        raise RowError("invalid_field", e.message) from None
    stop = _stop(raw["stop"]) if "stop" in raw else defaults.stop
    if stop and tokenizer is None:
        raise RowError("no_tokenizer", "stop needs a tokenizer, and the bundle has none.")
    seed = _whole(raw, "seed", row_seed(defaults.seed, index), MAX_SEED)
    return Request(tuple(ids), options, _whole(raw, "max_new_tokens", defaults.max_new_tokens, 2**31 - 1), stop, seed)


def _ids(raw: dict[str, Any], config: ModelConfig, tokenizer: Tokenizer | None) -> list[int]:
    if ("prompt" in raw) == ("input_ids" in raw):
        raise RowError("missing_prompt", "The row needs prompt or input_ids, and not both.")
    if "input_ids" in raw:
        ids = raw["input_ids"]
        if not isinstance(ids, list) or any(type(i) is not int for i in ids):
            raise RowError("invalid_field", "input_ids is no list of whole numbers.")
        return ids
    if not isinstance(raw["prompt"], str):
        raise RowError("invalid_field", f"prompt is {type(raw['prompt']).__name__}; expected text.")
    if tokenizer is None:
        raise RowError("no_tokenizer", "prompt needs a tokenizer, and the bundle has none; give input_ids.")
    try:
        return tokenizer.encode(raw["prompt"])
    except InputError as e:
        raise RowError("invalid_field", f"prompt: {e.message}") from None


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or any(not isinstance(s, str) or not s or not _is_unicode(s) for s in strings):
        raise RowError("invalid_field", "stop is no text or list of texts that are not empty.")
    return tuple(strings)


def _whole(raw: dict[str, Any], name: str, default: int, high: int) -> int:
    value = raw.get(name, default)
    if type(value) is not int or not 0 <= value <= high:
        raise RowError("invalid_field", f"{name} is {value!r}; expected a whole number from 0 to {high}.")
    return value
