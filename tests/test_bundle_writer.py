"""The output path holds nothing, the old bundle or the new one, whatever happens at whatever moment."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tformer_deploy.bundle import writer
from tformer_deploy.bundle.writer import new_folder, replace_file, write_file
from tformer_deploy.errors import StorageError, UsageError

FILES = ("weights.bin", "prefill.onnx", "manifest.json")


def write(path: Path, content: bytes, force: bool = False) -> None:
    with new_folder(path, force) as folder:
        for name in FILES:
            write_file(folder / name, content)


def state(path: Path) -> bytes | None:
    """None where there is nothing, else the one content of all files; anything else fails."""
    if not path.exists():
        return None
    assert sorted(p.name for p in path.iterdir()) == sorted(FILES)
    contents = {p.read_bytes() for p in path.iterdir()}
    assert len(contents) == 1
    return contents.pop()


def leftovers(path: Path) -> list[str]:
    return [p.name for p in path.parent.iterdir() if p != path]


def test_writer_when_undisturbed_then_writes_and_replaces(tmp_path):
    path = tmp_path / "deep" / "b"
    write(path, b"old")
    assert state(path) == b"old"
    write(path, b"new", force=True)
    assert (state(path), leftovers(path)) == (b"new", [])


def test_writer_when_two_paths_cannot_be_exchanged_then_replaces_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_exchange", lambda one, other: False)
    path = tmp_path / "b"
    write(path, b"old")
    write(path, b"new", force=True)
    assert (state(path), leftovers(path)) == (b"new", [])


def test_writer_when_the_output_exists_then_needs_force_and_a_bundle(tmp_path):
    path = tmp_path / "b"
    write(path, b"old")
    with pytest.raises(UsageError) as e:
        write(path, b"new")
    assert "--force" in str(e.value.hint)
    assert state(path) == b"old"
    home = tmp_path / "home"
    home.mkdir()
    write(home, b"x")  # an empty folder loses nothing
    assert state(home) == b"x"
    other = tmp_path / "photos"
    other.mkdir()
    (other / "a.jpg").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"no manifest\.json"):
        write(other, b"new", force=True)
    assert (other / "a.jpg").exists()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("kind", ["file", "fifo", "link to a folder", "broken link"])
def test_writer_when_the_output_is_no_folder_then_refuses_even_with_force(tmp_path, kind, force):
    path, target = tmp_path / "x", tmp_path / "target"
    if kind == "file":
        path.write_bytes(b"x")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
        if kind == "link to a folder":
            write(target, b"old")
    for name in (str(path), f"{path}/"):
        with pytest.raises(UsageError, match="no folder"):
            write(Path(name), b"new", force)
    assert path.is_symlink() or not path.is_dir()
    assert state(target) in (None, b"old")


class Stop(BaseException):
    """Ctrl-C or SIGTERM."""


FAULTS = [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error"), Stop()]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("fault", FAULTS, ids=["ENOSPC", "EIO", "stop"])
@pytest.mark.parametrize("old", [None, b"old"], ids=["absent", "present"])
def test_writer_when_the_nth_call_fails_then_leaves_absent_old_or_new(tmp_path, monkeypatch, old, fault, exchange):
    path, calls, fail_at = tmp_path / "b", [0], [0]

    def failing(real):
        def call(*args, **options):
            calls[0] += 1
            if calls[0] == fail_at[0]:
                raise fault
            return real(*args, **options)

        return call

    if not exchange:
        monkeypatch.setattr(writer, "_exchange", lambda one, other: False)
    outcomes = set()
    for n in range(1, 100):
        if path.exists():
            subprocess.run(["rm", "-r", str(path)], check=True)
        if old:
            write(path, old)
        calls[0], fail_at[0] = 0, n
        with monkeypatch.context() as m:
            m.setattr(os, "fsync", failing(os.fsync))
            m.setattr(os, "rename", failing(os.rename))
            m.setattr(Path, "rename", failing(Path.rename))
            m.setattr(Path, "mkdir", failing(Path.mkdir))
            m.setattr(Path, "open", failing(Path.open))
            m.setattr(writer, "_exchange", failing(writer._exchange))
            try:
                write(path, b"new", force=True)
                failed = False
            except (OSError, Stop):
                failed = True
        outcomes.add(state(path))
        assert leftovers(path) == []
        if not failed:
            assert calls[0] < n, "a failure was swallowed"
            break
    else:
        pytest.fail("it never succeeded")
    assert n > 8  # that many different places failed
    assert outcomes == {old, b"new"}


CHILD = """
import os, sys, time
from pathlib import Path
from tformer_deploy.bundle import writer
path, stop = Path(sys.argv[1]), sys.argv[2]
if stop == "between":
    writer._exchange = lambda one, other: False
    rename = Path.rename
    def slow(self, target):
        result = rename(self, target)
        print("now", flush=True)
        time.sleep(60)
        return result
    Path.rename = slow
