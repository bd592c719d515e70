"""Reports: JSON with its schema and its way back, JUnit XML, the page; and where they may be written."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import NoneType
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from conftest import ROOT
from rich.console import Console

from tformer_deploy import cli
from tformer_deploy.bundle import open_bundle
from tformer_deploy.errors import InputError
from tformer_deploy.parity import Report, check_bundle
from tformer_deploy.parity.charts import charts_of
from tformer_deploy.parity.console import render
from tformer_deploy.parity.gates import Check, judge
from tformer_deploy.parity.junit import to_junit
from tformer_deploy.parity.page import to_html
from tformer_deploy.parity.profile import Profile
from tformer_deploy.parity.report import content_hash
from tformer_deploy.parity.report_file import FIELDS, parse_report, read_report

NASTY = '\x1b[31mred\x1b[0m \x00\r<script>alert(1)</script> & "quoted" \' \u202e \ud800 ]]>'


@pytest.fixture(scope="module")
def green(llama_bundle, llama_checkpoint) -> Report:
    """Of the right bundle, with a bisection."""
    return check_bundle(llama_bundle, llama_checkpoint, find_layer=True)


def made_up(*checks: Check, complete: bool = True, text: str = "b") -> Report:
    return Report(text, "0" * 64, "fp32", "quick", text, checks, (text,), complete, 1.0, versions={"x": text})


VERDICTS = made_up(
    judge("a", "fine", 0.5, 1), judge("a", "off", 2, 1, detail=NASTY), judge("a", "not a number", math.nan, 1),
    Check("greedy", "near", 3, 64, "==", "ambiguous", "reference margin 5e-05"), Check("a", "told", 1, None, ">=", "reported"),
    text=NASTY,
)  # fmt: skip


# --- JSON ---------------------------------------------------------------------------------------------------------------


def written(report: Report) -> bytes:
    return json.dumps(report.to_json(), allow_nan=False).encode()


def test_report_when_written_then_has_exactly_the_documented_fields_of_the_documented_types(green):
    """docs/parity.md, the reader and the writer: three times the same schema."""
    documented = dict(
        re.findall(r"^\| `([a-z0-9_.\[\]]+)` \| ([^|]+) \|", (ROOT / "docs" / "parity.md").read_text("utf-8"), re.M)
    )
    spelled = {str: "str", int: "int", bool: "bool", float: "number", list: "list", dict: "object", NoneType: "null"}

    def words(types: tuple[type, ...]) -> set[str]:
        found = {spelled[t] for t in types}
        return found - {"int"} if "number" in found else found

    known = {f"{kind}.{name}".lstrip("."): words(types) for kind, fields in FIELDS.items() for name, types in fields.items()}
    assert {name: {t.strip().split(" of ")[0] for t in types.split(",")} for name, types in documented.items()} == known

    def walk(value: Any, place: str) -> set[str]:
        if isinstance(value, dict) and place != "versions":
            return {f"{place}.{k}".lstrip(".") for k in value}.union(
                *(walk(v, f"{place}.{k}".lstrip(".")) for k, v in value.items())
            )
        if isinstance(value, list):
            return set().union(*(walk(v, f"{place}[]") for v in value))
        return set()

    body = green.to_json()
    body["bisection"][0]["parts"] = {"place": "layer 0", "layer": 0, "half": "attention", "exact": True}
    assert walk(body, "") == set(known)


@pytest.mark.parametrize(
    "report", [VERDICTS, made_up(judge("a", "b", 0, 1)), made_up(complete=False)], ids=["mixed", "one", "none"]
)
def test_report_when_read_back_then_is_the_same(report):
    assert parse_report(written(report), "r.json") == report.to_json()


def test_report_when_another_tool_respells_it_then_is_still_accepted(green):
    body = green.to_json()
    text = json.dumps(body, sort_keys=True, indent=7)
    assert parse_report(text.encode(), "r") == body

    class Float(float):
        """Is written as a whole number where it is one, and otherwise with all its digits."""

        def __repr__(self) -> str:
            return str(int(self)) if self.is_integer() else format(float(self), ".17e")

    def respelled(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{json.dumps(k)}:{respelled(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(respelled, value)) + "]"
        return repr(Float(value)) if isinstance(value, float) else json.dumps(value)

    again = respelled(body)
    assert '"gate":1,' in again
    assert "e-05" in again
    assert parse_report(again.encode(), "r") == body


def resealed(body: dict[str, Any], **changes: Any) -> bytes:
    """Changed, with the hash of what it holds now: what only a strict reader finds."""
    body = {**body, **changes}
    return json.dumps({**body, "content_sha256": content_hash(body)}).encode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 1}, "schema is 1; this version reads 2"),
        ({"schema": 3}, "schema is 3"),
        ({"schema": True}, "schema is True"),
        ({"verdict": "red"}, "its checks make it 'green'"),
        ({"passed": False}, "its checks make it 'green'"),
        ({"complete": False}, "its checks make it 'self-consistent only'"),
        ({"checks": []}, "its checks make it 'red'"),
        ({"checks": {}}, "checks is {}; expected list"),
        ({"checks": [7]}, r"checks\[0\] is a JSON int"),
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
        ({"suite": "none"}, "suite is 'none'"),
        ({"notes": [1]}, "notes, versions and missing are texts"),
        ({"peak_mib": "1"}, "peak_mib is '1'; expected int or float"),
        ({"core_sha256": "0" * 63}, "64 hexadecimal digits"),
        ({"extra": 1}, r"unknown fields \['extra'\]"),
        ({"layers": [{"graph": "prefill", "layer": 0, "key": "x", "value": None}]}, r"layers\[0\]: key is 'x'"),
        ({"bisection": [{}]}, r"bisection\[0\]: unknown fields \[\], missing fields"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_report_when_a_field_is_wrong_then_is_refused_by_name(green, change, words):
    with pytest.raises(InputError, match=words):
        parse_report(resealed(green.to_json(), **change), "r.json")


@pytest.mark.parametrize("name", FIELDS[""])
def test_report_when_a_field_is_missing_then_is_refused_by_name(green, name):
    body = green.to_json()
    del body[name]
    with pytest.raises(InputError, match=name):
        parse_report(resealed(body) if name != "content_sha256" else json.dumps(body).encode(), "r.json")


@pytest.mark.parametrize("kind", ["value", "note", "verdict of a check"])
def test_report_when_changed_after_it_was_written_then_is_refused(green, kind):
    body = green.to_json()
    if kind == "value":
        body["checks"][2]["value"] = 5.0
    elif kind == "note":
        body["notes"] = []
    else:
        body["checks"][0]["verdict"] = "reported"
    with pytest.raises(InputError, match="changed after it was written"):
        parse_report(json.dumps(body).encode(), "r.json")


def test_report_when_cut_at_any_byte_then_is_refused():
    data = written(VERDICTS)
    for end in range(len(data)):
        with pytest.raises(InputError):
            parse_report(data[:end], "r.json")


def test_report_when_any_bit_is_flipped_then_is_refused_or_the_same():
    data = bytearray(written(VERDICTS))
    wanted = parse_report(bytes(data), "r.json")
    refused = 0
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            try:
                assert parse_report(bytes(data), "r.json") == wanted
            except InputError:
                refused += 1
            data[at] ^= 1 << bit
    assert refused > 7 * len(data)


# --- A report with its bundle ---------------------------------------------------------------------------------------------


def check(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.run(["check", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_verify_report_when_it_is_of_this_bundle_then_exit_says_its_verdict(capsys, green, llama_bundle, tmp_path):
    (tmp_path / "r.json").write_bytes(written(green))
    code, out, _ = check(capsys, llama_bundle, "--verify-report", tmp_path / "r.json")
    assert code == 0
    assert "green (quick suite, fp32 gates" in out
    bad = replace(green, checks=(*green.checks, judge("g", "m", 2, 1)))
    (tmp_path / "r.json").write_bytes(written(bad))
    code, out, _ = check(capsys, llama_bundle, "--verify-report", tmp_path / "r.json")
    assert (code, "red" in out) == (1, True)
    (tmp_path / "r.json").write_bytes(written(replace(green, complete=False)))
    assert check(capsys, llama_bundle, "--verify-report", tmp_path / "r.json")[0] == 1


def test_verify_report_when_it_is_of_another_build_then_exit_3_and_names_both(capsys, green, gpt2_bundle, tmp_path):
    (tmp_path / "r.json").write_bytes(written(green))
    code, out, err = check(capsys, gpt2_bundle, "--verify-report", tmp_path / "r.json")
    assert (code, out) == (3, "")
    assert green.core_sha256 in err
    assert open_bundle(gpt2_bundle).core_sha256 in err
    assert "Traceback" not in err


def test_verify_report_when_its_core_is_edited_to_fit_then_exit_3(capsys, green, gpt2_bundle, tmp_path):
    body = green.to_json() | {"core_sha256": open_bundle(gpt2_bundle).core_sha256}
    (tmp_path / "r.json").write_text(json.dumps(body))
    code, _, err = check(capsys, gpt2_bundle, "--verify-report", tmp_path / "r.json")
    assert code == 3
    assert "changed after it was written" in err


def test_verify_report_when_the_bundle_was_made_again_differently_then_exit_3(capsys, green, llama_bundle, tmp_path):
    """One bit of one weight, sealed: another core."""
    from test_parity_check import spoiled

    path = spoiled(llama_bundle, tmp_path / "b", 5.0)
    (path / "reports").mkdir()
    (path / "reports" / "r.json").write_bytes(written(green))
    assert check(capsys, path, "--verify-report", path / "reports" / "r.json")[0] == 3


@pytest.mark.parametrize("kind", ["absent", "folder", "empty", "link", "html", "latin-1"])
def test_verify_report_when_it_is_no_report_then_exit_3_and_names_the_file(capsys, green, llama_bundle, tmp_path, kind):
    path = tmp_path / "r.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "other").write_bytes(written(green))
        path.symlink_to(tmp_path / "other")
    elif kind != "absent":
        path.write_bytes({"empty": b"", "html": to_html(green), "latin-1": b'{"a": "\xe9"}'}[kind])
    code, out, err = check(capsys, llama_bundle, "--verify-report", path)
    assert (code, out) == (3, "")
    assert str(path) in err
    assert "Traceback" not in err


def test_verify_report_when_read_then_needs_no_torch(llama_bundle, green, tmp_path):
    import subprocess
    import sys

    (tmp_path / "r.json").write_bytes(written(green))
    code = (
        "import sys; from tformer_deploy import cli;"
        f"code = cli.run(['check', {str(llama_bundle)!r}, '--verify-report', {str(tmp_path / 'r.json')!r}]);"
        "print(code, [m for m in ('torch', 'onnx', 'onnxruntime') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_read_report_when_the_gates_are_another_dtypes_then_is_refused(green, llama_bundle, tmp_path):
    (tmp_path / "r.json").write_bytes(resealed(green.to_json(), dtype="bf16"))
    with pytest.raises(InputError, match="bf16 gates; the bundle's dtype is fp32"):
        read_report(tmp_path / "r.json", open_bundle(llama_bundle))


# --- JUnit ----------------------------------------------------------------------------------------------------------------


def test_junit_when_written_then_has_one_testcase_a_check_and_red_ones_fail():
    root = ET.fromstring(to_junit(VERDICTS))
    cases = {c.get("name"): c for c in root.iter("testcase")}
    assert list(cases) == ["a: fine", "a: off", "a: not a number", "greedy: near", "a: told"]
    assert [name for name, c in cases.items() if c.find("failure") is not None] == ["a: off", "a: not a number"]
    assert cases["a: off"].find("failure").get("message") == "off is 2; expected <= 1"
    assert cases["greedy: near"].find("system-out").text == "ambiguous: near is 3; expected == 64. reference margin 5e-05"
    assert cases["a: told"].find("system-out").text.startswith("reported: told is 1; reported only")
    for suite in (root, *root.iter("testsuite")):
        assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "2", "0")


def test_junit_when_texts_hold_control_characters_then_is_still_xml_and_shows_them():
    data = to_junit(VERDICTS)
    text = data.decode("utf-8")
    root = ET.fromstring(data)
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", text)
    assert r"\x1b[31mred" in text
    assert "<script>" not in text
    out = next(root.iter("testsuite")).find("system-out").text
    assert "<script>alert(1)</script>" in out
    assert r"\ud800" in out


def test_junit_when_nothing_was_proven_then_one_testcase_fails_for_that():
    report = made_up(judge("a", "fine", 0, 1), complete=False)
    root = ET.fromstring(to_junit(report))
    assert root.get("failures") == "1"
    assert [c.get("name") for c in root.iter("testcase")] == ["a: fine", "compared with a checkpoint"]
    assert ET.fromstring(to_junit(made_up())).get("failures") == "1"
    assert ET.fromstring(to_junit(made_up(judge("a", "fine", 0, 1)))).get("failures") == "0"


# --- The page ---------------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags with their attributes, and all text."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", list[str]()
        self.feed(data.decode("utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


def test_page_when_rendered_then_is_well_formed_and_needs_nothing_else(green):
    data = to_html(green)
    page = Page(data)
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    assert not [a for _, attributes in page.tags for a in attributes if a in ("src", "href", "srcset") or a.startswith("on")]
    assert not re.search(r"https?://|url\(|@import", data.decode())
    assert "prefers-color-scheme: dark" in data.decode()
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_page_when_rendered_then_shows_verdict_checks_charts_rows_and_versions(green):
    text = Page(to_html(green)).text
    assert green.core_sha256 in text
    assert "onnxruntime" in text
    for c in green.checks:
        assert c.group in text
        assert c.metric in text
    titles = [c.title for c in charts_of(green)]
    assert titles[:2] == ["Error by position", "Error by layer: what the caches hold"]
    assert titles[2:] == ["Bisect: prefill", "Bisect: decode, one token", "Bisect: decode, several tokens"]
    assert all(title in text for title in titles)
    assert "Worst rows" in text
    assert "What is red" not in text
    assert "No checkpoint was given" not in text


def test_page_when_something_is_red_then_lists_it_first():
    text = Page(to_html(VERDICTS)).text
    start = text[text.index("What is red") : text.index("What was compared")]
    assert "off" in start
    assert "not a number: nan" in start.replace("\n", "")
    assert "fine" not in start
    assert "No checkpoint was given" in Page(to_html(made_up(complete=False))).text


def test_page_when_texts_come_from_outside_then_they_are_text():
    page = Page(to_html(VERDICTS))
    assert "script" not in {tag for tag, _ in page.tags}
    assert r"\x1b[31mred" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page.text)
    to_html(VERDICTS).decode("utf-8")


def test_charts_when_values_are_zero_or_not_finite_then_every_point_lies_inside(green):
    profile = Profile()
    from tformer_deploy.parity.profile import LayerError, PositionError

    for i, error in enumerate((0.0, 1e-30, 1e-7, 3.0, math.inf, math.nan)):
        profile.positions.append(PositionError("prefill", i, 1, error))
        profile.layers.append(LayerError("decode", i, error, 0.0))
    charts = charts_of(replace(green, profile=profile, bisection=None))
    assert len(charts) == 2
    for chart in charts:
        dots = [dot for line in chart.lines for dot in line.dots]
        assert all(chart.left <= d.x <= chart.right and chart.top <= d.y <= chart.bottom for d in dots)
        assert sum(d.bad for d in dots) == 2
        assert len(chart.y_ticks) <= 9
    assert charts_of(replace(green, profile=Profile(), bisection=None)) == []


def test_charts_when_positions_were_not_measured_then_no_line_is_drawn_over_them(green):
    from tformer_deploy.parity.profile import PositionError

    places = [0, 1, 2, 10, 11]
    profile = Profile(positions=[PositionError("decode", p, 1, 1e-5) for p in places])
    (chart,) = charts_of(replace(green, profile=profile, bisection=None))
    assert [line.path.count("M") for line in chart.lines if line.name == "decode"] == [2]


def test_profile_when_checked_then_says_where_the_largest_error_is(green):
    value = {(c.group, c.metric): c.value for c in green.checks}
    for graph, group in (("prefill", "prefill, ragged batch"), ("decode", "decode, teacher-forced")):
        rows = [r for r in green.profile.rows if r.graph == graph]
        positions = [p for p in green.profile.positions if p.graph == graph]
        assert len(rows) == 5
        assert max(r.max_abs for r in rows) == max(p.max_abs for p in positions) == value[group, "max abs"]
        worst = max(rows, key=lambda r: r.max_abs)
        assert next(p for p in positions if p.position == worst.position).max_abs == worst.max_abs
        assert all((r.position < r.prompt_tokens) == (graph == "prefill") for r in rows)
    layers = [x for x in green.profile.layers if x.graph == "decode"]
    assert [x.layer for x in layers] == [0, 1, 2]
    assert max(max(x.key, x.value) for x in layers) == value["decode caches", "max abs"]


# --- The terminal -------------------------------------------------------------------------------------------------------------


def test_table_when_texts_come_from_outside_then_the_terminal_is_never_commanded(capsys):
    render(VERDICTS, Console(width=200, force_terminal=False))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\r" not in out
    assert r"\x1b[31mred" in out
    assert "Verdict: red" in out


def test_table_when_a_share_is_just_below_one_then_is_not_shown_as_one(capsys):
    render(made_up(judge("g", "cosine", 0.999985, 0.99999, ">=")), Console(width=200))
    assert "0.999985" in capsys.readouterr().out


# --- Where they are written ---------------------------------------------------------------------------------------------------


def test_check_when_all_reports_are_asked_for_then_they_agree_and_nothing_else_is_left(
    capsys, llama_bundle, llama_checkpoint, tmp_path
):
    path = tmp_path / "b"
    shutil.copytree(llama_bundle, path)
    reports = path / "reports"
    outputs = ("--report", reports / "r.json", "--junit", tmp_path / "new" / "r.xml", "--html", tmp_path / "new" / "r.html")
    code, out, _ = check(capsys, path, "--checkpoint", llama_checkpoint, "--json", *outputs)
    assert code == 0
    found = json.loads(out)
    assert json.loads((reports / "r.json").read_text()) == found
    root = ET.parse(tmp_path / "new" / "r.xml").getroot()
    assert root.get("tests") == str(len(found["checks"]))
    assert found["core_sha256"] in (tmp_path / "new" / "r.html").read_text("utf-8")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["r.html", "r.xml"]
    assert open_bundle(path, verify="full").core_sha256 == found["core_sha256"]
    assert check(capsys, path, "--verify-report", reports / "r.json")[0] == 0
    assert found["seconds"] > 0
    assert set(found["versions"]) == {"tformer-deploy", "torch", "onnx", "onnxruntime", "numpy", "python"}


def test_check_when_red_then_reports_are_written_all_the_same(capsys, llama_bundle, llama_checkpoint, tmp_path):
    from test_parity_check import spoiled

    path = spoiled(llama_bundle, tmp_path / "b", 5.0)
    code, _, _ = check(
        capsys, path, "--checkpoint", llama_checkpoint, "--junit", tmp_path / "r.xml", "--html", tmp_path / "r.html"
    )
    assert code == 1
    assert int(ET.parse(tmp_path / "r.xml").getroot().get("failures")) > 0
    assert "What is red" in (tmp_path / "r.html").read_text("utf-8")


@pytest.mark.parametrize("flag", ["--report", "--junit", "--html"])
def test_check_when_a_report_would_hurt_something_then_exit_2_before_anything_is_read(
    capsys, monkeypatch, llama_bundle, llama_checkpoint, tmp_path, flag
):
    monkeypatch.setattr("tformer_deploy.api.check", lambda *_, **__: pytest.fail("it started"))
    bundle, checkpoint = tmp_path / "b", tmp_path / "c"
    shutil.copytree(llama_bundle, bundle)
    shutil.copytree(llama_checkpoint, checkpoint)
    (tmp_path / "link").symlink_to(tmp_path / "somewhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = sorted(p.name for p in bundle.iterdir())
    for path in (
        bundle / "manifest.json", bundle / "new.json", bundle, bundle / "engines" / ".." / "x", bundle / "engines" / "x", bundle / "reports", checkpoint / "config.json",
        checkpoint / "x.json", tmp_path / "link", tmp_path / "folder", tmp_path / "pipe", Path("/dev/null"),
    ):  # fmt: skip
        code, out, err = check(capsys, bundle, "--checkpoint", checkpoint, flag, path)
        assert (code, out) == (2, ""), path
        assert flag in err
    assert sorted(p.name for p in bundle.iterdir()) == before


def test_check_when_flags_contradict_each_other_then_exit_2(capsys, llama_bundle, tmp_path):
    same = tmp_path / "r"
    for arguments in (
        ("--full", "--suite", "quick"),
        ("--report", same, "--junit", same),
        ("--junit", same, "--html", tmp_path / "." / "r"),
        ("--verify-report", same, "--checkpoint", same),
        ("--verify-report", same, "--json"),
        ("--verify-report", same, "--html", same),
        ("--suite", "fast"),
    ):
        code, out, err = check(capsys, llama_bundle, *arguments)
        assert (code, out) == (2, ""), arguments
        assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [("--full",), ("--suite", "full"), ("--full", "--suite", "full")], ids=str)
def test_check_when_full_is_asked_for_in_any_way_then_the_suite_is_full(monkeypatch, capsys, llama_bundle, green, arguments):
    asked = []
    monkeypatch.setattr("tformer_deploy.api.check", lambda *a, suite, **_: asked.append(suite) or green)
    assert check(capsys, llama_bundle, *arguments)[0] == 0
    assert check(capsys, llama_bundle)[0] == 0
    assert asked == ["full", "quick"]


def test_check_when_the_folder_of_a_report_cannot_be_made_then_exit_5_before_computing(
    capsys, monkeypatch, llama_bundle, tmp_path
):
    monkeypatch.setattr("tformer_deploy.api.check", lambda *_, **__: pytest.fail("it started"))
    (tmp_path / "file").touch()
    code, _, err = check(capsys, llama_bundle, "--report", tmp_path / "file" / "r.json")
    assert code == 5
    assert "Traceback" not in err
