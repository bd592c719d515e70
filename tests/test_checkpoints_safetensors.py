"""The safetensors reader and writer against the library, and against damaged files."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tformer_deploy.checkpoints.safetensors_file import SafetensorsFile, write_safetensors
from tformer_deploy.errors import InputError, StorageError

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "c": torch.arange(8, dtype=torch.bfloat16).reshape(2, 2, 2),
    "empty": torch.empty(0, 4),
}


def with_header(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_file_when_written_by_us_then_the_library_reads_the_same_and_the_reverse(tmp_path: Path):
    write_safetensors(tmp_path / "ours", TENSORS)
    save_file(TENSORS, tmp_path / "theirs")
    theirs = load_file(tmp_path / "ours")
    ours = SafetensorsFile(tmp_path / "theirs")
    assert set(theirs) == set(ours.entries) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(theirs[name], tensor)
        assert torch.equal(ours.rows(name, 0, tensor.shape[0]), tensor)
    assert torch.equal(ours.rows("a.weight", 1, 2), TENSORS["a.weight"][1:])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_tensor_when_written_and_read_in_blocks_then_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], dtype: torch.dtype
):
    tensor = torch.randn(shape).to(dtype)
    path = tmp_path_factory.mktemp("t") / "t.safetensors"
    write_safetensors(path, {"t": tensor})
    file = SafetensorsFile(path)
    read = [file.rows("t", row, 1) for row in range(shape[0])]
    assert torch.equal(torch.cat(read) if read else torch.empty(shape).to(dtype), tensor)


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o000, 0o666)])
def test_file_when_written_then_its_mode_follows_the_umask(mask: int, mode: int, tmp_path: Path):
    old = os.umask(mask)
    try:
        write_safetensors(tmp_path / "t", TENSORS)
    finally:
        os.umask(old)
    assert (tmp_path / "t").stat().st_mode & 0o777 == mode


def test_file_when_the_disk_is_full_then_keeps_the_old_one(tmp_path: Path):
    write_safetensors(tmp_path / "t", TENSORS)
    before = (tmp_path / "t").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            write_safetensors(tmp_path / "t", {"t": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "t").read_bytes() == before
    assert os.listdir(tmp_path) == ["t"]


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


BAD: dict[str, tuple[Any, bytes, str]] = {
    "hole": ({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12), "a hole before tensor b: data byte 8, expected 4"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "an overlap before tensor b"),
    "one byte more": ({"a": entry(0, 8)}, bytes(9), "extra bytes at its end"),
    "one byte less": ({"a": entry(0, 8)}, bytes(7), "is truncated: 7 bytes of data, its header names 8"),
    "shape": ({"a": entry(0, 8, [3])}, bytes(8), r"gives tensor a 8 bytes; F32 \[3\] takes 12"),
    "negative shape": ({"a": entry(0, 4, [-1])}, bytes(4), "bad shape or byte range"),
    "truth as shape": ({"a": entry(0, 4, [True])}, bytes(4), "bad shape or byte range"),
    "fractional shape": ({"a": entry(0, 4, [1.0])}, bytes(4), "bad shape or byte range"),
    "huge shape": ({"a": entry(0, 4, [2**62, 2**62])}, bytes(4), "gives tensor a 4 bytes"),
    "dtype": ({"a": entry(0, 4, [4], "I4")}, bytes(4), "in dtype I4; known are BOOL"),
    "dtype of another type": ({"a": entry(0, 4, [4], ["F32"])}, bytes(4), "in dtype"),
    "another field": ({"a": entry(0, 4) | {"x": 1}}, bytes(4), "something else than dtype, shape and data_offsets"),
    "no object": ({"a": 1}, b"", "something else than"),
    "list": ([], b"", "expected an object"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "same name twice": (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(4), "the key 'a' twice"),
    "not json": (b"{", b"", "is not JSON"),
    "escaped name": ({"../../etc\n\0": entry(0, 4, [2])}, bytes(4), r"\.\./\.\./etc\\n\\x00"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_header_when_damaged_then_is_refused_by_name(case: str, tmp_path: Path):
    header, data, message = BAD[case]
    with pytest.raises(InputError, match=message) as caught:
        SafetensorsFile(with_header(tmp_path / "t.safetensors", header, data))
    assert "t.safetensors" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1, 9])
def test_header_when_it_claims_too_much_then_is_refused_unread(length: int, tmp_path: Path):
    (tmp_path / "t").write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(InputError, match=f"header takes {length} bytes"):
        SafetensorsFile(tmp_path / "t")


def fifo(path: Path) -> None:
    os.mkfifo(path)


SPECIAL: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing": (lambda p: None, "does not exist"),
    "empty": (lambda p: p.write_bytes(b""), "holds 0 bytes"),
    "pointer": (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "Git-LFS pointer"),
    "folder": (lambda p: p.mkdir(), "is a folder"),
    "fifo": (fifo, "is a FIFO"),
    "device": (lambda p: p.symlink_to("/dev/zero"), "is a FIFO, socket or device"),
    "broken link": (lambda p: p.symlink_to("absent"), "symbolic link to a file that does not exist"),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", SPECIAL)
def test_path_when_not_a_regular_file_then_is_refused_without_hanging(case: str, tmp_path: Path):
    make, message = SPECIAL[case]
    make(tmp_path / "t.safetensors")
    with pytest.raises(InputError, match=message):
        SafetensorsFile(tmp_path / "t.safetensors")


def test_link_when_to_a_regular_file_then_is_read(tmp_path: Path):
    write_safetensors(tmp_path / "blob", TENSORS)
    (tmp_path / "t").symlink_to("blob")
    assert set(SafetensorsFile(tmp_path / "t").entries) == set(TENSORS)


def test_file_when_cut_or_flipped_anywhere_in_its_header_then_is_refused_or_another_valid_header(tmp_path: Path):
    write_safetensors(tmp_path / "t", TENSORS)
    content = (tmp_path / "t").read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for end in range(len(content)):
        (tmp_path / "t").write_bytes(content[:end])
        with pytest.raises(InputError):
            SafetensorsFile(tmp_path / "t")
    for bit in range(0, header * 8, 3):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "t").write_bytes(damaged)
        try:
            entries = SafetensorsFile(tmp_path / "t").entries
        except InputError:
            continue
        sizes = {name: entry.shape for name, entry in entries.items()}
        assert len(sizes) == len(TENSORS)  # a renamed tensor, or F16 read as another 2-byte type: refused by the accounting


def test_file_when_it_shrinks_while_open_then_is_refused(tmp_path: Path):
    write_safetensors(tmp_path / "t", TENSORS)
    file = SafetensorsFile(tmp_path / "t")
    os.truncate(tmp_path / "t", 16)
    with pytest.raises(InputError, match="ends early"):
        file.rows("a.weight", 0, 3)


def test_memory_when_a_large_tensor_is_turned_then_holds_little_beside_the_result(tmp_path: Path):
    rows, columns = 32_000, 1024  # 131 MB as float32, 66 MB as stored
    header = {"model_type": "tformer", "vocab_size": rows, "d_model": columns}
    weights = torch.zeros(rows, columns, dtype=torch.bfloat16)
    weights[:, 0] = 1
    save_file({"lm_head.weight": weights}, tmp_path / "t.safetensors")
    del weights, header
    code = f"""
import resource
from pathlib import Path
import torch
from tformer_deploy.checkpoints.family import Located
from tformer_deploy.checkpoints.checkpoint import Checkpoint, TensorSpec
from tformer_deploy.checkpoints.safetensors_file import SafetensorsFile
from tformer_deploy.checkpoints.transforms import TRANSPOSE
file = SafetensorsFile(Path({str(tmp_path / "t.safetensors")!r}))
checkpoint = Checkpoint.__new__(Checkpoint)
checkpoint._located, checkpoint._zero = {{"head.weight": (Located(file, "lm_head.weight", TRANSPOSE),)}}, []
checkpoint.tensors = {{"head.weight": TensorSpec(({columns}, {rows}), "bf16")}}
torch.aminmax(torch.ones(4).bfloat16())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tensor = checkpoint.read("head.weight", torch.float32)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, tensor[0].sum().item(), tensor.is_contiguous())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown_kib, total, contiguous = done.stdout.split()
    assert (float(total), contiguous) == (rows, "True")
    assert int(grown_kib) * 1024 < rows * columns * 4 + (48 << 20)