with writer.new_folder(path, True) as folder:
    for name in ("weights.bin", "prefill.onnx", "manifest.json"):
        writer.write_file(folder / name, b"new")
        if stop == name:
            print("now", flush=True)
            time.sleep(60)
"""


def start(path: Path, stop: str) -> subprocess.Popen:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path), stop], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"now\n"
    return child


def kill(child: subprocess.Popen) -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate()


@pytest.mark.parametrize("stop", ["weights.bin", "manifest.json", "between"])
@pytest.mark.parametrize("old", [None, b"old"], ids=["absent", "present"])
def test_writer_when_killed_then_the_next_run_finds_a_whole_state_and_clears_up(tmp_path, old, stop):
    path = tmp_path / "b"
    if old:
        write(path, old)
    kill(start(path, stop))
    if stop != "between":
        assert state(path) == old
    assert leftovers(path) or path.exists()
    if old and stop == "between":
        with pytest.raises(UsageError):  # the old bundle was put back before this refusal
            write(path, b"newer", force=False)
        with pytest.raises(UsageError):
            write(path, b"newer", force=False)
        assert state(path) == b"old"
    write(path, b"newer", force=True)
    assert (state(path), leftovers(path)) == (b"newer", [])


def test_writer_when_another_process_writes_then_is_refused_and_names_it(tmp_path):
    path = tmp_path / "b"
    child = start(path, "weights.bin")
    with pytest.raises(StorageError, match=f"process {child.pid}"):
        write(path, b"mine", force=True)
    write(tmp_path / "other", b"mine")  # only this path is locked
    kill(child)
    write(path, b"mine")
    assert state(path) == b"mine"


def test_writer_when_a_leftover_carries_the_id_of_a_living_process_then_is_removed(tmp_path):
    path = tmp_path / "b"
    stale = tmp_path / f"{writer._prefix(path)}{os.getppid()}-00000000"
    stale.mkdir()
    write(path, b"x")
    assert leftovers(path) == []


@pytest.mark.slow  # seven processes at once: on a busy machine it is a matter of timing
def test_writer_when_many_write_one_path_at_once_then_one_whole_bundle_is_there(tmp_path):
    path = tmp_path / "b"
    code = CHILD.replace('b"new"', "str(os.getpid()).encode()")
    children = [subprocess.Popen([sys.executable, "-c", code, str(path), ""], stderr=subprocess.DEVNULL) for _ in range(6)]
    while any(c.poll() is None for c in children):
        state(path)
        time.sleep(0.001)
    codes = [c.returncode for c in children]
    assert 0 in codes
    assert state(path) in {str(c.pid).encode() for c in children if c.returncode == 0}
    assert leftovers(path) == []


def test_writer_when_the_name_has_250_bytes_or_odd_characters_then_works(tmp_path):
    for name in ("x" * 250, "a b\n'\"[*]?", "漢字", os.fsdecode(b"\xff\xfe"), "-o"):
        write(tmp_path / name, b"x")
        write(tmp_path / name, b"y", force=True)
        assert state(tmp_path / name) == b"y"


def test_writer_when_umask_is_set_then_folder_and_files_follow_it(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "b", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o750
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "b").iterdir()} == {0o640}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize("kib", [4, 8, 12, 16, 24])
def test_writer_when_the_disk_is_full_then_leaves_the_old_bundle(tmp_path, kib):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("this machine forbids mounts")
    try:
        path = disk / "b"
        with contextlib.suppress(OSError):  # too full even for the old one
            write(path, b"o")
        before = state(path)
        with pytest.raises(OSError, match="No space left"):
            write(path, b"n" * 9000, force=True)
        assert (state(path), leftovers(path)) == (before, [])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_replace_file_when_it_fails_then_the_old_file_stays(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    path.write_bytes(b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            replace_file(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
    assert path.read_bytes() == b"old"
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
