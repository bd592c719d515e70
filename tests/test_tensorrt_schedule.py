"""What decides in the TensorRT backend, as plain functions: profiles, pieces, rows, aliases, capture."""

from __future__ import annotations

import itertools

import pytest

from tformer_deploy.backends.tensorrt.schedule import (
    ProfileShape,
    StepPlan,
    aliased_pairs,
    layout,
    pieces,
    require_profiles,
    row_groups,
)
from tformer_deploy.errors import InputError


def profile(name: str, low: int, high: int, takes_past: bool = True, plan: int = 0) -> ProfileShape:
    return ProfileShape(plan, 0, name, 8, (low, high), 1, takes_past)


SHARED = [profile("decode", 1, 1), profile("prefill-64", 2, 64), profile("prefill-256", 65, 256)]
SPLIT = [profile("prefill-256", 2, 256, takes_past=False), profile("decode", 1, 1, plan=1)]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, [("decode", 1)]),
        (2, [("prefill-64", 2)]),
        (64, [("prefill-64", 64)]),
        (65, [("prefill-256", 65)]),
        (256, [("prefill-256", 256)]),
        (257, [("prefill-256", 256), ("decode", 1)]),
        (600, [("prefill-256", 256), ("prefill-256", 256), ("prefill-256", 88)]),
        (514, [("prefill-256", 256), ("prefill-256", 256), ("prefill-64", 2)]),
    ],
)
def test_pieces_when_a_prompt_has_a_length_then_each_goes_to_the_profile_that_takes_it(tokens: int, expected: list):
    assert [(p.profile.name, p.stop - p.start) for p in pieces(SHARED, tokens, fresh=True)] == expected


@pytest.mark.parametrize(("tokens", "fresh"), [*itertools.product([1, 2, 5, 63, 300, 513], [True, False])])
@pytest.mark.parametrize("profiles", [SHARED, SPLIT], ids=["shared", "split"])
def test_pieces_when_joined_then_are_the_whole_without_padding(profiles: list[ProfileShape], tokens: int, fresh: bool):
    found = pieces(profiles, tokens, fresh)
    assert [p.start for p in found] == [0, *(p.stop for p in found[:-1])]
    assert found[-1].stop == tokens
    assert all(p.profile.tokens[0] <= p.stop - p.start <= p.profile.tokens[1] for p in found)
    # A plan of the prefill graph writes from slot 0: it may begin a fresh row, and nothing else.
    assert all(p.profile.takes_past or (fresh and p.start == 0) for p in found)


def test_pieces_when_rows_are_fresh_then_a_plan_of_the_prefill_graph_goes_before_one_that_looks_at_the_cache():
    both = [*SPLIT, profile("extend-64", 2, 64, plan=1)]
    assert [p.profile.name for p in pieces(both, 30, fresh=True)] == ["prefill-256"]
    assert [p.profile.name for p in pieces(both, 30, fresh=False)] == ["extend-64"]
    assert [p.profile.name for p in pieces(both, 300, fresh=True)] == ["prefill-256", "extend-64"]


def test_pieces_when_no_profile_begins_low_enough_then_single_tokens_end_it():
    gap = [profile("decode", 1, 1), profile("prefill", 10, 20)]
    assert [(p.profile.name, p.stop) for p in pieces(gap, 23, True)] == [
        ("prefill", 20),
        ("decode", 21),
        ("decode", 22),
        ("decode", 23),
    ]


def test_profiles_when_none_takes_a_single_token_after_others_then_are_refused():
    require_profiles(SPLIT)
    with pytest.raises(InputError, match="nothing can be decoded"):
        require_profiles([profile("prefill", 1, 256, takes_past=False), profile("prefill-64", 2, 64)])


@pytest.mark.parametrize(
    ("rows", "most", "expected"),
    [(1, 8, [(0, 1)]), (8, 8, [(0, 8)]), (9, 8, [(0, 4), (4, 9)]), (17, 8, [(0, 5), (5, 11), (11, 17)])],
)
def test_rows_when_more_than_a_call_takes_then_are_split_evenly(rows: int, most: int, expected: list[tuple[int, int]]):
    assert row_groups(rows, most) == expected


def test_aliases_when_the_engine_names_them_then_must_be_the_signatures():
    def right(present: str) -> str | None:
        return present.replace("present", "past_key_values")

    pairs = aliased_pairs(2, right)
    assert pairs[:2] == (("past_key_values.0.key", "present.0.key"), ("past_key_values.0.value", "present.0.value"))
    assert len(pairs) == 4
    assert aliased_pairs(2, None) == pairs
    with pytest.raises(InputError, match=r"present\.0\.key has a buffer of its own"):
        aliased_pairs(2, lambda present: None)
    with pytest.raises(InputError, match=r"present\.0\.value shares the buffer of past_key_values\.0\.key"):
        aliased_pairs(2, lambda present: right(present.replace("value", "key")))


def test_layout_when_parts_have_odd_sizes_then_each_begins_at_a_multiple_of_256():
    assert layout({"a": 1, "b": 256, "c": 257}) == ({"a": 0, "b": 256, "c": 512}, 1024)


def test_step_when_shapes_and_addresses_stay_then_is_captured_once_and_replayed():
    steps = StepPlan(captures=True)
    assert [steps.next("a") for _ in range(4)] == ["bind", "capture", "replay", "replay"]
    assert [steps.next(key) for key in ("b", "b", "a", "a", "a")] == ["bind", "capture", "bind", "capture", "replay"]
    steps.forget()
    assert steps.next("a") == "bind"
    steps.give_up()
    assert [steps.next(key) for key in ("a", "a", "b", "b")] == ["plain", "plain", "bind", "plain"]


def test_step_when_it_is_not_captured_here_then_only_binds_and_runs():
    steps = StepPlan(captures=False)
    assert [steps.next(key) for key in ("a", "a", "b", "b")] == ["bind", "plain", "bind", "plain"]
