"""Rows are full, hold every example once, and come in the same order for the same seed; batches say what is learnt."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.collate import collate
from mlxinfer.lora.data.order import Position, epoch_order, shard
from mlxinfer.lora.packing import bounded_widths, bucket, fitting_width, pack, waste
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


@given(st.integers(1, 5000), st.integers(1, 12), st.sampled_from([1, 32, 128]))
def test_widths_are_few_and_rise_to_the_limit(max_width: int, count: int, multiple: int) -> None:
    widths = bounded_widths(max_width, count=count, multiple=multiple)
    assert len(widths) <= count
    assert list(widths) == sorted(set(widths))
    assert widths[-1] == max_width
    assert all(width % multiple == 0 for width in widths[:-1])


def test_a_row_gets_the_smallest_width_that_holds_it() -> None:
    widths = bounded_widths(2048)
    assert [fitting_width(n, widths) for n in (1, widths[0], widths[0] + 1, 2048)] == [
        widths[0], widths[0], widths[1], 2048
    ]  # fmt: skip
    with pytest.raises(InvalidRequestError, match="widest shape, 2,048"):
        fitting_width(2049, widths)


def test_an_epochs_order_is_a_seeded_permutation() -> None:
    first = epoch_order(100, 7, 0)
    assert sorted(first.tolist()) == list(range(100))
    assert (first == epoch_order(100, 7, 0)).all()
    assert not (first == epoch_order(100, 7, 1)).all()
    assert not (first == epoch_order(100, 8, 0)).all()
    # The order a run resumes in must not change with a release: these are PCG64's.
    assert epoch_order(8, 0, 0).tolist() == [2, 4, 3, 6, 5, 0, 1, 7]
    assert Position() == (0, 0)


@given(st.integers(0, 50), st.integers(1, 9))
def test_shards_are_disjoint_complete_and_of_equal_size(count: int, size: int) -> None:
    shards = [shard(count, rank, size) for rank in range(size)]
    assert sorted(i for part in shards for i in part) == list(range(count))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_a_rank_outside_the_group_is_our_bug() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        shard(5, 2, 2)


def test_a_batch_shifts_targets_within_each_segment() -> None:
    rows = [[_example([5, 6, 7], [0, 0, 1]), _example([8, 9], [0, 1])], [_example([3, 4], [0, 0])]]
    batch = collate(rows, 6, pad_id=1)
    assert batch.inputs.tolist() == [[5, 6, 7, 8, 9, 1], [3, 4, 1, 1, 1, 1]]
    assert batch.targets.tolist() == [[6, 7, 1, 9, 1, 1], [4, 1, 1, 1, 1, 1]]
    assert batch.weights.tolist() == [[0, 1, 0, 1, 0, 0], [0] * 6]
    assert batch.segments.tolist() == [[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0]]
    assert (batch.num_examples, batch.num_tokens, batch.num_targets) == (3, 7, 2)
    dtypes = [a.dtype for a in (batch.inputs, batch.targets, batch.weights, batch.segments)]
    assert dtypes == [mx.int32, mx.int32, mx.float32, mx.int32]


@given(st.lists(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), max_size=3), min_size=1, max_size=3))
def test_no_padding_and_nothing_of_another_segment_is_ever_a_target(masks: list[list[list[bool]]]) -> None:
    token = iter(range(1, 1000))
    rows = [[_example([next(token) for _ in mask], [*map(int, mask)]) for mask in row] for row in masks]
    batch = collate(rows, 18)
    inputs, targets, weights, segments = (
        np.array(a) for a in (batch.inputs, batch.targets, batch.weights, batch.segments)
    )
    learnt = {int(t) for t in targets[weights > 0]}
    assert learnt == {
        t for row in rows for e in row for t, own in zip(e.token_ids[1:], e.supervised[1:], strict=True) if own
    }
    for r, c in np.argwhere(weights > 0):
        assert segments[r, c] == segments[r, c + 1] > 0
        assert targets[r, c] == inputs[r, c + 1]
    assert batch.num_tokens == (segments > 0).sum()
    assert batch.num_targets == weights.sum()


def test_empty_rows_keep_the_shape_of_a_smaller_batch() -> None:
    batch = collate([[_example([5, 6], [0, 1])]], 4, num_rows=3)
    assert batch.inputs.shape == (3, 4)
    assert batch.segments[1:].sum().item() == 0
    with pytest.raises(InvalidRequestError, match="2 rows do not fit a batch of 1"):
        collate([[], []], 4, num_rows=1)


def test_a_row_wider_than_the_batch_names_its_example() -> None:
    with pytest.raises(InvalidRequestError, match=r"rows.jsonl:9: up to here the row has 3 tokens; the width is 2"):
        collate([[_example([1, 2, 3], [0, 1, 1], "rows.jsonl:9")]], 2)
