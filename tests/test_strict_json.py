"""Strict JSON: what the standard leaves open or Python lets through is refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tformer_deploy.errors import InputError
from tformer_deploy.strict_json import parse_json, parse_object

REFUSED = {
    "empty": (b"", "c.json is empty"),
    "blank": (b" \n", "c.json is empty"),
    "not json": (b"{'a': 1}", "Expecting property name enclosed in double quotes at byte 1"),
    "position in bytes": ('{"ä": tru}'.encode(), "at byte 7"),
    "not utf-8": (b'{"a": "\xff"}', "not UTF-8 text: byte 7"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8 text: byte 0"),
    "duplicate key": (b'{"a": 1, "b": {"c": 1, "c": 1}}', "the key 'c' twice"),
    "NaN": (b'{"a": NaN}', "a is NaN; expected a finite number"),
    "Infinity in a list": (b'{"a": [1, -Infinity]}', "a is -Infinity"),
    "NaN in a list of lists": (b'{"a": [[1, [NaN]]]}', "a is NaN"),
    "NaN in an object in a list": (b'{"a": [{"b": NaN}]}', "b is NaN"),
    "NaN alone": (b"NaN", "NaN"),
    "number beyond any float": (b'{"a": 1e999}', "a is 1e999; expected a finite number"),
    "huge whole number": (b'{"a": ' + b"9" * 5000 + b"}", r"a is 9{20}… \(5000 characters\)"),
    "deep nesting": (b"[" * 100_000, r"c.json nests objects or lists more than 100 deep \(byte 100\)"),
    "deep objects": (b'{"a":' * 100_000, r"c.json: a nests objects or lists more than 100 deep \(byte 500\)"),
    "deep and complete": (b'{"a": [], "b": ' + b"[" * 150 + b"]" * 150 + b"}", "c.json: b nests"),
    "brackets in a string are none": (b'{"a": "' + b"[" * 150 + b'", "b": NaN}', "b is NaN"),
    "values without end": (b"[" + b"1," * 500_000 + b"1]", "holds about 500001 values; at most 500000"),
    "lone surrogate": (b'{"a": "\\ud800"}', "half of a surrogate pair"),
    "control character": (b'{"a": "\x01"}', "Invalid control character at byte 7"),
    "two values": (b"{} {}", "Extra data at byte 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_json_when_not_strict_then_is_refused_by_name(case: str):
    content, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        parse_object(content, "c.json")


@pytest.mark.parametrize("content", [b"[]", b'"text"', b"null", b"1"])
def test_object_when_something_else_then_is_refused(content: bytes):
    with pytest.raises(InputError, match="expected an object"):
        parse_object(content, "c.json")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_when_strict_then_is_what_was_written(value: object):
    assert parse_json(json.dumps(value).encode(), "c.json") == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode(), "c.json") == value
