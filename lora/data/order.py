"""In which order rows are seen: a seeded permutation each epoch, cut into shards; a position is (epoch, items done)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Position(NamedTuple):
    """Where a run stands: `done` items of `epoch`'s order. Enough, with the seed, to go on from there."""

    epoch: int = 0
    done: int = 0


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(count), int64, that depends on nothing but the arguments."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


def shard(count: int, rank: int, size: int) -> range:
    """Indices into an epoch's order that belong to `rank` of `size`; the shards are disjoint and together complete,
    and differ by one item at most."""
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} of {size}")
    return range(rank, count, size)
