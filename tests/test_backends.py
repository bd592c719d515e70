"""Sessions over both executing backends: ragged rows, limits, growth, retired and refilled rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import GPT2_LIKE, LLAMA_LIKE, hot_decoder

from tformer_deploy.backends import Session, open_session
from tformer_deploy.backends.base import capacity_bucket
from tformer_deploy.bundle import open_bundle
from tformer_deploy.errors import CapabilityError, InputError, UsageError
from tformer_deploy.reference import Decoder

ROWS = [[1, 2, 3], [5] * 20, [7], list(range(100))]
KINDS = ("onnxruntime", "torch", "reference")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return hot_decoder(LLAMA_LIKE)


@pytest.fixture(params=KINDS)
def session(request: pytest.FixtureRequest, llama_bundle: Path, decoder: Decoder) -> Session:
    if request.param == "reference":
        return Session.from_decoder(decoder)
    return open_session(open_bundle(llama_bundle), request.param)


def truth(decoder: Decoder, row: list[int]) -> np.ndarray:
    """Logits after the last token by one full pass without a cache."""
    with torch.inference_mode():
        return decoder(torch.tensor([row]))[0, -1].numpy()


def same(logits: np.ndarray, decoder: Decoder, rows: list[list[int]]) -> None:
    for got, row in zip(logits, rows, strict=True):
        np.testing.assert_allclose(got, truth(decoder, row), atol=5e-5)


def test_prefill_decode_and_extend_when_rows_are_ragged_then_equal_a_full_pass(session: Session, decoder: Decoder):
    rows = [list(row) for row in ROWS]
    logits = session.prefill(rows)
    assert (logits.shape, logits.dtype) == ((4, 131), np.float32)
    same(logits, decoder, rows)
    assert session.capacity == 128
    for step in range(31):  # the longest row passes a bucket's edge
        tokens = [(7 * step + i) % 131 for i in range(4)]
        logits = session.decode(tokens)
        rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
    assert session.capacity == 256
    same(logits, decoder, rows)
    turn = [[1, 2], [3], [4, 5, 6, 7, 8], [9]]
    logits = session.extend(turn)
    rows = [[*row, *more] for row, more in zip(rows, turn, strict=True)]
    same(logits, decoder, rows)
    assert session.lengths == tuple(map(len, rows))


def test_prefill_when_called_again_then_nothing_of_the_last_batch_is_left(session: Session, decoder: Decoder):
    session.prefill(ROWS)
    logits = session.prefill([[8, 9]], capacity=200)
    same(logits, decoder, [[8, 9]])
    assert (session.lengths, session.capacity) == ((2,), 128)  # room is made as rows grow


def test_prefill_when_rows_pass_the_token_budget_then_several_calls_give_the_same(session: Session):
    whole = session.prefill(ROWS)
    session.prefill_tokens = 25
    np.testing.assert_allclose(session.prefill(ROWS), whole, atol=1e-5)


def test_rows_when_retired_refilled_and_compacted_then_the_others_are_untouched(session: Session, decoder: Decoder):
    session.prefill(ROWS)
    session.retire([0, 1])
    assert session.lengths == (0, 0, 1, 100)
    logits = session.decode([0, 0, 8, 9])
    same(logits[2:], decoder, [[7, 8], [*range(100), 9]])
    long = [(3 * i) % 131 for i in range(140)]
    same(session.refill([1], [long]), decoder, [long])
    assert session.compact() == [1, 2, 3]
    assert session.lengths == (140, 2, 101)
    logits = session.decode([4, 5, 6])
    same(logits, decoder, [[*long, 4], [7, 8, 5], [*range(100), 9, 6]])


def test_session_when_a_row_is_no_row_then_says_what_is_expected(session: Session):
    with pytest.raises(InputError, match=r"Row 0 is 1; expected a list of token ids\. Pass a list of rows"):
        session.prefill([1, 2])
    session.prefill(ROWS)
    for row in (9, -1):
        with pytest.raises(InputError, match=f"no row {row}; the batch has the rows 0 to 3"):
            session.read_cache(row)


def test_read_cache_when_rows_are_ragged_then_gives_each_rows_own_keys(session: Session, decoder: Decoder):
    session.prefill(ROWS)
    layers = session.read_cache(1)
    assert len(layers) == 3
    assert [a.shape for a in layers[0]] == [(2, 20, 16), (2, 20, 16)]
    alone = Session.from_decoder(decoder)
    alone.prefill([ROWS[1]])
    for got, want in zip(layers, alone.read_cache(0), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_cache_when_unwritten_slots_hold_poison_then_changes_nothing(session: Session):
    want = session.prefill(ROWS)
    more = session.decode([1, 2, 3, 4])
    cache = session.backend.allocate(4, 128)
    for layer in range(3):
        key, value = (np.full_like(a, poison) for a, poison in zip(cache.read(layer), (1e30, -1e30), strict=True))
        cache.write(layer, key, value)
    ids = np.zeros((4, 100), np.int64)
    for i, row in enumerate(ROWS):
        ids[i, : len(row)] = row
    lengths = np.array([len(row) for row in ROWS])
    np.testing.assert_allclose(session.backend.prefill(ids, lengths[:, None] - 1, cache)[:, 0], want, atol=1e-5)
    got = session.backend.decode(np.array([[1], [2], [3], [4]]), lengths, np.zeros((4, 1), np.int64), cache)
    np.testing.assert_allclose(got[:, 0], more, atol=1e-5)


def test_extend_when_padding_would_pass_max_length_then_rows_run_one_by_one(session: Session, decoder: Decoder):
    full = [5] * 255
    session.prefill([full, [1]])
    logits = session.extend([[6], [2, 3, 4]])
    same(logits, decoder, [[*full, 6], [1, 2, 3, 4]])
    assert session.lengths == (256, 4)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[1], []], ("Row 1", "empty")),
        ([[1], [131]], ("Row 1", "131", "130")),
        ([[-1]], ("Row 0", "-1")),
        ([[1] * 257], ("257", "256")),
        ([], ("no row",)),
    ],
)
def test_prefill_when_a_row_cannot_run_then_is_refused_with_the_numbers(
    session: Session, rows: list[list[int]], words: tuple[str, ...]
):
    with pytest.raises(InputError) as caught:
        session.prefill(rows)
    assert all(word in caught.value.message for word in words)


def test_decode_when_it_cannot_run_then_is_refused_and_the_batch_stays(session: Session):
    with pytest.raises(InputError, match="no batch"):
        session.decode([1])
    session.prefill([[5] * 256, [1]])
    with pytest.raises(InputError, match=r"257 tokens.*256"):
        session.decode([1, 2])
    with pytest.raises(InputError, match="batch of 2"):
        session.decode([1])
    with pytest.raises(InputError, match="capacity of 300"):
        session.prefill([[1]], capacity=300)
    session.prefill([[1], [2]])
    with pytest.raises(InputError, match="131"):
        session.decode([0, 131])
    assert session.lengths == (1, 1)


@pytest.mark.parametrize(
    ("length", "limit", "capacity"), [(1, 9999, 128), (128, 9999, 128), (129, 9999, 256), (300, 400, 400), (5, 64, 64)]
)
def test_capacity_when_a_length_is_asked_for_then_is_the_smallest_bucket_within_the_limit(length: int, limit: int, capacity: int):
    assert capacity_bucket(length, limit) == capacity


def test_rows_when_batched_on_onnxruntime_then_have_the_bits_of_the_row_alone(llama_bundle: Path):
    session = open_session(open_bundle(llama_bundle), threads=1)
    session.prefill(ROWS)
    batched = session.decode([1, 2, 3, 4])
    for i, row in enumerate(ROWS):
        session.prefill([row])
        assert (session.decode([i + 1])[0] == batched[i]).all()


def test_session_when_positions_are_learned_then_padding_shifts_nothing(gpt2_bundle: Path):
    decoder = hot_decoder(GPT2_LIKE)
    session = open_session(open_bundle(gpt2_bundle))
    session.prefill(ROWS)
    logits = session.extend([[1, 2], [3], [4, 5, 6, 7, 8], [9]])
    same(logits, decoder, [[*row, *more] for row, more in zip(ROWS, [[1, 2], [3], [4, 5, 6, 7, 8], [9]], strict=True)])


def test_session_when_the_bundle_is_fp16_then_caches_are_and_logits_are_float32(llama_fp16_bundle: Path, decoder: Decoder):
    for name in ("onnxruntime", "torch"):
        session = open_session(open_bundle(llama_fp16_bundle), name)
        logits = session.prefill(ROWS)
        assert (session.backend.dtype, logits.dtype) == ("fp16", np.float32)
        assert np.abs(logits - np.stack([truth(decoder, row) for row in ROWS])).max() < 0.12
    cache = open_session(open_bundle(llama_fp16_bundle)).backend.allocate(1, 8)
    assert cache.arrays[0].dtype == np.float16  # type: ignore[attr-defined]


def test_session_when_the_bundle_is_bf16_then_runs_cast_to_fp32_and_says_so(tmp_path: Path, llama_checkpoint: Path):
    from tformer_deploy.api import export

    bundle = open_bundle(export(llama_checkpoint, tmp_path / "b", dtype="bf16", check=False))
    session = open_session(bundle)
    assert session.backend.dtype == "fp32"
    assert "bf16" in session.backend.notes[0]
    assert "not executed" in session.backend.notes[0]
    rounded = hot_decoder(LLAMA_LIKE).to(torch.bfloat16).float()
    same(session.prefill(ROWS), rounded, ROWS)


def test_backend_when_it_is_unknown_or_cannot_run_here_then_no_other_runs_in_its_place(llama_bundle: Path, monkeypatch):
    bundle = open_bundle(llama_bundle)
    with pytest.raises(UsageError, match="onnxruntime, torch, tensorrt"):
        open_session(bundle, "cuda")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(CapabilityError, match="onnxruntime") as caught:
        open_session(bundle)
    assert caught.value.exit_code == 4


def test_backend_when_the_runtime_is_too_old_then_says_which_is_needed(llama_bundle: Path, monkeypatch):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "__version__", "1.24.4")
    with pytest.raises(CapabilityError, match=r"1\.24\.4"):
        open_session(open_bundle(llama_bundle))


def test_backend_when_memory_runs_out_then_names_the_batch_and_exits_6(llama_bundle: Path, monkeypatch):
    session = open_session(open_bundle(llama_bundle))
    session.prefill([[1], [2]])

    class Exhausted:
        def run_with_iobinding(self, binding):
            raise RuntimeError("Failed to allocate memory for requested buffer of size 7")

    session.decode([1, 2])
    graph = session.backend._graphs["step"]  # type: ignore[attr-defined]
    exhausted = Exhausted()
    monkeypatch.setattr(graph, "_session", exhausted)
    with pytest.raises(Exception, match=r"step of 2 rows, 1 tokens each, capacity 128") as caught:
        session.decode([1, 2])
    assert caught.value.exit_code == 6  # type: ignore[attr-defined]
