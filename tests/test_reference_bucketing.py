"""bucket_by_length: sorted, bounded, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer_deploy.reference import bucket_by_length


@given(st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=80), st.integers(1, 20))
@settings(derandomize=True, deadline=None)
def test_buckets_when_made_then_are_sorted_bounded_and_complete(sequences, size):
    buckets = bucket_by_length(sequences, size)
    flat = [s for bucket in buckets for s in bucket]
    # Identity and order: sorted() is stable, so this is the whole specification of the order.
    assert [id(s) for s in flat] == [id(s) for s in sorted(sequences, key=len)]
    assert all(1 <= len(bucket) <= size for bucket in buckets)
    assert all(len(bucket) == size for bucket in buckets[:-1])


def test_buckets_when_size_is_not_given_then_hold_64():
    assert [len(b) for b in bucket_by_length(["x"] * 130)] == [64, 64, 2]


@pytest.mark.parametrize("size", [0, -1])
def test_buckets_when_size_is_below_one_then_names_it(size):
    with pytest.raises(ValueError, match=f"bucket_size is {size}"):
        bucket_by_length([[1]], size)
