"""A report as JUnit XML, which every CI service shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from tformer_deploy.parity.gates import Check
    from tformer_deploy.parity.report import Report

# What XML 1.0 cannot hold, even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: Report) -> bytes:
    """One testcase a check: red is a failure; ambiguous and reported pass and say so in their output.

    A report that is not green although no check is red (nothing to compare with) has one failing testcase more.
    """
    cases = [_case(report, c) for c in report.checks]
    if report.verdict == "self-consistent only" or not report.checks:
        case = _element("testcase", classname=_class(report), name="compared with a checkpoint")
        case.append(_element("failure", f"The verdict is {report.verdict!r}.", message=report.verdict, type="incomplete"))
        cases.append(case)
    failures = sum(case.find("failure") is not None for case in cases)
    name = f"parity of {report.bundle} with {report.against}"
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "skipped": "0", "time": f"{report.seconds:.1f}"}
    suite = _element("testsuite", name=name, **counts)
    facts = {"verdict": report.verdict, "suite": report.suite, "dtype": report.dtype, "core_sha256": report.core_sha256}
    properties = _element("properties")
    for key, value in (*facts.items(), *report.versions.items()):
        properties.append(_element("property", name=key, value=value))
    suite.append(properties)
    suite.extend(cases)
    if report.notes:
        suite.append(_element("system-out", "\n".join(report.notes)))
    root = _element("testsuites", name="tformer-deploy check", **counts)
    root.append(suite)
    ET.indent(root)
    data: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def _case(report: Report, check: Check) -> ET.Element:
    case = _element("testcase", classname=_class(report), name=f"{check.group}: {check.metric}")
    line = "reported only" if check.gate is None else f"expected {check.relation} {check.gate:.6g}"
    sentence = f"{check.metric} is {check.value:.6g}; {line}"
    text = f"{sentence}. {check.detail}".rstrip()
    if check.verdict == "red":
        case.append(_element("failure", text, message=sentence, type="parity"))
    else:
        case.append(_element("system-out", text if check.verdict == "green" else f"{check.verdict}: {text}"))
    return case


def _class(report: Report) -> str:
    return f"tformer-deploy.check.{report.suite}.{report.dtype}"


def _element(tag: str, content: str = "", **attributes: str) -> ET.Element:
    """An element whose text and attributes hold nothing that XML cannot; control characters are spelled out."""
    element = ET.Element(tag, {k: _clean(v) for k, v in attributes.items()})
    if content:
        element.text = _clean(content)
    return element


def _clean(text: str) -> str:
    return _FORBIDDEN.sub(lambda m: m[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)
