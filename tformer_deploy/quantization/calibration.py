"""Rows of ids for which weights are rounded: cut from a user's text or prompts, and kept in the bundle."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tformer_deploy.bundle.quantization import CALIBRATION, Calibration
from tformer_deploy.errors import InputError, escaped
from tformer_deploy.strict_json import parse_json, parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tformer_deploy.config import ModelConfig

    Rows = tuple[tuple[int, ...], ...]

# On a model of 0.9 M parameters four times as many lower the KL by 4 %, and cost four times as long.
TOKENS = 8192
_WIDTH = 256  # a row of a text
_LONGEST = 512  # a row of a prompts file
_FEWEST = 2  # of ids in a row, and the least of a whole calibration is a row
_FILE_BYTES = 64 * 2**20
_FIELDS = ("prompt", "text", "turns", "input_ids")


def calibration_rows(
    path: Path, encode: Callable[[str], list[int]] | None, config: ModelConfig, max_length: int, what: str = "calibration"
) -> Rows:
    """Rows of ids from a UTF-8 text, or from JSONL whose lines have ``prompt``, ``text``, ``turns`` (the first counts) or
    ``input_ids``. They are taken evenly from the whole file, :data:`TOKENS` ids at most.

    Args:
        path: The file; its ending ``.jsonl`` says that it is one.
        encode: The checkpoint's tokenizer; None where it has none.
        config: The model.
        max_length: Bound on the ids of a row.
        what: What messages call the file.

    Raises:
        InputError: The file cannot be read or gives no row, or an id is outside the vocabulary.
    """
    place = escaped(str(path))
    if not path.is_file():
        raise InputError(f"The {what} {place} is no file.", "Name a UTF-8 text or a JSONL file of prompts.")
    if (size := path.stat().st_size) > _FILE_BYTES:
        raise InputError(f"The {what} {place} has {size} bytes; at most {_FILE_BYTES} are read.", "Name a part of it.")
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(f"The {what} {place} is not UTF-8: byte {e.start}.", "Convert it to UTF-8.") from None
    if path.suffix == ".jsonl":
        longest = min(_LONGEST, max_length)
        rows = [tuple(ids[:longest]) for ids in _prompts(text, place, encode)]
    else:
        ids, width = _encoded(text, place, encode), min(_WIDTH, max_length)
        rows = [tuple(ids[start : start + width]) for start in range(0, len(ids), width)]
    rows = _spread([row for row in rows if len(row) >= _FEWEST])
    if not rows:
        raise InputError(f"The {what} {place} gives no row of {_FEWEST} tokens.", "Name a longer text.")
    _require_vocabulary(rows, config, place)
    return tuple(rows)


def dump_rows(rows: Rows) -> bytes:
    """``calibration.json``."""
    return (json.dumps({"rows": rows}, separators=(",", ":")) + "\n").encode()


def read_rows(data: bytes, calibration: Calibration, config: ModelConfig) -> Rows:
    """The rows of a bundle's ``calibration.json``.

    Raises:
        InputError: It is not what the manifest says, or holds an id outside the vocabulary.
    """
    raw = parse_object(data, CALIBRATION)
    rows = raw.get("rows")
    if set(raw) != {"rows"} or not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        raise InputError(f"{CALIBRATION} is no list of rows of ids.", "Export the bundle again.")
    found = (len(rows), sum(map(len, rows)))
    if found != (calibration.rows, calibration.tokens):
        raise InputError(
            f"{CALIBRATION} has {found[0]} rows of {found[1]} ids; the manifest says {calibration.rows} of {calibration.tokens}.",
            "Export the bundle again.",
        )
    checked = [tuple(row) for row in rows]
    if longest := [row for row in checked if len(row) > config.max_length]:
        raise InputError(f"{CALIBRATION} has a row of {len(longest[0])} ids; the model holds {config.max_length}.")
    _require_vocabulary(checked, config, CALIBRATION)
    return tuple(checked)


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and len(value) >= _FEWEST and all(type(i) is int for i in value)


def _encoded(text: str, place: str, encode: Callable[[str], list[int]] | None) -> list[int]:
    if encode is None:
        raise InputError(
            f"The checkpoint has no tokenizer.json, so that {place} cannot become ids.",
            "Give JSONL with input_ids, or a checkpoint that has a tokenizer.",
        )
    return encode(text)


def _prompts(text: str, place: str, encode: Callable[[str], list[int]] | None) -> list[list[int]]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        raw = parse_json(line.encode(), f"{place}, line {number}")
        given = [name for name in _FIELDS if name in raw] if isinstance(raw, dict) else []
        value = raw[given[0]] if given else None
        if given == ["turns"] and isinstance(value, list) and value:
            value = value[0]
        if given == ["input_ids"] and isinstance(value, list) and all(type(i) is int for i in value):
            rows.append(value)
        elif len(given) == 1 and given != ["input_ids"] and isinstance(value, str):
            rows.append(_encoded(value, place, encode))
        else:
            raise InputError(f"{place}, line {number}: expected an object with one of {', '.join(_FIELDS)}.")
    return rows


def _spread(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Rows at even distances, as many as hold :data:`TOKENS` ids together."""
    total = sum(map(len, rows))
    if total <= TOKENS:
        return list(rows)
    wanted = max(1, len(rows) * TOKENS // total)
    kept: list[tuple[int, ...]] = []
    tokens = 0
    for i in range(wanted):
        row = rows[i * len(rows) // wanted]
        if kept and tokens + len(row) > TOKENS:
            break
        kept.append(row)
        tokens += len(row)
    return kept


def _require_vocabulary(rows: Sequence[tuple[int, ...]], config: ModelConfig, place: str) -> None:
    bad = next((i for row in rows for i in row if not 0 <= i < config.vocab_size), None)
    if bad is not None:
        raise InputError(f"{place} gives the id {bad}; the model's ids go from 0 to {config.vocab_size - 1}.")
