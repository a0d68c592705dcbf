"""What a link does, measured with the collectives that a model uses."""

from __future__ import annotations

import statistics
import time
from typing import Any

import mlx.core as mx

SMALL = 512
"""Numbers of an array that takes no time on the wire, as one token's activations."""
LARGE = 1 << 20
TRIES = 200
LARGE_S = 1.0
"""Seconds for large arrays, at least two."""


def probe(group: Any) -> dict[str, float]:
    """One way latency in seconds and bytes a second between two ranks; both have to call it.

    A sum over two ranks is two messages, one after the other, of half of its bytes each.
    """
    small, large = mx.zeros(SMALL, mx.float32), mx.zeros(LARGE, mx.float32)
    mx.eval(small, large)
    for _ in range(20):
        _timed(small, group)
    times = [_timed(small, group) for _ in range(TRIES)]
    latency = statistics.median(times) / 2
    first = _timed(large, group)
    # Both ranks have to take as many turns.
    own = mx.array(float(max(1, min(20, int(LARGE_S / first)))))
    turns: Any = mx.distributed.all_sum(own, group=group).item()
    best = min([first, *(_timed(large, group) for _ in range(round(turns / 2)))])
    return {
        "latency_s": latency,
        "latency_worst_s": max(times) / 2,
        "bytes_per_s": large.nbytes / max(best - 2 * latency, 1e-9),
    }


def _timed(array: mx.array, group: Any) -> float:
    start = time.perf_counter()
    mx.eval(mx.distributed.all_sum(array, group=group))
    return time.perf_counter() - start
