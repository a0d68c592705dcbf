"""Percentiles, spreads and ratios, each defined in one place. Plain numbers in, plain numbers out."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 … 100) by linear interpolation between the two closest ranks.

    Of n sorted values it lies at rank (n - 1) * q / 100, counted from 0; numpy calls this "linear". At least one value.
    """
    assert values, "the percentile of nothing is not defined"
    assert 0 <= q <= 100
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of one quantity, in its own unit."""

    p50: float
    p95: float
    p99: float
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """p50, p95 and p99; None of nothing."""
    kept = list(values)
    if not kept:
        return None
    return Spread(percentile(kept, 50), percentile(kept, 95), percentile(kept, 99), len(kept))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours divided by theirs, taken in each round and then summed up."""

    median: float
    low: float
    high: float
    rounds: int
    bound95: float | None
    """With 95 % confidence the true median is at least this; None below five rounds."""


def ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Ratio | None:
    """The median of per-round ratios; a round in which either has no value, or theirs is 0, is left out."""
    found = [a / b for a, b in zip(ours, theirs, strict=True) if a is not None and b]
    if not found:
        return None
    return Ratio(statistics.median(found), min(found), max(found), len(found), lower_bound(found))


def lower_bound(values: Sequence[float], confidence: float = 0.95) -> float | None:
    """A one-sided lower bound of the median from the order of the values alone (the sign test, no distribution).

    The k-th smallest value, with the largest k for which a fair coin shows at most k - 1 heads in n throws with
    probability 1 - confidence or less. None when n is too small for any k.
    """
    n, tail, bound = len(values), 0.0, None
    for k, value in enumerate(sorted(values)):
        tail += math.comb(n, k) / 2**n
        if tail > 1 - confidence:
            return bound
        bound = value
    return bound
