"""Which rows share a padded forward."""

import itertools

import hypothesis.strategies as st
from hypothesis import given

from mlxinfer.engine.groups import COPIED, LEAST_FORWARD, forward_bytes, length_groups


def cost(lengths: list[int], groups: list[list[int]], forward: float) -> float:
    total = 0.0
    for rows in groups:
        longest = max(lengths[i] for i in rows) + 1
        total += forward + (longest if len(rows) == 1 else COPIED * len(rows) * longest)
    return total


def test_rows_of_one_length_stay_together_and_one_long_context_goes_alone():
    assert length_groups([2000] * 8, 10_000) == [list(range(8))]
    assert length_groups([100, 90, 30_000, 80, 95], 10_000) == [[2], [0, 1, 3, 4]]


def test_where_a_forward_costs_nothing_every_row_goes_alone_and_where_it_is_dear_none_does():
    assert len(length_groups([5, 500, 50], 0)) == 3
    assert length_groups([5, 500, 50], 1e9) == [[0, 1, 2]]


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=7), st.integers(0, 20_000))
def test_every_row_is_in_one_group_and_no_other_split_by_length_is_cheaper(lengths, forward):
    groups = length_groups(lengths, forward)
    assert sorted(itertools.chain(*groups)) == list(range(len(lengths)))
    ranked = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    best = cost(lengths, groups, forward)
    for cuts in itertools.product((False, True), repeat=len(ranked) - 1):
        other = [[ranked[0]]]
        for row, cut in zip(ranked[1:], cuts, strict=True):
            other.append([row]) if cut else other[-1].append(row)
        assert best <= cost(lengths, other, forward) + 1e-6


def test_a_forward_reads_all_dense_weights_and_some_of_many_experts_and_costs_something_at_least():
    giant = 2**30
    assert forward_bytes([((4096, 4096), giant), ((64, 128, 128), giant)]) == giant + giant // 8
    assert forward_bytes([((4, 128, 128), giant)]) == giant
    assert forward_bytes([((8, 8), 256)]) == LEAST_FORWARD
