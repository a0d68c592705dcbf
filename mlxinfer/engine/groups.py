"""Which rows go through a padded forward together. Pure arithmetic.

Padding costs each row the longest one's keys, and a copy of them; another forward costs the weights once more. One
stream with a long context must not make the short ones read as much as it does.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

COPIED = 3
"""A padded key is read, written and read again; a row by itself reads its own keys once."""
LEAST_FORWARD = 256 * 2**20
"""Bytes that could be read in the time a forward takes at least, however small the model."""
EXPERTS_READ = 8
"""Of a layer's experts, as many are read in a forward, taking common models for all."""


def forward_bytes(shapes: Seq[tuple[tuple[int, ...], int]]) -> int:
    """What one forward reads, from (shape, bytes) of each weight; experts are stacked [experts, out, in]."""
    read = sum(
        size * min(shape[0], EXPERTS_READ) // shape[0] if len(shape) == 3 and shape[0] else size
        for shape, size in shapes
    )
    return max(read, LEAST_FORWARD)


def length_groups(lengths: Seq[int], forward_tokens: float) -> list[list[int]]:
    """Indices of rows in groups with the least to read in all; a forward costs as much as `forward_tokens` keys.

    Groups are neighbours by length: the cheapest split of a sorted list, found by dynamic programming.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    best = [0.0] + [float("inf")] * len(order)
    cut = [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        for start in range(end):
            size, longest = end - start, lengths[order[start]] + 1
            keys = longest if size == 1 else COPIED * size * longest
            if best[start] + forward_tokens + keys < best[end]:
                best[end], cut[end] = best[start] + forward_tokens + keys, start
    ends = [len(order)]
    while ends[-1]:
        ends.append(cut[ends[-1]])
    return [sorted(order[start:end]) for start, end in pairwise(reversed(ends))]
