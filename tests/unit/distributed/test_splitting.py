"""Layers over the stages of a pipeline, against every way there is."""

from __future__ import annotations

import itertools
import random

import pytest

from mlxinfer.distributed.splitting import split_layers


def every_way(cost: list[int], room: list[int], rate: list[float]) -> list[tuple[float, float]]:
    """(total seconds, slowest stage) of each split that fits."""
    found = []
    for cuts in itertools.combinations(range(1, len(cost)), len(room) - 1):
        edges = [0, *cuts, len(cost)]
        held = [sum(cost[a:b]) for a, b in itertools.pairwise(edges)]
        if all(need <= there for need, there in zip(held, room, strict=True)):
            times = [need / speed for need, speed in zip(held, rate, strict=True)]
            found.append((sum(times), max(times)))
    return found


@pytest.mark.parametrize("level", [False, True])
def test_no_split_is_better_than_the_one_found(level: bool) -> None:
    rng = random.Random(8)
    refused = 0
    for _ in range(300):
        cost = [rng.randint(1, 9) for _ in range(rng.randint(1, 9))]
        stages = rng.randint(1, 4)
        room = [rng.randint(1, 30) for _ in range(stages)]
        rate = [float(rng.randint(1, 4)) for _ in range(stages)]
        ways = every_way(cost, room, rate) if stages <= len(cost) else []
        split = split_layers(cost, room, rate, level=level)
        if not ways:
            refused += 1
            assert split is None
            continue
        assert split is not None
        assert sum(split) == len(cost)
        edges = list(itertools.accumulate(split, initial=0))
        times = [sum(cost[a:b]) / speed for (a, b), speed in zip(itertools.pairwise(edges), rate, strict=True)]
        least = min(way[level] for way in ways)
        assert (max(times) if level else sum(times)) == pytest.approx(least)
    assert 20 < refused < 250


def test_equal_nodes_share_equal_layers_evenly() -> None:
    assert split_layers([10] * 12, [1000] * 3, [1.0] * 3) == (4, 4, 4)


def test_the_faster_node_gets_what_fits_and_the_other_the_rest() -> None:
    assert split_layers([10] * 12, [80, 1000], [2.0, 1.0]) == (8, 4)
    assert split_layers([10] * 12, [1000, 1000], [2.0, 1.0], level=True) == (8, 4)
