"""Bad bundles end in exit code 3 (or 4, 6) before a native library sees them; good ones work wherever they lie.

| row | fault | tested |
|---|---|---|
| B68 | external data elsewhere, links, FIFOs, hashes | here; tests/test_bundle_files.py (GRAPH_LIES, test_bundle_when_a_file_is_missing_…) |
| B69 | a bit changed, a file added or missing | here; tests/test_bundle_files.py |
| B70 | manifests: versions, paths, numbers | here and tests/test_cpp_sample.py, over tests/manifest_corpus.py; tests/test_bundle_manifest.py |
| B71 | graphs of two exports | here; tests/test_bundle_files.py |
| B72 | graphs that no runtime should load | here |
| B73 | read-only, moved, copied, linked folders | here; tests/test_bundle_files.py |
| B96 | the same bytes from every export | tests/test_export_bundle.py (test_export_when_repeated_elsewhere_…); here for the files beside the graphs |

The sweeps: a changed bit of the manifest may leave another valid manifest (a digit of a version, a letter of a name); a bundle
with it opens only if every file still has the size and hash that it names. A changed bit of any other file is always refused.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fault_files import Console, console, cuts, flips, sweep, tokenizer_json, write_llama
from manifest_corpus import EDITS, TEXTS
from onnx import helper, numpy_helper

from tformer_deploy.bundle import open_bundle, verify
from tformer_deploy.bundle.graph_file import LARGEST, read_graph_file
from tformer_deploy.bundle.manifest import Manifest
from tformer_deploy.bundle.manifest_io import parse_manifest
from tformer_deploy.bundle.verify import hash_file
from tformer_deploy.errors import InputError, TformerError

__all__ = ["console"]
pytestmark = pytest.mark.timeout(60)
PROMPT = ("generate", "--max-new-tokens", "2")


@pytest.fixture(scope="module")
def text_bundle(llama_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The llama-like bundle with a tokenizer of words; copy it before editing."""
    path = Path(shutil.copytree(llama_bundle, tmp_path_factory.mktemp("text") / "bundle"))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    return resealed(path, "tokenizer.json")


