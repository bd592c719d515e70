"""Opening a bundle compares every file with the manifest before a native library sees one; ``seal`` renews the manifest."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import LLAMA_LIKE, hot_decoder

import tformer_deploy
from tformer_deploy.bundle import open_bundle, verify
from tformer_deploy.bundle.graph_file import read_graph_file
from tformer_deploy.bundle.seal import seal
from tformer_deploy.errors import InputError

FILES = ("decode.onnx", "prefill.onnx", "weights.bin")


@pytest.fixture
def bundle(llama_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage, and a cache folder of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(llama_bundle, tmp_path / "bundle"))


def flip(path: Path, at: int = -1, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def edit_graph(path: Path, edit) -> None:
    model = onnx.load(path, load_external_data=False)
    edit(model)
    onnx.save(model, path)


def test_bundle_when_opened_then_gives_its_tensors_exactly(bundle):
    opened = tformer_deploy.open_bundle(bundle, verify="full")
    for name, parameter in hot_decoder(LLAMA_LIKE).named_parameters():
        assert np.array_equal(opened.tensor(name), parameter.detach().numpy()), name
    assert opened.tensor("rope.frequencies").dtype == np.float32
    assert opened.manifest.config == LLAMA_LIKE
    assert opened.asset("tokenizer.json") is None


@pytest.mark.parametrize("mode", ["auto", "full"])
@pytest.mark.parametrize("name", FILES)
def test_bundle_when_one_bit_is_flipped_then_the_file_is_named(bundle, name, mode):
    flip(bundle / name, at=len((bundle / name).read_bytes()) // 2, bit=3)
    with pytest.raises(InputError) as e:
        open_bundle(bundle, verify=mode)
    assert name in e.value.message
    assert "sha256" in e.value.message
    assert "seal" in str(e.value.hint)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_bundle_when_a_file_is_missing_or_no_plain_file_then_it_is_named(bundle, name, tmp_path):
    original = shutil.move(bundle / name, tmp_path / name)
    damages = {
        "missing": lambda path: None,
        "link": lambda path: path.symlink_to(original),
        "broken link": lambda path: path.symlink_to(tmp_path / "absent"),
        "hard link": lambda path: path.hardlink_to(original),
        "fifo": os.mkfifo,
        "folder": Path.mkdir,
        "cut": lambda path: path.write_bytes(Path(original).read_bytes()[:-2]),
        "grown": lambda path: path.write_bytes(Path(original).read_bytes() + b" x"),
    }
    for damage in damages.values():
        damage(bundle / name)
        with pytest.raises(InputError) as e:
            open_bundle(bundle)
        assert name in e.value.message
        path = bundle / name
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    shutil.move(original, bundle / name)
    open_bundle(bundle)


@pytest.mark.parametrize("name", ["extra.bin", ".hidden", "weights.bin2"])
def test_bundle_when_a_file_is_added_then_it_is_named(bundle, name):
    (bundle / name).write_bytes(b"x")
    with pytest.raises(InputError, match=name):
        open_bundle(bundle)


def test_bundle_when_engines_and_reports_lie_beside_the_core_then_opens_as_the_same_core(bundle):
    core = open_bundle(bundle).core_sha256
    (bundle / "engines" / "x").mkdir(parents=True)
    (bundle / "reports").mkdir()
    assert open_bundle(bundle).core_sha256 == core


@pytest.mark.parametrize("place", ["absent", "empty", "file"])
def test_open_when_there_is_no_bundle_then_says_so(tmp_path, place):
    path = tmp_path / "x"
    if place == "empty":
        path.mkdir()
    if place == "file":
        path.write_bytes(b"x")
    with pytest.raises(InputError, match="is no bundle"):
        open_bundle(path)


def test_bundle_when_copied_moved_or_reached_by_a_linked_folder_then_opens(bundle, tmp_path):
    moved = tmp_path / "a b 漢 'c'"
    bundle.rename(moved)
    (tmp_path / "link").symlink_to(moved)
    assert open_bundle(tmp_path / "link").core_sha256 == open_bundle(moved).core_sha256


def test_bundle_when_a_large_file_is_unchanged_then_is_hashed_once_and_always_with_full(bundle, monkeypatch):
    monkeypatch.setattr(verify, "_REMEMBERED_FROM", 0)
    monkeypatch.setattr(verify, "_SETTLED_S", -60.0)
    hashed = []
    real = verify.hash_file
    monkeypatch.setattr(verify, "hash_file", lambda path: hashed.append(path.name) or real(path))
    counts = []
    for mode in ("auto", "auto", "full"):
        hashed.clear()
        open_bundle(bundle, verify=mode)
        counts.append(len(hashed))
    assert counts == [3, 0, 3]
    # The same size and modification time: the change time and the inode give it away.
    path = bundle / "weights.bin"
    status = path.stat()
    flip(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(InputError, match=r"weights\.bin"):
        open_bundle(bundle)


def test_bundle_when_just_written_then_is_hashed_again(bundle, monkeypatch):
    monkeypatch.setattr(verify, "_REMEMBERED_FROM", 0)
    monkeypatch.setattr(verify, "_SETTLED_S", 3600.0)  # its times could hide a write of the same tick
    open_bundle(bundle)
    assert not verify.cache_folder().exists()


def test_bundle_when_the_cache_folder_cannot_be_written_then_opens(bundle, monkeypatch, tmp_path):
    monkeypatch.setattr(verify, "_REMEMBERED_FROM", 0)
    monkeypatch.setattr(verify, "_SETTLED_S", -60.0)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    open_bundle(bundle)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert verify.cache_folder().is_absolute()


def resealed(bundle: Path) -> None:
    """New hashes without any other check: what somebody with bad intentions would write."""
    path = bundle / "manifest.json"
    raw = json.loads(path.read_bytes())
    for name in raw["files"]:
        record = verify.hash_file(bundle / name)
        raw["files"][name] = {"sha256": record.sha256, "size": record.size}
    path.write_text(json.dumps(raw))


def set_external(name: str, key: str, value: str):
    def edit(model):
        tensor = next(t for t in model.graph.initializer if t.name == name)
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = value

    return edit


def hide_in_an_attribute(model):
    tensor = onnx.helper.make_tensor("hidden", onnx.TensorProto.FLOAT, [1], [0.0])
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    inner = onnx.helper.make_graph([onnx.helper.make_node("Constant", [], ["y"], value=tensor)], "inner", [], [])
    model.graph.node.append(onnx.helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner))


GRAPH_LIES = {
    "a path up": (set_external("norm.weight", "location", "../weights.bin"), r"\.\./weights\.bin"),
    "an absolute path": (set_external("norm.weight", "location", "/etc/passwd"), "/etc/passwd"),
    "no location": (set_external("norm.weight", "location", ""), "expected weights.bin"),
    "another file": (set_external("norm.weight", "location", "manifest.json"), "manifest.json"),
    "another offset": (set_external("norm.weight", "offset", "0"), "norm.weight"),
    "another length": (set_external("norm.weight", "length", "4"), "norm.weight"),
    "a negative offset": (set_external("norm.weight", "offset", "-4096"), "-4096"),
    "a huge offset": (set_external("norm.weight", "offset", "9" * 30), "9"),
    "a tensor inside an attribute": (hide_in_an_attribute, "secret"),
}


@pytest.mark.parametrize(("edit", "named"), GRAPH_LIES.values(), ids=GRAPH_LIES)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_bundle_when_a_graph_reads_something_else_then_is_refused_though_the_hashes_agree(bundle, phase, edit, named):
    edit_graph(bundle / f"{phase}.onnx", edit)
    resealed(bundle)
    with pytest.raises(InputError, match=named) as e:
        open_bundle(bundle)
    assert f"{phase}.onnx" in e.value.message


def test_bundle_when_its_graphs_are_of_two_exports_or_changed_places_then_is_refused(bundle):
    def other_build(model):
        next(p for p in model.metadata_props if p.key == "tformer_deploy.build").value = "f" * 64

    shutil.copy(bundle / "prefill.onnx", bundle.parent / "kept.onnx")
    edit_graph(bundle / "prefill.onnx", other_build)
    resealed(bundle)
    with pytest.raises(InputError, match="two different exports"):
        open_bundle(bundle)
    shutil.copy(bundle / "decode.onnx", bundle / "prefill.onnx")
    resealed(bundle)
    with pytest.raises(InputError, match=r"prefill\.onnx says that it is the graph 'decode'"):
        open_bundle(bundle)
    with pytest.raises(InputError, match=r"prefill\.onnx"):
        seal(bundle)


@pytest.mark.parametrize(
    "data", [b"", b"junk" * 125, b"\xff" * 40, b"\x3a\xff\xff\xff\xff\x0f"], ids=["empty", "junk", "ff", "cut"]
)
def test_graph_file_when_no_graph_then_is_refused(tmp_path, data):
    (tmp_path / "x.onnx").write_bytes(data)
    with pytest.raises(InputError, match="is no ONNX graph"):
        read_graph_file(tmp_path / "x.onnx")


def test_graph_file_when_cut_anywhere_then_is_read_or_refused_and_never_crashes(llama_bundle, tmp_path):
    data = (llama_bundle / "decode.onnx").read_bytes()
    refused = 0
    for end in range(0, len(data), 97):
        (tmp_path / "x.onnx").write_bytes(data[:end])
        try:
            read_graph_file(tmp_path / "x.onnx")
        except InputError:
            refused += 1
    assert refused > 10


def test_graph_file_when_read_then_agrees_with_the_onnx_package(llama_bundle):
    graph = read_graph_file(llama_bundle / "decode.onnx")
    model = onnx.load(llama_bundle / "decode.onnx", load_external_data=False)
    expected = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {e.key: e.value for e in tensor.external_data}
            expected[tensor.name] = (entries["location"], int(entries["offset"]), int(entries["length"]))
    assert {e.tensor: (e.location, e.offset, e.length) for e in graph.external} == expected
    assert set(expected) == set(open_bundle(llama_bundle).manifest.tensors)


def test_seal_when_a_weight_was_edited_then_the_bundle_opens_under_another_core(bundle):
    before = open_bundle(bundle)
    weight = before.tensor("norm.weight")[0]
    flip(bundle / "weights.bin", at=before.manifest.tensors["norm.weight"].offset + 3, bit=7)  # the sign
    with pytest.raises(InputError):
        open_bundle(bundle)
    after, changed = seal(bundle)
    assert changed == ["weights.bin"]
    assert after.core_sha256 != before.core_sha256
    assert after.tensor("norm.weight")[0] == -weight
    assert seal(bundle)[1] == []


def test_seal_when_an_asset_was_added_or_removed_then_records_it(bundle):
    (bundle / "tokenizer.json").write_bytes(b"{}")
    (bundle / ".tformer-tmp-1").write_bytes(b"")  # of a seal that was killed
    assert seal(bundle)[1] == ["tokenizer.json"]
    assert open_bundle(bundle).asset("tokenizer.json") == b"{}"
    (bundle / "tokenizer.json").unlink()
    assert seal(bundle)[1] == ["tokenizer.json"]


def test_seal_when_the_files_do_not_fit_then_refuses_and_leaves_the_manifest(bundle, tmp_path):
    manifest = (bundle / "manifest.json").read_bytes()
    weights = (bundle / "weights.bin").read_bytes()
    (bundle / "weights.bin").write_bytes(weights[:-4096])
    with pytest.raises(InputError, match=r"weights\.bin"):
        seal(bundle)
    (bundle / "weights.bin").unlink()
    (bundle / "weights.bin").symlink_to(tmp_path)
    with pytest.raises(InputError, match=r"weights\.bin"):
        seal(bundle)
    (bundle / "weights.bin").unlink()
    (bundle / "weights.bin").write_bytes(weights)
    edit_graph(bundle / "decode.onnx", set_external("norm.weight", "location", "../x"))
    with pytest.raises(InputError, match=r"\.\./x"):
        seal(bundle)
    assert (bundle / "manifest.json").read_bytes() == manifest
