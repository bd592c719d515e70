"""Reads a report back: only a whole one, unchanged, of the very bundle that it is shown with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, get_args

from tformer_deploy.bundle.verify import read_plain_file
from tformer_deploy.config import DTYPES
from tformer_deploy.errors import InputError, escaped
from tformer_deploy.parity.gates import Verdict
from tformer_deploy.parity.plan import Suite
from tformer_deploy.parity.report import HASH, SCHEMA, content_hash, verdict_of
from tformer_deploy.strict_json import parse_object

if TYPE_CHECKING:
    from pathlib import Path

    from tformer_deploy.bundle import Bundle

_LIMIT = 64 * 2**20
_AGAIN = "Run `tformer-deploy check BUNDLE --checkpoint PATH --report FILE` again."
_FIRST = "Write one with `tformer-deploy check BUNDLE --checkpoint PATH --report FILE`."
_TEXT, _NUMBER = (str,), (int, float)
_MAYBE_NUMBER, _MAYBE_COUNT, _MAYBE_TEXT = (int, float, type(None)), (int, type(None)), (str, type(None))
# Object in the report → its fields → types of their values; docs/parity.md says what they mean.
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "": {
        "schema": (int,), "verdict": _TEXT, "passed": (bool,), "bundle": _TEXT, "core_sha256": _TEXT, "dtype": _TEXT,
        "suite": _TEXT, "against": _TEXT, "complete": (bool,), "notes": (list,), "peak_mib": _NUMBER, "seconds": _NUMBER,
        "versions": (dict,), "checks": (list,), "rows": (list,), "positions": (list,), "layers": (list,),
        "bisection": (list, type(None)), HASH: _TEXT,
    },
    "checks[]": {
        "group": _TEXT, "metric": _TEXT, "value": _MAYBE_NUMBER, "gate": _MAYBE_NUMBER, "relation": _TEXT, "verdict": _TEXT,
        "detail": _TEXT,
    },
    "rows[]": {
        "graph": _TEXT, "row": (int,), "prompt_tokens": (int,), "ids": (list,), "max_abs": _MAYBE_NUMBER, "position": (int,),
        "mean_kl": _MAYBE_NUMBER,
    },
    "positions[]": {"graph": _TEXT, "position": (int,), "rows": (int,), "max_abs": _MAYBE_NUMBER},
    "layers[]": {"graph": _TEXT, "layer": (int,), "key": _MAYBE_NUMBER, "value": _MAYBE_NUMBER},
    "bisection[]": {"run": _TEXT, "parts": (dict, type(None)), "missing": (list,), "failure": _TEXT, "stations": (list,)},
    "bisection[].parts": {"place": _TEXT, "layer": _MAYBE_COUNT, "half": _MAYBE_TEXT, "exact": (bool,)},
    "bisection[].stations[]": {"name": _TEXT, "layer": _MAYBE_COUNT, "error": _MAYBE_NUMBER, "line": _MAYBE_NUMBER},
}  # fmt: skip


def read_report(path: Path, bundle: Bundle) -> dict[str, Any]:
    """The report in a file, as :meth:`Report.to_json` wrote it.

    Raises:
        InputError: It is no report, was changed after it was written, contradicts itself, or is of another bundle.
    """
    place = escaped(str(path))
    if not path.exists() or path.is_dir():
        raise InputError(f"The report {place} is {'a folder' if path.is_dir() else 'not there'}.", _FIRST)
    report = parse_report(read_plain_file(path, _LIMIT), place)
    if report["core_sha256"] != bundle.core_sha256:
        raise InputError(
            f"{place} is the report of another bundle: it names the core {escaped(report['core_sha256'][:64])}; "
            f"{escaped(str(bundle.path))} is {bundle.core_sha256}.",
            _AGAIN,
        )
    if report["dtype"] != bundle.manifest.dtype:
        raise InputError(
            f"{place} applies {escaped(report['dtype'])} gates; the bundle's dtype is {bundle.manifest.dtype}.", _AGAIN
        )
    return report


def parse_report(data: bytes, place: str) -> dict[str, Any]:
    """A report whose fields, content hash and verdict are right; ``place`` names it in messages.

    Raises:
        InputError: They are not.
    """
    report = parse_object(data, place)
    schema = report.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise InputError(f"{place}: schema is {escaped(repr(schema))[:80]}; this version reads {SCHEMA}.", _AGAIN)
    _require_fields(report, "", place)
    for name in ("checks", "rows", "positions", "layers", "bisection"):
        for i, item in enumerate(report[name] or ()):
            _require_fields(item, f"{name}[]", f"{place}: {name}[{i}]")
    for i, run in enumerate(report["bisection"] or ()):
        if run["parts"] is not None:
            _require_fields(run["parts"], "bisection[].parts", f"{place}: bisection[{i}].parts")
        for j, station in enumerate(run["stations"]):
            _require_fields(station, "bisection[].stations[]", f"{place}: bisection[{i}].stations[{j}]")
    _require_words(report, place)
    if report[HASH] != content_hash(report):
        raise InputError(f"{place} was changed after it was written: its {HASH} does not fit its content.", _AGAIN)
    verdict = verdict_of([check["verdict"] for check in report["checks"]], report["complete"])
    if report["verdict"] != verdict or report["passed"] != (verdict == "green"):
        raise InputError(f"{place} says {escaped(report['verdict'])[:40]!r}; its checks make it {verdict!r}.", _AGAIN)
    return report


def _require_fields(item: Any, kind: str, place: str) -> None:
    fields = FIELDS[kind]
    if not isinstance(item, dict):
        raise InputError(f"{place} is a JSON {type(item).__name__}; expected an object.", _AGAIN)
    unknown, missing = sorted(set(item) - set(fields)), sorted(set(fields) - set(item))
    if unknown or missing:
        raise InputError(f"{place}: unknown fields {escaped(str(unknown))[:200]}, missing fields {missing}.", _AGAIN)
    for name, types in fields.items():
        if type(item[name]) not in types:
            wanted = " or ".join("null" if t is type(None) else t.__name__ for t in types)
            raise InputError(f"{place}: {name} is {escaped(repr(item[name]))[:80]}; expected {wanted}.", _AGAIN)


def _require_words(report: dict[str, Any], place: str) -> None:
    """Refuses what is of the right type and means nothing."""
    words = [("dtype", report["dtype"], DTYPES), ("suite", report["suite"], get_args(Suite))]
    for i, check in enumerate(report["checks"]):
        words.append((f"checks[{i}].verdict", check["verdict"], get_args(Verdict)))
        words.append((f"checks[{i}].relation", check["relation"], ("<=", ">=", "==")))
    for name, found, known in words:
        if found not in known:
            raise InputError(f"{place}: {name} is {escaped(found)[:80]!r}; expected one of {', '.join(known)}.", _AGAIN)
    for name in ("core_sha256", HASH):
        if not re.fullmatch("[0-9a-f]{64}", report[name]):
            raise InputError(f"{place}: {name} is {escaped(report[name])[:80]!r}; expected 64 hexadecimal digits.", _AGAIN)
    texts = [*report["notes"], *report["versions"].values()]
    texts += [name for run in report["bisection"] or () for name in run["missing"]]
    numbers = [i for row in report["rows"] for i in row["ids"]]
    if not all(isinstance(t, str) for t in texts) or not all(type(i) is int for i in numbers):
        raise InputError(f"{place}: notes, versions and missing are texts, ids are whole numbers; one of them is not.", _AGAIN)
