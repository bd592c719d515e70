"""Manifest ↔ bytes. Reading is strict: a manifest is hostile input."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from tformer_deploy.bundle.manifest import MANIFEST, SCHEMA, WEIGHTS, FileRecord, Manifest, Source, TensorRecord
from tformer_deploy.bundle.quantization import (
    BLOCKS,
    CALIBRATION,
    DYNAMIC,
    KINDS,
    WHOLE,
    Calibration,
    Quantization,
    stored_size,
)
from tformer_deploy.bundle.tensor_table import check_tensor_table
from tformer_deploy.config import DTYPES, ModelConfig
from tformer_deploy.errors import InputError, escaped
from tformer_deploy.strict_json import parse_object

_STORED = (*DTYPES, *WHOLE)
_QUANTISED = 2  # the first schema with ``quantization``
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_AGAIN = "Export the bundle again."
REQUIRED_FILES = ("decode.onnx", "prefill.onnx", WEIGHTS)


def dump_manifest(manifest: Manifest) -> bytes:
    """Stable bytes: sorted keys, one form for every number."""
    raw = dataclasses.asdict(manifest)
    if manifest.quantization is None:
        del raw["quantization"]
        raw["schema"] = 1
    else:
        raw["schema"] = _QUANTISED
    return (json.dumps(raw, sort_keys=True, indent=1, ensure_ascii=False) + "\n").encode()


def parse_manifest(data: bytes) -> Manifest:
    """Reads ``manifest.json``.

    Raises:
        InputError: A field is missing, unknown, out of bounds, or the schema is newer than this version reads.
    """
    raw = parse_object(data, MANIFEST)
    schema = raw.get("schema")
    if type(schema) is not int or schema < 1:
        raise InputError(f"{MANIFEST}: schema is {_cut(schema)}; expected a whole number from 1.", _AGAIN)
    if schema > SCHEMA:
        raise _newer(schema, raw.get("versions"))
    wanted = {f.name for f in dataclasses.fields(Manifest)}
    _exact_keys(raw, wanted if schema >= _QUANTISED else wanted - {"quantization"}, MANIFEST)
    config = _config(raw["config"])
    if raw["dtype"] not in DTYPES:
        raise InputError(f"{MANIFEST}: dtype is {_cut(raw['dtype'])}; expected one of {', '.join(DTYPES)}.", _AGAIN)
    eos = _list(raw["eos_token_ids"], "eos_token_ids")
    bos = raw["bos_token_id"]
    tensors = {name: _tensor(name, record) for name, record in _object(raw["tensors"], "tensors").items()}
    manifest = Manifest(
        config=config,
        dtype=raw["dtype"],
        max_length=_whole(raw["max_length"], "max_length", 1, config.max_length),
        eos_token_ids=tuple(_whole(i, "eos_token_ids", 0, config.vocab_size - 1) for i in eos),
        bos_token_id=None if bos is None else _whole(bos, "bos_token_id", 0, config.vocab_size - 1),
        source=_source(raw["source"]),
        versions={k: _text(v, f"versions.{escaped(k)}") for k, v in _object(raw["versions"], "versions").items()},
        files={name: _file(name, record) for name, record in _object(raw["files"], "files").items()},
        tensors=tensors,
        schema=schema,
        quantization=_quantization(raw["quantization"]) if schema >= _QUANTISED else None,
    )
    _check_files(manifest)
    return manifest


def _config(raw: Any) -> ModelConfig:
    try:
        return ModelConfig.from_dict(raw)
    except InputError as e:
        raise InputError(f"{MANIFEST}: {escaped(e.message)}", e.hint or _AGAIN) from None


def _newer(schema: int, versions: Any) -> InputError:
    version = versions.get("tformer-deploy") if isinstance(versions, dict) else None
    known = isinstance(version, str) and re.fullmatch(r"[0-9A-Za-z.+-]{1,40}", version)
    made = f"made by tformer-deploy {version}, needs tformer-deploy >= {version}" if known else "made by a newer tformer-deploy"
    return InputError(
        f"{MANIFEST} has schema {schema}: {made}; this version reads schema {SCHEMA}.",
        f"Install tformer-deploy >= {version}." if known else "Install a newer tformer-deploy.",
    )


def _check_files(manifest: Manifest) -> None:
    if missing := [name for name in REQUIRED_FILES if name not in manifest.files]:
        raise InputError(f"{MANIFEST}: files lacks {', '.join(missing)}.", _AGAIN)
    check_tensor_table(manifest.config, manifest.dtype, manifest.tensors, manifest.quantization)
    calibrated = manifest.quantization is not None and manifest.quantization.calibration is not None
    if calibrated != (CALIBRATION in manifest.files):
        raise InputError(
            f"{MANIFEST}: files {'lacks' if calibrated else 'names'} {CALIBRATION}, and quantization.calibration "
            f"{'says that there is one' if calibrated else 'says nothing of it'}.",
            _AGAIN,
        )
    size = manifest.files[WEIGHTS].size
    for name, record in manifest.tensors.items():
        if record.offset + record.size > size:
            raise InputError(
                f"{MANIFEST}: tensor {name} ends at byte {record.offset + record.size}; {WEIGHTS} has {size} bytes.", _AGAIN
            )


def _exact_keys(raw: dict[str, Any], wanted: set[str], place: str) -> None:
    missing, unknown = sorted(wanted - set(raw)), sorted(set(raw) - wanted)
    if missing or unknown:
        found = f"missing fields {repr(missing)[:300]}, unknown fields {repr(unknown)[:300]}"
        raise InputError(f"{escaped(place)}: {found}.", _AGAIN)


def _cut(value: Any) -> str:
    return escaped(repr(value)[:80])


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{MANIFEST}: {place} is {type(value).__name__}; expected an object.", _AGAIN)
    return value


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{MANIFEST}: {place} is {type(value).__name__}; expected a list.", _AGAIN)
    return value


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{MANIFEST}: {place} is {_cut(value)}; expected text.", _AGAIN)
    return value


def _whole(value: Any, place: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InputError(f"{MANIFEST}: {place} is {_cut(value)}; expected a whole number from {low} to {high}.", _AGAIN)
    return value


def _hash(value: Any, place: str) -> str:
    if not (isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value)):
        raise InputError(f"{MANIFEST}: {place} is {_cut(value)}; expected 64 hexadecimal digits.", _AGAIN)
    return value


def _file(name: str, raw: Any) -> FileRecord:
    if not _NAME.fullmatch(name) or name == MANIFEST:
        raise InputError(f"{MANIFEST}: files names {_cut(name)}; expected a plain file name inside the bundle.", _AGAIN)
    record = _object(raw, f"files.{name}")
    _exact_keys(record, {"sha256", "size"}, f"{MANIFEST}: files.{name}")
    return FileRecord(_hash(record["sha256"], f"files.{name}.sha256"), _whole(record["size"], f"files.{name}.size", 0, 2**53))


def _tensor(name: str, raw: Any) -> TensorRecord:
    place = f"tensors.{escaped(name)}"
    record = _object(raw, place)
    _exact_keys(record, {"offset", "size", "shape", "dtype"}, f"{MANIFEST}: {place}")
    shape = tuple(_whole(d, f"{place}.shape", 1, 2**31 - 1) for d in _list(record["shape"], f"{place}.shape"))
    if record["dtype"] not in _STORED:
        raise InputError(f"{MANIFEST}: {place}.dtype is {_cut(record['dtype'])}; expected one of {', '.join(_STORED)}.", _AGAIN)
    size = _whole(record["size"], f"{place}.size", 1, 2**53)
    if size != stored_size(shape, record["dtype"]):
        raise InputError(
            f"{MANIFEST}: {place} has shape {list(shape)} in {record['dtype']} and size {size}; they do not agree.", _AGAIN
        )
    return TensorRecord(_whole(record["offset"], f"{place}.offset", 0, 2**53), size, shape, record["dtype"])


def _quantization(raw: Any) -> Quantization:
    record = _object(raw, "quantization")
    _exact_keys(record, {f.name for f in dataclasses.fields(Quantization)}, f"{MANIFEST}: quantization")
    heads: tuple[str, ...] = WHOLE
    blocks: tuple[int | None, ...] = BLOCKS
    if record["kind"] == DYNAMIC:  # its head is too, and its scales are of whole inputs
        heads, blocks = (DYNAMIC,), (None,)
    elif record["block"] is None:  # a graph derived from such a bundle
        heads, blocks = ("int8",), (None,)
    for name, choices in (("kind", KINDS), ("head", heads), ("block", blocks)):
        value = record[name]
        if isinstance(value, bool) or value not in choices:
            expected = ", ".join(map(str, choices))
            raise InputError(f"{MANIFEST}: quantization.{name} is {_cut(value)}; expected one of {expected}.", _AGAIN)
    calibration = None
    if record["calibration"] is not None:
        place = "quantization.calibration"
        fields = _object(record["calibration"], place)
        _exact_keys(fields, {f.name for f in dataclasses.fields(Calibration)}, f"{MANIFEST}: {place}")
        rows, tokens = (_whole(fields[n], f"{place}.{n}", 1, 2**31 - 1) for n in ("rows", "tokens"))
        calibration = Calibration(_text(fields["name"], f"{place}.name"), rows, tokens)
    return Quantization(record["kind"], record["head"], record["block"], calibration)


def _source(raw: Any) -> Source:
    record = _object(raw, "source")
    _exact_keys(record, {"name", "format", "family", "sha256"}, f"{MANIFEST}: source")
    name, kind, family = (_text(record[k], f"source.{k}") for k in ("name", "format", "family"))
    return Source(name, kind, family, _hash(record["sha256"], "source.sha256"))
