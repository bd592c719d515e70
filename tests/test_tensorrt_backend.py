"""The TensorRT backend over a GPU made of host memory (fake_gpu.py): values against ONNX Runtime, and the native calls."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import fake_gpu
import numpy as np
import pytest
from fake_gpu import FakeMachine, write_engine

from tformer_deploy.backends import Session, open_session
from tformer_deploy.backends.tensorrt import TensorRTBackend, open_tensorrt
from tformer_deploy.bundle import Bundle, open_bundle
from tformer_deploy.errors import CapabilityError, InputError, ResourceError

ROWS = [[1, 2, 3], [5] * 20, [7], list(range(100))]


@pytest.fixture
def bundle(tmp_path: Path, llama_bundle: Path) -> Bundle:
    return open_bundle(shutil.copytree(llama_bundle, tmp_path / "b"))


@pytest.fixture(params=["rtx", "tensorrt"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine(monkeypatch, request.param)


@pytest.fixture
def rtx(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine(monkeypatch)


def opened(bundle: Bundle, machine: FakeMachine, **engine: object) -> Session:
    write_engine(bundle, flavour=machine.flavour, version=machine.version, **engine)  # type: ignore[arg-type]
    return open_session(bundle, "tensorrt")


def portable(bundle: Bundle) -> Session:
    return open_session(bundle, profile="portable", threads=1)


def close(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_session_when_rows_are_ragged_then_equals_onnx_runtime_step_by_step(bundle: Bundle, machine: FakeMachine):
    session, other = opened(bundle, machine), portable(bundle)
    close(session.prefill(ROWS), other.prefill(ROWS))
    for step in range(5):
        tokens = [(7 * step + i) % 131 for i in range(4)]
        close(session.decode(tokens), other.decode(tokens))
    turn = [[1, 2], [3], [4, 5, 6, 7, 8], [9]]
    close(session.extend(turn), other.extend(turn))
    for a, b in zip(session.verify(turn), other.verify(turn), strict=True):
        close(a, b)
    session.retire([0, 1])
    other.retire([0, 1])
    close(session.refill([1], [[8] * 70]), other.refill([1], [[8] * 70]))
    assert session.compact() == other.compact() == [1, 2, 3]
    close(session.decode([4, 5, 6]), other.decode([4, 5, 6]))
    for (a, b), (c, d) in zip(session.read_cache(0), other.read_cache(0), strict=True):
        close(a, c)
        close(b, d)


@pytest.mark.parametrize("layout", ["split", "decode"])
def test_session_when_the_engine_has_other_plans_then_equals_onnx_runtime(bundle: Bundle, machine: FakeMachine, layout: str):
    session, other = opened(bundle, machine, layout=layout, buckets=(16, 40)), portable(bundle)
    close(session.prefill(ROWS), other.prefill(ROWS))  # the longest goes on token by token
    close(session.decode([1, 2, 3, 4]), other.decode([1, 2, 3, 4]))
    close(session.extend([[1, 2], [3], [4, 5, 6], [9]]), other.extend([[1, 2], [3], [4, 5, 6], [9]]))
    for (a, b), (c, d) in zip(session.read_cache(3), other.read_cache(3), strict=True):
        close(a, c)
        close(b, d)


def test_session_when_prompts_pass_the_largest_profile_then_pieces_equal_the_whole(bundle: Bundle, machine: FakeMachine):
    session, other = opened(bundle, machine, buckets=(16,)), portable(bundle)
    rows = [[(3 * i) % 131 for i in range(n)] for n in (100, 3, 49, 33)]
    close(session.prefill(rows), other.prefill(rows))
    close(session.extend([[1] * 40] * 4), other.extend([[1] * 40] * 4))
    close(session.decode([5, 6, 7, 8]), other.decode([5, 6, 7, 8]))


def test_backend_when_rows_pass_the_largest_batch_then_are_split_and_equal_the_whole(bundle: Bundle, machine: FakeMachine):
    backend = opened(bundle, machine, max_batch=3).backend
    assert backend.max_batch == 3
    other = portable(bundle).backend
    ids = np.arange(8 * 6, dtype=np.int64).reshape(8, 6)
    positions = np.full((8, 1), 5, np.int64)
    cache, theirs = backend.allocate(8, 10), other.allocate(8, 256)
    close(backend.prefill(ids, positions, cache), other.prefill(ids, positions, theirs))
    past, one = np.arange(8, dtype=np.int64) % 3 + 4, np.zeros((8, 1), np.int64)
    close(backend.decode(ids[:, :1], past, one, cache), other.decode(ids[:, :1], past, one, theirs))
    for layer in range(3):
        for a, b in zip(cache.read(layer), theirs.read(layer), strict=True):
            close(a, b)


@pytest.mark.parametrize("positions", [1, 4])
def test_backend_when_logits_of_many_positions_are_asked_for_then_the_call_is_repeated(
    bundle: Bundle, machine: FakeMachine, positions: int
):
    backend, other = opened(bundle, machine, buckets=(4, 16), positions=positions).backend, portable(bundle).backend
    ids = (np.arange(2 * 21, dtype=np.int64).reshape(2, 21) * 5) % 131
    asked = np.array([[20, 3, 4, 15, 16, 0], [1, 1, 19, 17, 2, 5]])
    cache, theirs = backend.allocate(2, 64), other.allocate(2, 256)
    close(backend.prefill(ids, asked, cache), other.prefill(ids, asked, theirs))
    past = np.array([21, 7], np.int64)
    close(backend.decode(ids, past, asked, cache), other.decode(ids, past, asked, theirs))


def test_backend_when_the_bundle_is_fp16_then_caches_are(tmp_path: Path, llama_fp16_bundle: Path, rtx: FakeMachine):
    bundle = open_bundle(shutil.copytree(llama_fp16_bundle, tmp_path / "b"))
    session, other = opened(bundle, rtx), portable(bundle)
    close(session.prefill(ROWS), other.prefill(ROWS))
    assert session.backend.dtype == "fp16"
    assert session.backend.allocate(1, 8).read(0)[0].dtype == np.float32


def test_backend_when_the_cache_has_odd_rows_then_views_go_through_an_aligned_copy(bundle: Bundle, machine: FakeMachine):
    # 2 heads of 3 slots of 16 float32 values are 384 bytes, no multiple of 256.
    backend, other = opened(bundle, machine, capacity=3, buckets=(3,), max_batch=2).backend, portable(bundle).backend
    cache, theirs = backend.allocate(4, 3), other.allocate(4, 3)
    ids = np.arange(8, dtype=np.int64).reshape(4, 2)
    asked = np.ones((4, 1), np.int64)
    close(backend.prefill(ids, asked, cache), other.prefill(ids, asked, theirs))
    one = np.array([[1]], np.int64)
    for row in range(4):
        past = np.array([2], np.int64)
        view, theirs_view = cache.rows(row, row + 1), theirs.rows(row, row + 1)
        close(backend.decode(one + row, past, one * 0, view), other.decode(one + row, past, one * 0, theirs_view))
    for a, b in zip(cache.read(2), theirs.read(2), strict=True):
        close(a, b)


def test_capacity_when_a_length_is_asked_for_then_is_the_engines(bundle: Bundle, machine: FakeMachine):
    backend = opened(bundle, machine, capacity=100, buckets=(100,)).backend
    assert (backend.capacity_for(3), backend.max_length, backend.allocate(1, 7).capacity) == (100, 100, 100)
    with pytest.raises(InputError, match=r"101 tokens.*100 slots"):
        backend.allocate(1, 101)
    with pytest.raises(InputError, match=r"101 slots.*100"):
        backend.allocate(1, 5).resize([0], 101)
    assert any("at most 100 tokens" in note for note in backend.notes)


def test_call_when_it_would_write_past_the_cache_then_is_refused_before_the_engine(bundle: Bundle, machine: FakeMachine):
    backend = opened(bundle, machine, capacity=16, buckets=(16,)).backend
    cache = backend.allocate(2, 16)
    one, zero = np.ones((2, 1), np.int64), np.zeros((2, 1), np.int64)
    before = len(machine.executions())
    with pytest.raises(InputError, match=r"up to 17 tokens.*16 slots"):
        backend.decode(one, np.array([3, 16]), zero, cache)
    with pytest.raises(InputError, match="do not fit"):
        backend.decode(one, np.array([3, -1]), zero, cache)
    with pytest.raises(InputError, match="do not fit"):
        backend.decode(one[:1], np.array([3]), zero[:1], cache)
    with pytest.raises(InputError, match="position outside"):
        backend.decode(one, np.array([3, 3]), one, cache)
    assert len(machine.executions()) == before


def test_cache_when_allocated_or_grown_then_is_zero_and_reuses_freed_memory(bundle: Bundle, machine: FakeMachine):
    backend = opened(bundle, machine).backend
    cache = backend.allocate(3, 8)
    cache.write(1, np.ones((3, 2, 256, 16), np.float32), np.full((3, 2, 256, 16), 2.0, np.float32))
    grown = cache.resize([2, 0], 8)
    assert [a.mean() for a in grown.read(1)] == [1.0, 2.0]
    assert not grown.read(0)[0].any()
    addresses, allocations = cache.addresses, machine.library.names().count("cuMemAlloc_v2")  # type: ignore[attr-defined]
    view = cache.rows(0, 1)
    del cache
    assert backend.allocate(3, 8).addresses != addresses  # type: ignore[attr-defined]  # a view still holds it
    del view
    gc.collect()
    again = backend.allocate(4, 8)
    assert again.addresses == addresses  # type: ignore[attr-defined]
    assert not again.read(1)[0].any()
    assert machine.library.names().count("cuMemAlloc_v2") == allocations + 1


def test_decode_when_repeated_on_full_tensorrt_then_is_captured_once_and_addresses_stay(bundle: Bundle, monkeypatch):
    machine = FakeMachine(monkeypatch, "tensorrt")
    session, other = opened(bundle, machine), portable(bundle)
    rows = [ROWS[0], ROWS[1], [7, 8], ROWS[3]]  # a prompt of one token would go to the decode profile too
    close(session.prefill(rows), other.prefill(rows))
    machine.settings.events.clear()
    machine.library.log.clear()
    for step in range(6):
        close(session.decode([step, 2, 3, 4]), other.decode([step, 2, 3, 4]))
    assert machine.executions() == [(0, False), (0, True)]
    names = machine.library.names()
    assert [names.count(n) for n in ("cuStreamBeginCapture_v2", "cuGraphLaunch", "cuMemAlloc_v2")] == [1, 5, 0]
    addresses = {e[1]: e[2] for e in machine.settings.events if e[0] == "address"}
    assert len([e for e in machine.settings.events if e[0] == "address"]) == len(addresses)  # set once
    for layer in range(3):
        for kind in ("key", "value"):
            assert addresses[f"past_key_values.{layer}.{kind}"] == addresses[f"present.{layer}.{kind}"]
    assert len({addresses[n] for n in addresses if not n.startswith("present")}) == len(addresses) - 6
    # A new batch of as many rows lies where the last one lay; another number of rows is bound and captured anew.
    close(session.prefill(rows), other.prefill(rows))
    machine.settings.events.clear()
    close(session.decode([1, 2, 3, 4]), other.decode([1, 2, 3, 4]))
    assert machine.executions() == []
    session.prefill(rows[:3])
    other.prefill(rows[:3])
    machine.settings.events.clear()
    for _ in range(3):
        close(session.decode([1, 2, 3]), other.decode([1, 2, 3]))
    assert machine.executions() == [(0, False), (0, True)]
    assert len(machine.library.graphs) == 1  # the stale one was destroyed


def test_decode_when_it_runs_on_rtx_then_rtx_captures_and_the_runtime_cache_is_kept(bundle: Bundle, rtx: FakeMachine):
    session = opened(bundle, rtx)
    session.prefill(ROWS)
    for _ in range(3):
        session.decode([1, 2, 3, 4])
    assert "cuStreamBeginCapture_v2" not in rtx.library.names()
    assert ("config", "WHOLE_GRAPH_CAPTURE", True) in rtx.settings.events
    assert not [e for e in rtx.settings.events if e[0] == "runtime cache read"]
    session.backend.close()  # type: ignore[attr-defined]
    open_session(bundle, "tensorrt")
    assert [e for e in rtx.settings.events if e[0] == "runtime cache read"] == [("runtime cache read", True)]


def test_runtime_cache_when_torn_or_refused_then_is_made_again(bundle: Bundle, rtx: FakeMachine, tmp_path: Path, monkeypatch):
    from tformer_deploy.backends.tensorrt.runtime_cache import RuntimeCacheFile

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, cache = RuntimeCacheFile("f" * 64, "1.7", "NVIDIA RTX/6000"), fake_gpu.FakeRuntimeCache(rtx.settings)
    assert not file.load(cache)
    assert file.save(cache)
    assert file.load(cache)
    assert not file.save(cache)  # nothing new
    assert file.path.name == f"{'f' * 32}-1.7-NVIDIA-RTX-6000.cache"
    data = file.path.read_bytes()
    for torn in (data[:-1], b"", data[:40] + bytes([data[40] ^ 1]) + data[41:]):
        file.path.write_bytes(torn)
        rtx.settings.events.clear()
        assert not file.load(cache)
        assert rtx.settings.events == []  # the runtime saw none of it
    other = RuntimeCacheFile("f" * 64, "1.8", "NVIDIA RTX/6000")
    assert other.path != file.path
    file.path.unlink()
    file.path.mkdir()
    assert not RuntimeCacheFile("f" * 64, "1.7", "NVIDIA RTX/6000").save(cache)  # cannot be written: left out


def test_step_when_it_cannot_be_captured_then_runs_plainly_and_a_note_says_so(bundle: Bundle, monkeypatch):
    machine = FakeMachine(monkeypatch, "tensorrt")
    machine.settings.cannot_capture = True
    session, other = opened(bundle, machine), portable(bundle)
    session.prefill(ROWS)
    other.prefill(ROWS)
    for _ in range(4):
        close(session.decode([1, 2, 3, 4]), other.decode([1, 2, 3, 4]))
    notes = [n for n in session.backend.notes if "CUDA graph" in n]
    assert len(notes) == 1
    assert "this cannot be captured" in notes[0]
    assert "/x/y.cpp" not in notes[0]


@pytest.mark.parametrize(
    ("place", "words"), [("shape", "setting the shape"), ("execute", "the enqueue failed"), ("context", "not enough memory")]
)
def test_runtime_when_a_call_fails_then_its_own_words_are_given(bundle: Bundle, machine: FakeMachine, place: str, words: str):
    session = opened(bundle, machine)
    machine.settings.fails_at = place
    with pytest.raises(CapabilityError, match=words) as caught:
        session.prefill(ROWS)
    assert caught.value.exit_code == 4
    machine.settings.fails_at = ""
    close(session.prefill(ROWS), portable(bundle).prefill(ROWS))  # and the next call begins anew


def test_cuda_when_a_call_fails_then_the_call_and_the_error_are_named(bundle: Bundle, machine: FakeMachine):
    session = opened(bundle, machine)
    session.prefill(ROWS)
    machine.library.fail["cuStreamSynchronize"] = 700
    with pytest.raises(
        CapabilityError, match=r"cuStreamSynchronize \(running the engine\) failed: CUDA_ERROR_ILLEGAL_ADDRESS, an illegal"
    ):
        session.decode([1, 2, 3, 4])
    del machine.library.fail["cuStreamSynchronize"]


def test_memory_when_it_does_not_fit_then_is_refused_with_the_numbers_before_it_is_asked_for(bundle: Bundle, monkeypatch):
    machine = FakeMachine(monkeypatch, total=2**21)  # a batch of 8 takes 1.5 MiB
    session = opened(bundle, machine)
    session.prefill([[1]] * 8)
    held = session.backend.allocate(2, 8)
    with pytest.raises(ResourceError, match=r"0\.1 of 2 MiB free; caches of 8 rows with 256 slots each needs 1\.5 MiB") as caught:
        session.backend.allocate(8, 256)
    assert caught.value.exit_code == 6
    del held
    gc.collect()
    session.prefill([[1]] * 8)
    session.prefill([[1]])  # what is not lent gives way
    session.prefill([[1]] * 8)


def test_memory_when_the_driver_has_less_than_it_said_then_its_own_error_is_named(bundle: Bundle, machine: FakeMachine):
    backend = opened(bundle, machine).backend
    machine.library.fail["cuMemAlloc_v2"] = 2
    with pytest.raises(
        ResourceError, match=r"cuMemAlloc_v2 \(\d+ bytes for caches of 4 rows.*CUDA_ERROR_OUT_OF_MEMORY"
    ) as caught:
        backend.allocate(4, 8)
    assert caught.value.exit_code == 6


def test_backend_when_closed_then_everything_is_given_back_in_order(bundle: Bundle, machine: FakeMachine):
    session = opened(bundle, machine)
    session.prefill(ROWS)
    session.decode([1, 2, 3, 4])
    session.decode([1, 2, 3, 4])
    assert machine.library.memory
    assert machine.library.pinned
    backend = session.backend
    assert isinstance(backend, TensorRTBackend)
    del session
    backend.close()
    assert not machine.library.memory
    assert not machine.library.pinned
    assert machine.library.names()[-2:] == ["cuStreamDestroy_v2", "cuDevicePrimaryCtxRelease_v2"]
    before = len(machine.library.log)
    backend.close()
    assert len(machine.library.log) == before


def test_backend_when_opening_fails_then_the_device_is_given_back(bundle: Bundle, machine: FakeMachine):
    write_engine(bundle, flavour=machine.flavour, version=machine.version)
    machine.settings.deserialises = False
    with pytest.raises(CapabilityError, match="cannot load"):
        open_tensorrt(bundle)
    assert machine.library.names()[-1] == "cuDevicePrimaryCtxRelease_v2"
    assert not machine.library.memory
