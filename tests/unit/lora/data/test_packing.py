"""Rows are full, hold every example once, and come in the same order for the same seed; batches say what is learnt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.data.order import epoch_order
from mlxinfer.lora.packing import bucket, pack, waste
from mlxinfer.lora.types import Example


def _log_normal(count: int, seed: int = 0) -> list[int]:
    """Lengths of median 180, 2048 at most."""
    drawn = np.random.default_rng(seed).normal(np.log(180), 0.9, count)
    return np.clip(np.exp(drawn), 2, 2048).astype(int).tolist()


def _example(ids: list[int], learnt: list[int], where: str = "rows.jsonl:1") -> Example:
    return Example(tuple(ids), tuple(map(bool, learnt)), where)


@given(st.lists(st.integers(1, 64), max_size=60), st.integers(1, 20), st.integers(0, 3))
def test_every_example_is_in_one_row_and_no_row_is_too_long(lengths: list[int], window: int, epoch: int) -> None:
    rows = pack(lengths, 64, seed=1, epoch=epoch, window=window)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 64 for row in rows)


@pytest.mark.parametrize("width", [2048, 4096])
@pytest.mark.parametrize("count", [2000, 20_000])
def test_one_percent_of_the_width_is_wasted_at_most_on_log_normal_lengths(width: int, count: int) -> None:
    lengths = _log_normal(count)
    assert waste(lengths, pack(lengths, width), width) <= 0.01


def test_two_thousand_log_normal_lengths_fill_the_least_number_of_rows() -> None:
    lengths = _log_normal(2000)
    assert len(pack(lengths, 2048)) == -(-sum(lengths) // 2048)


def test_waste_counts_padding() -> None:
    assert waste([3, 5], [[0], [1]], 8) == 0.5
    assert waste([], [], 8) == 0.0


def test_packing_depends_on_seed_and_epoch_and_nothing_else() -> None:
    lengths = _log_normal(500)
    assert pack(lengths, 2048, seed=3, epoch=1) == pack(lengths, 2048, seed=3, epoch=1)
    assert pack(lengths, 2048, seed=3, epoch=1) != pack(lengths, 2048, seed=3, epoch=2)
    assert pack(lengths, 2048, seed=3, epoch=1) != pack(lengths, 2048, seed=4, epoch=1)


def test_rows_of_long_and_short_examples_are_spread_over_the_epoch() -> None:
    lengths = _log_normal(8000)
    means = [np.mean([lengths[i] for i in row]) for row in pack(lengths, 2048)]
    tenths = [np.mean(part) for part in np.array_split(means, 10)]
    assert max(tenths) < 1.35 * min(tenths)


def test_an_example_wider_than_a_row_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match=r"2,000 tokens and a row 1,024"):
        pack([5, 2000], 1024)
    with pytest.raises(InvalidRequestError, match="width 0"):
        pack([], 0)


@given(st.lists(st.integers(1, 2048), max_size=80), st.integers(1, 7), st.integers(1, 5))
def test_buckets_hold_every_example_once_and_only_the_last_is_short(lengths: list[int], size: int, window: int) -> None:
    batches = bucket(lengths, size, seed=2, window=window)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) == size for batch in batches[:-1])


def test_buckets_have_similar_lengths_in_a_random_order() -> None:
    lengths = _log_normal(4096)
    batches = bucket(lengths, 8)
    padded = sum(max(lengths[i] for i in batch) * len(batch) for batch in batches)
    assert sum(lengths) / padded > 0.95
    unsorted = epoch_order(4096, 0, 0).reshape(-1, 8)
    assert sum(lengths) / sum(max(lengths[i] for i in batch) * 8 for batch in unsorted) < 0.6
    longest = [max(lengths[i] for i in batch) for batch in batches[:64]]
    assert longest != sorted(longest)
    assert batches != bucket(lengths, 8, epoch=1)
    with pytest.raises(InvalidRequestError, match="rows_per_batch 0"):
        bucket(lengths, 0)


def test_an_epochs_order_is_a_seeded_permutation() -> None:
    first = epoch_order(100, 7, 0)
    assert sorted(first.tolist()) == list(range(100))
    assert (first == epoch_order(100, 7, 0)).all()
    assert not (first == epoch_order(100, 7, 1)).all()
    assert not (first == epoch_order(100, 8, 0)).all()
    # The order a run resumes in must not change with a release: these are PCG64's.
    assert epoch_order(8, 0, 0).tolist() == [2, 4, 3, 6, 5, 0, 1, 7]
