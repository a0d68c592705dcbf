"""Which texts share a forward. No arrays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.encoders.batching import FIRST_TOKENS, MAX_TOKENS, PADDING, SHORT, SLICE_S, Job, Line, Speed, TokenRow


def job(*lengths: int) -> Job:
    return Job([TokenRow([0] * length) for length in lengths])


def lengths(batch: list[object]) -> list[int]:
    return sorted(w.length for w in batch)  # pyright: ignore[reportAttributeAccessIssue]


def test_texts_of_one_length_share_a_forward_up_to_the_budget() -> None:
    line = Line()
    line.add(job(*[50] * 10))
    assert [len(line.take(200)) for _ in range(4)] == [4, 4, 2, 0]


def test_a_text_beyond_the_budget_goes_alone() -> None:
    line = Line()
    line.add(job(5000, 10))
    assert lengths(line.take(100)) == [5000]
    assert lengths(line.take(100)) == [10]


def test_the_oldest_job_goes_first_and_takes_others_texts_of_its_length_along() -> None:
    line = Line()
    first, second = job(10, 100), job(99, 300)
    line.add(first)
    line.add(second)
    assert lengths(line.take(1000)) == [99, 100]
    assert lengths(line.take(1000)) == [10], "the longer texts of the younger job wait"
    assert lengths(line.take(1000)) == [300]


def test_equally_long_texts_of_many_jobs_share_a_forward_the_oldest_first() -> None:
    line = Line()
    jobs = [job(5) for _ in range(8)]
    for one in jobs:
        line.add(one)
    assert [w.job for w in line.take(30)] == jobs[:6]
    assert [w.job for w in line.take(30)] == jobs[6:]


def test_a_removed_job_leaves_the_others() -> None:
    line = Line()
    first, second = job(10, 100), job(99)
    line.add(first)
    line.add(second)
    line.remove(first)
    assert (lengths(line.take(1000)), len(line)) == ([99], 0)


@given(st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=8), max_size=8), st.integers(1, 4000))
def test_every_text_runs_once_within_the_budget_and_with_little_padding(jobs: list[list[int]], budget: int) -> None:
    line = Line()
    for one in jobs:
        line.add(job(*one))
    seen: list[tuple[int, int]] = []
    while batch := line.take(budget):
        longest = max(w.length for w in batch)
        assert len(batch) == 1 or longest * len(batch) <= min(budget, MAX_TOKENS)
        assert all(w.length >= min(longest - SHORT, int(longest * (1 - PADDING))) for w in batch)
        seen += [(id(w.job), w.index) for w in batch]
    assert len(set(seen)) == len(seen) == sum(map(len, jobs))
    assert not len(line)


def settled(overhead: float, per_token: float, start: int = FIRST_TOKENS) -> Speed:
    speed = Speed()
    speed.budget = start
    for _ in range(40):
        speed.observe(speed.budget, overhead + per_token * speed.budget)
    return speed


@pytest.mark.parametrize("start", [1, FIRST_TOKENS, MAX_TOKENS])
@pytest.mark.parametrize(("overhead", "per_token"), [(0.0, 1e-3), (0.01, 1e-4), (0.03, 1e-3)])
def test_a_slice_settles_at_the_time_it_may_take(overhead: float, per_token: float, start: int) -> None:
    speed = settled(overhead, per_token, start)
    assert 0.8 * SLICE_S <= overhead + per_token * speed.budget <= 1.2 * SLICE_S


def test_a_slice_has_bounds() -> None:
    assert settled(0.0, 1e-9).budget == MAX_TOKENS
    assert settled(1.0, 1.0).budget == 1


def test_small_forwards_say_nothing_about_large_ones() -> None:
    speed = Speed()
    for _ in range(20):
        speed.observe(5, 0.02)
    assert speed.budget == FIRST_TOKENS


def test_a_long_forward_is_cut_into_slices() -> None:
    assert [Speed().pieces(n * FIRST_TOKENS) for n in (0, 1, 10)] == [1, 1, 10]
