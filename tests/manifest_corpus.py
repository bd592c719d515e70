"""Manifests that no reader of bundles may accept: one list for Python and for C++.

Each is an edit of a good manifest, or a whole text, and a word that every reader's refusal names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Manifest = dict[str, Any]
RECORD = {"sha256": "0" * 64, "size": 1}


def _file(name: str) -> Callable[[Manifest], Any]:
    return lambda m: m["files"].update({name: RECORD})


def _weights(**changes: Any) -> Callable[[Manifest], Any]:
    return lambda m: m["files"]["weights.bin"].update(changes)


def _config(**changes: Any) -> Callable[[Manifest], Any]:
    return lambda m: m["config"].update(changes)


EDITS: dict[str, tuple[Callable[[Manifest], Any], str]] = {
    "schema newer": (lambda m: m.update(schema=3), "schema"),
    "schema much newer, with new fields": (lambda m: m.update(schema=2**40, later={"a": 1}), "schema"),
    "schema older": (lambda m: m.update(schema=0), "schema"),
    "schema missing": (lambda m: m.pop("schema"), "schema"),
    "schema a text": (lambda m: m.update(schema="1"), "schema"),
    "schema a truth value": (lambda m: m.update(schema=True), "schema"),
    "schema 1.0": (lambda m: m.update(schema=1.0), "schema"),
    "a field missing": (lambda m: m.pop("dtype"), "dtype"),
    "a field too many": (lambda m: m.update(extra=1), "extra"),
    "dtype unknown": (lambda m: m.update(dtype="int4"), "dtype"),
    "dtype a list": (lambda m: m.update(dtype=["fp32"]), "dtype"),
    "max_length of 1e3": (lambda m: m.update(max_length=1e2), "max_length"),
    "max_length below zero": (lambda m: m.update(max_length=-1), "max_length"),
    "max_length of 2^63": (lambda m: m.update(max_length=2**63), "max_length"),
    "max_length above the model's": (lambda m: m.update(max_length=10**6), "max_length"),
    "eos beyond the vocabulary": (lambda m: m.update(eos_token_ids=[131]), "eos_token_ids"),
    "eos below zero": (lambda m: m.update(eos_token_ids=[-1]), "eos_token_ids"),
    "eos of 2^63": (lambda m: m.update(eos_token_ids=[2**63]), "eos_token_ids"),
    "eos 1e0": (lambda m: m.update(eos_token_ids=[1.0]), "eos_token_ids"),
    "eos a truth value": (lambda m: m.update(eos_token_ids=[True]), "eos_token_ids"),
    "eos no list": (lambda m: m.update(eos_token_ids=7), "eos_token_ids"),
    "files no object": (lambda m: m.update(files=[]), "files"),
    "a path up": (_file("../x"), "files"),
    "an absolute path": (_file("/etc/passwd"), "files"),
    "a folder": (_file("a/b"), "files"),
    "a folder above": (_file(".."), "files"),
    "no name": (_file(""), "files"),
    "a drive letter": (_file("C:x"), "files"),
    "a backslash": (_file("a\\b"), "files"),
    "a name with NUL": (_file("a\0b"), "files"),
    "a name with a line": (_file("a\nb"), "files"),
    "a name without end": (_file("a" * 5000), "files"),
    "itself": (_file("manifest.json"), "manifest.json"),
    "weights missing": (lambda m: m["files"].pop("weights.bin"), "weights.bin"),
    "a graph missing": (lambda m: m["files"].pop("decode.onnx"), "decode.onnx"),
    "size below zero": (_weights(size=-1), "weights.bin"),
    "size of 2^63": (_weights(size=2**63), "weights.bin"),
    "size of 1e3": (_weights(size=1e3), "weights.bin"),
    "size a text": (_weights(size="1"), "weights.bin"),
    "size another": (_weights(size=4096), "weights.bin"),
    "hash short": (_weights(sha256="0"), "sha256"),
    "hash in capitals": (_weights(sha256="A" * 64), "sha256"),
    "hash a number": (_weights(sha256=7), "sha256"),
    "hash another": (_weights(sha256="0" * 64), "weights.bin"),
    "a record with more": (_weights(extra=1), "extra"),
    "config no object": (lambda m: m.update(config=[]), "config"),
    "head_dim of 10^9": (_config(head_dim=10**9), ""),
    "kv heads of 10^9": (_config(n_kv_heads=10**9, n_heads=10**9), ""),
    "layers below zero": (_config(n_layers=-3), "n_layers"),
    "layers of two thousand million": (_config(n_layers=2**31 - 1), "layers"),
    "vocabulary missing": (lambda m: m["config"].pop("vocab_size"), "vocab_size"),
    "vocabulary a text": (_config(vocab_size="131"), "vocab_size"),
}
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "list": b"[]",
    "null": b"null",
    "cut": b'{"schema": 1',
    "a key twice": b'{"schema": 1, "schema": 1}',
    "a key twice within": b'{"schema": 1, "files": {"a": {"size": 1, "size": 1}}}',
    "NaN": b'{"schema": NaN}',
    "Infinity": b'{"schema": -Infinity}',
    "beyond any float": b'{"schema": 1e400}',
    "no UTF-8": b'{"a": "\xff"}',
    "UTF-16": '{"schema": 1}'.encode("utf-16"),
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
    "two values": b"{} {}",
}
