"""Percentiles, ratios and bounds against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxinfer.bench.stats import Spread, lower_bound, percentile, ratio, spread


@pytest.mark.parametrize(
    ("values", "q", "wanted"),
    [
        ([7.0], 99, 7.0),
        ([1.0, 2.0], 50, 1.5),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 0, 1.0),
        ([1.0, 2.0, 3.0, 4.0], 100, 4.0),
        ([1.0, 2.0, 3.0, 4.0], 25, 1.75),
        ([10.0, 20.0, 30.0, 40.0, 50.0], 95, 48.0),
        (list(range(101)), 99, 99.0),
    ],
)
def test_a_percentile_lies_between_the_two_closest_ranks(values: list[float], q: float, wanted: float) -> None:
    assert percentile(values, q) == pytest.approx(wanted)


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 100))
def test_percentiles_are_numpys_linear_ones(values: list[float], q: int) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), abs=1e-6)


def test_a_spread_of_nothing_is_none_and_does_not_count_as_zero() -> None:
    assert spread([]) is None
    assert spread([0.0, 100.0]) == Spread(50.0, 95.0, 99.0, 2)


def test_ratios_are_taken_round_by_round_before_their_median() -> None:
    found = ratio([10.0, 20.0, 90.0], [10.0, 10.0, 30.0])
    assert found is not None
    assert (found.median, found.low, found.high, found.rounds) == (2.0, 1.0, 3.0, 3)


def test_a_round_without_a_value_on_either_side_has_no_ratio() -> None:
    found = ratio([1.0, None, 3.0, 4.0], [2.0, 1.0, None, 0.0])
    assert found is not None
    assert (found.median, found.rounds) == (0.5, 1)
    assert ratio([None], [1.0]) is None


def test_the_lower_bound_of_nine_pairs_is_the_second_smallest_and_of_four_there_is_none() -> None:
    # (1 + 9) / 512 = 0.02 is below 5 %, (1 + 9 + 36) / 512 = 0.09 is not; 1 / 16 isn't, 1 / 32 is.
    assert lower_bound([9, 8, 7, 6, 5, 4, 3, 2, 1]) == 2
    assert lower_bound([1, 2, 3, 4]) is None
    assert lower_bound([5, 4, 3, 2, 1]) == 1
    assert lower_bound([]) is None
