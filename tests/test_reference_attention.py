"""One attention in five forms: plain Python, masked softmax, SDPA, and the cache fed token by token or in chunks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tformer_deploy.errors import TformerError
from tformer_deploy.reference import (
    CachedAttention,
    FastAttention,
    MultiHeadAttention,
    TransformerBlock,
    TransformerConfig,
    attention,
    causal_mask,
    softmax,
)
from tformer_deploy.reference.blocks import split_heads

properties = settings(derandomize=True, deadline=None, max_examples=30)
CLOSE = {"rtol": 0.0, "atol": 1e-12}  # float64


@st.composite
def shapes(draw) -> tuple[int, int, int, int, int]:
    """batch, length, heads, head_dim, seed."""
    return (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 12)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 2, 3, 8])),
        draw(st.integers(0, 2**16)),
    )


def forms(batch: int, length: int, heads: int, dim: int, seed: int):
    """The three modules with the same float64 weights, and an input."""
    torch.manual_seed(seed)
    width = heads * dim
    textbook = MultiHeadAttention(TransformerConfig(d_model=width, n_heads=heads, d_ff=4)).double().eval()
    fast = FastAttention(width, heads).double()
    cached = CachedAttention(width, heads, max_seq=length + 2, max_batch=batch + 1).double()
    for other in (fast, cached):
        other.load_state_dict(textbook.state_dict())
    return textbook, fast, cached, torch.randn(batch, length, width, dtype=torch.float64)


def plain(module: MultiHeadAttention, x: Tensor, causal: bool) -> Tensor:
    """The same module's numbers with every head's attention in plain Python."""
    query, key, value = split_heads(module.qkv(x), module.config.n_heads)
    heads = [
        [attention(query[b, h].tolist(), key[b, h].tolist(), value[b, h].tolist(), causal) for h in range(query.shape[1])]
        for b in range(x.shape[0])
    ]
    return module.out(torch.tensor(heads, dtype=x.dtype).transpose(1, 2).flatten(2))


@given(shapes(), st.booleans())
@properties
@torch.no_grad()
def test_forms_when_square_then_agree(shape, causal):
    textbook, fast, _, x = forms(*shape)
    mask = causal_mask(x.shape[1], x.device) if causal else None
    want = textbook(x, mask)
    torch.testing.assert_close(plain(textbook, x, causal), want, **CLOSE)
    torch.testing.assert_close(fast(x, is_causal=causal), want, **CLOSE)


@given(shapes(), st.data())
@properties
@torch.no_grad()
def test_cache_when_fed_in_chunks_then_equals_the_full_causal_form(shape, data):
    _, fast, cached, x = forms(*shape)
    want = fast(x)
    one_by_one = [cached(x[:, i : i + 1], i) for i in range(x.shape[1])]
    torch.testing.assert_close(torch.cat(one_by_one, dim=1), want, **CLOSE)
    cached.keys.fill_(7.0), cached.values.fill_(7.0)  # what an earlier sequence left must not matter
    got, position = [], 0
    while position < x.shape[1]:
        size = data.draw(st.integers(1, x.shape[1] - position))
        got.append(cached(x[:, position : position + size], position))
        position += size
    torch.testing.assert_close(torch.cat(got, dim=1), want, **CLOSE)


@given(shapes(), st.data())
@properties
@torch.no_grad()
def test_forms_when_rows_are_ragged_then_each_row_equals_itself_alone(shape, data):
    textbook, fast, cached, x = forms(*shape)
    lengths = [data.draw(st.integers(1, x.shape[1])) for _ in range(x.shape[0])]
    for b, n in enumerate(lengths):
        x[b, n:] = 1e6  # right padding: later positions, which no real one may see
    batches = [textbook(x, causal_mask(x.shape[1])), fast(x), cached(x, 0)]
    for b, n in enumerate(lengths):
        alone = plain(textbook, x[b : b + 1, :n], causal=True)[0]
        for batch in batches:
            torch.testing.assert_close(batch[b, :n], alone, **CLOSE)


@given(shapes())
@properties
@torch.no_grad()
def test_mask_when_keys_are_padded_then_equals_the_row_without_them(shape):
    textbook, _, _, x = forms(*shape)
    padded = torch.cat([x, torch.full_like(x[:, :1], 1e6)], dim=1)
    mask = torch.ones(x.shape[0], 1, 1, padded.shape[1], dtype=torch.int64)
    mask[..., -1] = 0
    torch.testing.assert_close(textbook(padded, mask)[:, :-1], textbook(x), **CLOSE)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=20))
@properties
def test_softmax_when_scores_are_any_then_sums_to_one(scores):
    got = softmax(scores)
    assert math.isclose(math.fsum(got), 1.0, abs_tol=1e-12)
    assert all(0 <= p <= 1 for p in got)
    want = torch.tensor(scores, dtype=torch.float64).softmax(0)
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), want, **CLOSE)


def test_softmax_when_a_score_is_blocked_then_gives_exactly_zero():
    assert softmax([0.0, -math.inf, 0.0]) == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("scores", [[], [-math.inf, -math.inf], [math.inf], [math.nan, 1.0], [1.0, math.nan]])
def test_softmax_when_nothing_is_to_share_then_says_so(scores):
    with pytest.raises(ValueError, match=f"softmax of {len(scores)} scores"):
        softmax(scores)


def test_attention_when_keys_are_alike_then_averages_the_values():
    assert attention([[3.0, 4.0]], [[1.0, 1.0]] * 2, [[1.0], [3.0]]) == [[2.0]]
    assert attention([[3.0], [4.0]], [[1.0]] * 2, [[1.0], [3.0]], causal=True) == [[1.0], [2.0]]


def test_attention_when_no_query_then_gives_no_row():
    assert attention([], [[1.0]], [[1.0]]) == []


@pytest.mark.parametrize(
    ("queries", "keys", "values", "message"),
    [
        ([[1.0]], [], [], "over 0 keys with 1 queries"),
        ([[1.0]], [[1.0]] * 2, [[1.0]] * 3, "2 keys and 3 values"),
        ([[1.0, 2.0]], [[1.0] * 3], [[1.0]], "queries are 2 wide and keys 3"),
        ([[1.0]], [[1.0], [1.0, 2.0]], [[1.0]] * 2, "keys row 1 has 2 numbers and row 0 has 1"),
        ([[1.0]], [[1.0]] * 2, [[1.0], []], "values row 1 has 0 numbers and row 0 has 1"),
        ([[1.0], [1.0, 2.0]], [[1.0]], [[1.0]], "queries row 1 has 2 numbers and row 0 has 1"),
        ([[]], [[]], [[1.0]], "keys row 0 has 0 numbers"),
    ],
)
def test_attention_when_sizes_do_not_match_then_names_the_numbers(queries, keys, values, message):
    with pytest.raises(ValueError, match=message):
        attention(queries, keys, values)


@pytest.mark.parametrize(
    ("position", "tokens", "rows", "numbers"),
    [(7, 2, 1, "2 tokens from position 7 end at 9; the cache holds 8"), (0, 9, 1, "9 tokens"), (0, 1, 3, "3 rows; the cache has 2"),
     (-1, 1, 1, "position -1"), (0, 0, 1, "0 tokens"), (0, 1, 0, "0 rows")],
)  # fmt: skip
def test_cache_when_a_call_does_not_fit_then_says_the_numbers_and_writes_nothing(position, tokens, rows, numbers):
    cached = CachedAttention(8, 2, max_seq=8, max_batch=2)
    with pytest.raises(ValueError, match=numbers) as caught:
        cached(torch.randn(rows, tokens, 8), position)
    assert isinstance(caught.value, TformerError)
    assert not cached.keys.any()
    assert not cached.values.any()
    assert cached(torch.randn(2, 8, 8), 0).shape == (2, 8, 8)  # exactly full fits


def test_cache_when_used_then_keeps_its_buffers_and_its_state_dict():
    cached = CachedAttention(8, 2, max_seq=4, max_batch=2)
    before = cached.keys.data_ptr(), cached.values.data_ptr()
    cached(torch.randn(2, 3, 8), 0)
    assert (cached.keys.data_ptr(), cached.values.data_ptr()) == before
    assert sorted(cached.state_dict()) == ["out.bias", "out.weight", "qkv.weight"]
    assert not cached.keys.requires_grad


@pytest.mark.parametrize(
    "make", [lambda: TransformerConfig(d_model=10, n_heads=3), lambda: FastAttention(10, 3), lambda: CachedAttention(10, 3, 4, 1)]
)
def test_heads_when_they_do_not_divide_the_width_then_names_both(make):
    with pytest.raises(ValueError, match=r"d_model is 10 and n_heads 3"):
        make()


@pytest.mark.parametrize(("field", "value"), [("d_ff", 0), ("n_heads", 0), ("d_model", -8), ("dropout", 1.0), ("dropout", -0.1)])
def test_config_when_a_size_is_impossible_then_names_it(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        TransformerConfig(**{field: value})


def test_config_when_made_plainly_then_has_the_documented_sizes_and_is_frozen():
    config = TransformerConfig()
    assert (config.d_model, config.n_heads, config.d_ff, config.dropout, config.head_dim) == (512, 8, 2048, 0.1, 64)
    with pytest.raises(AttributeError):
        config.d_model = 4  # type: ignore[misc]


def test_causal_mask_when_made_then_is_lower_triangular_bool():
    assert causal_mask(3, torch.device("cpu")).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_attention_modules_when_made_then_have_a_fused_projection_without_bias():
    module = MultiHeadAttention(TransformerConfig(d_model=8, n_heads=2, d_ff=4))
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
    assert shapes == {"qkv.weight": (24, 8), "out.weight": (8, 8), "out.bias": (8,)}


def test_fast_attention_when_long_then_never_holds_a_square_matrix():
    fast, x = FastAttention(8, 1), torch.randn(1, 8192, 8)
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        fast(x)
    largest = max(abs(event.self_cpu_memory_usage) for event in profile.events())
    assert largest < 8192 * 8192  # a quarter of one float32 score matrix


def test_block_when_masked_then_sees_no_later_position():
    torch.manual_seed(0)
    block = TransformerBlock(TransformerConfig(d_model=8, n_heads=2, d_ff=16)).double().eval()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    changed = x.clone()
    changed[:, 3:] += 1
    with torch.no_grad():
        before, after = block(x, causal_mask(5)), block(changed, causal_mask(5))
        free = block(changed) - block(x)
    torch.testing.assert_close(before[:, :3], after[:, :3], **CLOSE)
    assert (before[:, 3:] - after[:, 3:]).abs().amin(dim=-1).gt(0).all()
    assert free[:, 0].abs().max() > 0


def test_block_when_trained_then_drops_out_and_learns():
    torch.manual_seed(0)
    block = TransformerBlock(TransformerConfig(d_model=8, n_heads=2, d_ff=16, dropout=0.5))
    x, target = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))
    optimizer = torch.optim.Adam(block.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (block(x, causal_mask(6)) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 2