@pytest.fixture
def bundle(text_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage; a native library that is asked to load anything of it fails the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    import onnxruntime

    def load(*_: object, **__: object) -> None:
        raise AssertionError("ONNX Runtime was asked to load a bad bundle")

    monkeypatch.setattr(onnxruntime, "InferenceSession", load)
    return Path(shutil.copytree(text_bundle, tmp_path / "bundle"))


def resealed(bundle: Path, *added: str) -> Path:
    """Hashes that agree: what somebody with bad intentions would write."""
    path = bundle / "manifest.json"
    raw = json.loads(path.read_bytes())
    for name in {*raw["files"], *added}:
        record = hash_file(bundle / name)
        raw["files"][name] = {"sha256": record.sha256, "size": record.size}
    path.write_text(json.dumps(raw))
    return bundle


def edit_manifest(bundle: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads((bundle / "manifest.json").read_bytes())
    edit(raw)
    (bundle / "manifest.json").write_text(json.dumps(raw))


def edit_graph(bundle: Path, phase: str, edit: Callable[[onnx.ModelProto], Any]) -> Path:
    path = bundle / f"{phase}.onnx"
    model = onnx.load(path, load_external_data=False)
    edit(model)
    path.write_bytes(model.SerializeToString())
    return resealed(bundle)


# B68, B69


def external(key: str, value: str) -> Callable[[onnx.ModelProto], Any]:
    def edit(model: onnx.ModelProto) -> None:
        tensor = next(t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
        next(entry for entry in tensor.external_data if entry.key == key).value = value

    return edit


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("location", "../weights.bin", "'../weights.bin'"), ("location", "/etc/passwd", "'/etc/passwd'"), ("location", "", "''"),
     ("location", "weights.bin/../x", "weights.bin/../x"), ("location", "a\nb\x1b[31m", r"a\nb\x1b[31m"), ("location", "tokenizer.json", "tokenizer.json"),
     ("offset", "-1", "'-1'"), ("offset", "4096", "at byte 4096"), ("length", "9" * 30, "'999")],
)  # fmt: skip
def test_generate_when_a_graph_reads_elsewhere_then_refuses_before_the_runtime_opens_it(
    key: str, value: str, words: str, console: Console, bundle: Path
):
    edit_graph(bundle, "prefill", external(key, value))
    console.refused(3, ("prefill.onnx", words), *PROMPT, bundle, "w5")


def linked_folder(path: Path, aside: Path) -> None:
    path.symlink_to(aside)


INSTEAD: dict[str, Callable[[Path, Path], Any]] = {
    "missing": lambda path, aside: None,
    "a link": lambda path, aside: path.symlink_to(aside),
    "a broken link": lambda path, aside: path.symlink_to("gone"),
    "a hard link": lambda path, aside: path.hardlink_to(aside),
    "a FIFO": lambda path, aside: os.mkfifo(path),
    "a folder": lambda path, aside: path.mkdir(),
    "/dev/zero": lambda path, aside: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", INSTEAD)
@pytest.mark.parametrize("name", ["weights.bin", "prefill.onnx", "tokenizer.json", "manifest.json"])
def test_generate_when_something_else_stands_for_a_file_then_says_what(
    name: str, case: str, console: Console, bundle: Path, tmp_path: Path
):
    shutil.move(bundle / name, tmp_path / "aside")
    INSTEAD[case](bundle / name, tmp_path / "aside")
    console.refused(3, (name,), *PROMPT, bundle, "w5")


@pytest.mark.parametrize("name", ["weights.bin", "prefill.onnx", "decode.onnx", "tokenizer.json"])
def test_generate_when_one_bit_is_flipped_then_names_the_file_and_both_hashes(name: str, console: Console, bundle: Path):
    expected = json.loads((bundle / "manifest.json").read_bytes())["files"][name]["sha256"]
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 4
    (bundle / name).write_bytes(content)
    console.refused(3, (name, expected, hash_file(bundle / name).sha256), *PROMPT, bundle, "w5")


@pytest.mark.parametrize("command", ["generate", "run", "inspect", "check", "seal"])
def test_command_when_a_weight_is_cut_off_then_refuses(command: str, console: Console, bundle: Path, tmp_path: Path):
    os.truncate(bundle / "weights.bin", (bundle / "weights.bin").stat().st_size - 4096)
    (tmp_path / "rows").write_text('{"input_ids": [1]}\n')
    more = {"generate": ["w5"], "run": [tmp_path / "rows", "-o", console.output / "out.jsonl"]}.get(command, [])
    console.refused(3, ("weights.bin",), command, bundle, *more)


def test_generate_when_a_file_is_added_then_names_it(console: Console, bundle: Path):
    (bundle / "extra\n.bin").write_bytes(b"x")
    console.refused(3, (r"extra\n.bin",), *PROMPT, bundle, "w5")


# B70


@pytest.mark.parametrize("case", EDITS)
def test_manifest_when_it_lies_then_is_refused_by_name(case: str, console: Console, bundle: Path):
    edit, word = EDITS[case]
    edit_manifest(bundle, edit)
    console.refused(3, ("manifest.json", word), "inspect", bundle)


@pytest.mark.parametrize("case", TEXTS)
def test_manifest_when_no_strict_json_then_is_refused_by_name(case: str, console: Console, bundle: Path):
    (bundle / "manifest.json").write_bytes(TEXTS[case])
    console.refused(3, ("manifest.json",), "inspect", bundle)


def test_manifest_when_newer_then_says_who_made_it_and_what_it_needs(console: Console, bundle: Path):
    edit_manifest(bundle, lambda m: (m.update(schema=3, later=[1]), m["versions"].update({"tformer-deploy": "9.2.1"})))
    console.refused(3, ("made by tformer-deploy 9.2.1", "needs tformer-deploy >= 9.2.1"), *PROMPT, bundle, "w5")


def test_manifest_when_without_end_then_is_refused_within_little_memory(bundle: Path):
    raw = json.loads((bundle / "manifest.json").read_bytes())
    raw["versions"] = {f"v{i}": "1" for i in range(700_000)}
    data = json.dumps(raw).encode()
    (refusal,) = sweep(iter([data]), parse_manifest, 200)
    assert "values; at most" in str(refusal)


# B71, B72


def test_generate_when_the_graphs_are_of_two_exports_then_refuses(console: Console, bundle: Path):
    def other_build(model: onnx.ModelProto) -> None:
        next(p for p in model.metadata_props if p.key == "tformer_deploy.build").value = "f" * 64

    edit_graph(bundle, "prefill", other_build)
    console.refused(3, ("prefill.onnx and decode.onnx of two different exports",), *PROMPT, bundle, "w5")


def node(index: int, **changes: str) -> Callable[[onnx.ModelProto], Any]:
    return lambda model: [setattr(model.graph.node[index], key, value) for key, value in changes.items()]


def loop(model: onnx.ModelProto) -> None:
    """A thousand thousand million rounds of nothing."""
    value = helper.make_tensor_value_info
    rounds = helper.make_node("Identity", ["go"], ["go_on"])
    body = helper.make_graph([rounds], "rounds", [value("i", 7, []), value("go", 9, [])], [value("go_on", 9, [])])
    model.graph.initializer.append(numpy_helper.from_array(np.array(10**12), "trips"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    model.graph.node.insert(0, helper.make_node("Loop", ["trips", "yes"], [], "bomb", body=body))


def function(model: onnx.ModelProto) -> None:
    inner = [helper.make_node("Identity", ["a"], ["b"])]
    model.functions.append(helper.make_function("evil", "F", ["a"], ["b"], inner, [helper.make_opsetid("", 24)]))


def opset(version: int) -> Callable[[onnx.ModelProto], Any]:
    return lambda model: setattr(model.opset_import[0], "version", version)


def constant(array: np.ndarray) -> Callable[[onnx.ModelProto], Any]:
    return lambda model: model.graph.initializer.append(numpy_helper.from_array(array, "spoiled"))


def attribute(model: onnx.ModelProto) -> None:
    norm = next(n for n in model.graph.node if n.op_type == "RMSNormalization")
    next(a for a in norm.attribute if a.name == "epsilon").f = float("nan")


def constant_node(model: onnx.ModelProto) -> None:
    tensor = helper.make_tensor("inner", onnx.TensorProto.FLOAT, [2], [1.0, float("inf")])
    model.graph.node.append(helper.make_node("Constant", [], ["unused"], "spoiled", value=tensor))


def listed(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(helper.make_tensor("spoiled", onnx.TensorProto.FLOAT16, [2], [1.0, float("nan")]))


GRAPHS: dict[str, tuple[Callable[[onnx.ModelProto], Any], tuple[str, ...]]] = {
    "custom domain": (node(5, domain="com.evil", op_type="Steal"), ("Steal", "com.evil")),
    "operator of one runtime": (node(5, domain="com.microsoft", op_type="FusedMatMul"), ("FusedMatMul", "com.microsoft")),
    "opset of a domain": (lambda m: m.opset_import.append(helper.make_opsetid("com.evil", 1)), ("com.evil",)),
    "newer opset": (opset(25), ("opset 25", "opset 24")),
    "much newer opset": (opset(2**31), ("opset 2147483648",)),
    "older opset": (opset(13), ("opset 13",)),
    "loop": (loop, ("Loop 'bomb'", "a loop or a branch")),
    "local function": (function, ("functions of its own",)),
    "NaN": (constant(np.array([1, np.nan], np.float32)), ("initializer 'spoiled' holds 1 NaN and 0 infinite",)),
    "NaN in half precision": (constant(np.array([np.nan], np.float16)), ("initializer 'spoiled' holds 1 NaN",)),
    "NaN in double precision": (constant(np.array(np.nan)), ("initializer 'spoiled' holds 1 NaN",)),
    "NaN in a list": (listed, ("initializer 'spoiled' holds 1 NaN",)),
    "infinity": (constant(np.array([np.inf], np.float32)), ("initializer 'spoiled' holds 0 NaN and 1 infinite",)),
    "infinity in a node": (constant_node, ("constant of the node Constant 'spoiled'", "1 infinite")),
    "NaN as an attribute": (attribute, ("attribute epsilon of the node RMSNormalization", "1 NaN")),
}  # fmt: skip


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", GRAPHS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_generate_when_a_graph_is_bad_then_names_the_operator(phase: str, case: str, console: Console, bundle: Path):
    edit, words = GRAPHS[case]
    edit_graph(bundle, phase, edit)
    console.refused(3, (f"{phase}.onnx", *words), *PROMPT, bundle, "w5")


def dangling(model: onnx.ModelProto) -> None:
    model.graph.node[3].input[0] = "nowhere"


RUNTIME: dict[str, tuple[Callable[[onnx.ModelProto], Any], tuple[str, ...]]] = {
    "unknown operator": (node(5, op_type="EvilOp"), ("EvilOp", "cannot load")),
    "newer format": (lambda m: setattr(m, "ir_version", 99), ("cannot load", "prefill.onnx")),
    "an input of another name": (lambda m: setattr(m.graph.input[0], "name", "x"), ("cannot load", "prefill.onnx")),
    "an output missing": (lambda m: m.graph.output.pop(), ("present.2.value",)),
    "a node that reads nothing": (dangling, ("cannot load", "nowhere")),
}


@pytest.mark.parametrize("case", RUNTIME)
def test_generate_when_only_the_runtime_can_tell_then_its_words_are_passed_on(
    case: str, console: Console, text_bundle: Path, tmp_path: Path
):
    edit, words = RUNTIME[case]
    path = edit_graph(Path(shutil.copytree(text_bundle, tmp_path / "b")), "prefill", edit)
    console.refused(3, words, *PROMPT, path, "w5")


def test_graph_when_a_mask_holds_minus_infinity_then_is_accepted(text_bundle: Path, tmp_path: Path):
    path = edit_graph(Path(shutil.copytree(text_bundle, tmp_path / "b")), "decode", constant(np.array(-np.inf, np.float32)))
    assert read_graph_file(path / "decode.onnx").non_finite == []
    edit_graph(path, "decode", constant(np.array([-np.inf] * 2, np.float32)))
    assert "holds 0 NaN and 2 infinite" in read_graph_file(path / "decode.onnx").non_finite[0]


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "fp32"), (np.inf, "fp32"), (np.nan, "fp16")])
def test_generate_when_a_weight_is_not_finite_then_names_the_tensor_though_hashes_agree(
    value: float, dtype: str, console: Console, request: pytest.FixtureRequest, tmp_path: Path
):
    source = request.getfixturevalue("llama_bundle" if dtype == "fp32" else "llama_fp16_bundle")
    path = Path(shutil.copytree(source, tmp_path / "b"))
    record = open_bundle(path).manifest.tensors["blocks.1.attention.value.weight"]
    with (path / "weights.bin").open("r+b") as file:
        file.seek(record.offset + 8)
        file.write(np.array([value] * 3, {"fp32": "<f4", "fp16": "<f2"}[dtype]).tobytes())
    resealed(path)
    (tmp_path / "rows").write_text('{"input_ids": [1]}\n')
    out = console.output / "out.jsonl"
    console.refused(3, ("blocks.1.attention.value.weight holds 3 NaN or infinite",), "run", path, tmp_path / "rows", "-o", out)


def test_weights_when_large_and_unchanged_then_are_looked_at_once(
    text_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tformer_deploy.bundle import finite

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verify, "_REMEMBERED_FROM", 0)
    monkeypatch.setattr(verify, "_SETTLED_S", -60.0)
    opened = open_bundle(Path(shutil.copytree(text_bundle, tmp_path / "b")))
    finite.require_finite(opened)
    counted = []
    monkeypatch.setattr(finite.np, "count_nonzero", lambda bits: counted.append(1) or 0)
    finite.require_finite(opened)
    assert not counted
    os.utime(opened.weights_path)
    finite.require_finite(opened)
    assert counted


def test_graph_when_larger_than_any_then_is_refused_unread(bundle: Path):
    os.truncate(bundle / "decode.onnx", LARGEST + 1)
    with pytest.raises(InputError, match=f"at most {LARGEST} are read"):
        read_graph_file(bundle / "decode.onnx")


# B73


@pytest.fixture
def used(text_bundle: Path) -> Callable[[Console, Path], None]:
    def check(console: Console, path: Path) -> None:
        expected = console.run(*PROMPT, text_bundle, "w5 w6")
        assert expected[0] == 0
        assert console.run(*PROMPT, path, "w5 w6") == expected

    return check


def test_bundle_when_moved_renamed_copied_or_linked_then_works(
    console: Console, used: Callable[[Console, Path], None], text_bundle: Path, tmp_path: Path
):
    moved = Path(shutil.copytree(text_bundle, tmp_path / "first")).rename(tmp_path / "a b\n漢 'c'")
    used(console, moved)
    links = tmp_path / "links"
    links.mkdir()
    for file in moved.iterdir():
        (links / file.name).symlink_to(file)
    console.refused(3, ("is a symbolic link", "cp -rL"), *PROMPT, links, "w5 w6")
    subprocess.run(["cp", "-rL", links, tmp_path / "copy"], check=True)
    used(console, tmp_path / "copy")
    (tmp_path / "folder").symlink_to(moved)
    used(console, tmp_path / "folder")


def test_bundle_when_no_file_may_be_written_then_works(
    console: Console, used: Callable[[Console, Path], None], text_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Root may write anywhere, so a mount that is read-only, and a home in it."""
    place = tmp_path / "read-only"
    place.mkdir()
    shutil.copytree(text_bundle, place / "bundle")
    for path in (place / "bundle").iterdir():
        path.chmod(0o444)
    (place / "bundle").chmod(0o555)
    mounted = False
    if os.geteuid() == 0:
        bind = subprocess.run(["mount", "--bind", place, place], capture_output=True, check=False)
        mounted = not bind.returncode
        if mounted:
            subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)
    try:
        monkeypatch.setenv("HOME", str(place))
        monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        used(console, place / "bundle")
        assert not mounted or sorted(p.name for p in place.iterdir()) == ["bundle"]
    finally:
        if mounted:
            subprocess.run(["umount", place], check=True)
        (place / "bundle").chmod(0o755)


# B96


def test_export_when_repeated_in_another_folder_then_every_file_has_the_same_hash(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With the tokenizer's files, after a year, under another umask; tests/test_export_bundle.py has other users and machines."""
    hashes = []
    for place, umask, year in (("one", 0o022, 0), ("two/deeper", 0o077, 365 * 86400)):
        source = write_llama(tmp_path / place / "model")
        (source / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
        (source / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}", "eos_token": "</s>"}')
        for file in source.iterdir():
            os.utime(file, (year, year))
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(year))
        old = os.umask(umask)
        try:
            code, _, err = console.run("export", source, "-o", tmp_path / place / "bundle", "--no-check")
        finally:
            os.umask(old)
        assert code == 0, err
        hashes.append({file.name: hash_file(file).sha256 for file in (tmp_path / place / "bundle").iterdir()})
    assert hashes[0] == hashes[1]
    assert {"manifest.json", "weights.bin", "prefill.onnx", "decode.onnx", "chat_template.jinja"} <= set(hashes[0])


# Sweeps


def test_manifest_when_cut_anywhere_then_is_refused(text_bundle: Path):
    data = (text_bundle / "manifest.json").read_bytes().rstrip()
    results = sweep(cuts(data, 3), parse_manifest)
    assert all(isinstance(r, InputError) and "manifest.json" in r.message for r in results)


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_bundle_when_a_bit_of_its_manifest_is_flipped_then_is_refused_or_every_file_is_still_what_it_says(
    step: int, text_bundle: Path, tmp_path: Path
):
    path = Path(shutil.copytree(text_bundle, tmp_path / "b"))
    data = (path / "manifest.json").read_bytes()
    whole = parse_manifest(data)

    def attempt(piece: tuple[int, bytes]) -> Manifest:
        manifest = parse_manifest(piece[1])  # most end here; opening hashes every file
        (path / "manifest.json").write_bytes(piece[1])
        assert open_bundle(path).manifest == manifest
        return manifest

    results = sweep(flips(data, step), attempt)
    refused = [r for r in results if isinstance(r, TformerError)]
    assert all(isinstance(r, InputError) for r in refused)
    assert len(refused) > len(results) // 2
    for manifest in results:
        assert isinstance(manifest, TformerError) or (manifest.files, manifest.tensors) == (whole.files, whole.tensors)


@pytest.mark.parametrize("name", ["prefill.onnx", "tokenizer.json", "weights.bin"])
def test_bundle_when_a_bit_of_a_file_is_flipped_then_is_always_refused(name: str, text_bundle: Path, tmp_path: Path):
    path = Path(shutil.copytree(text_bundle, tmp_path / "b"))
    data = (path / name).read_bytes()
    at = 0

    def attempt(piece: int) -> Any:
        nonlocal at
        with (path / name).open("r+b") as file:
            for place, byte in ((at, data[at]), (piece, data[piece] ^ 1 << piece % 8)):
                file.seek(place)
                file.write(bytes([byte]))
        at = piece
        return open_bundle(path)

    pieces = range(0, len(data), max(1, len(data) // 40))
    assert all(isinstance(r, InputError) and name in r.message for r in sweep(iter(pieces), attempt))


@pytest.mark.parametrize("step", [131, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_graph_file_when_a_bit_is_flipped_or_the_end_is_missing_then_is_read_or_refused(
    phase: str, step: int, text_bundle: Path, tmp_path: Path
):
    data = (text_bundle / f"{phase}.onnx").read_bytes()

    def attempt(piece: bytes) -> Any:
        (tmp_path / "x.onnx").write_bytes(piece)
        return read_graph_file(tmp_path / "x.onnx")

    results = sweep((piece for _, piece in flips(data, 9 * step if step > 1 else 1)), attempt)
    results += sweep(cuts(data, step), attempt)
    assert {InputError} >= {type(r) for r in results if isinstance(r, TformerError)}
    assert any(isinstance(r, InputError) for r in results)
