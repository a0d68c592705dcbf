"""Learning rates by optimizer update: warmup, then constant, linear or cosine."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    update: int, *, peak: float, schedule: Schedule, total: int, warmup: int = 0, floor: float = 0.0
) -> float:
    """The rate of update `update` (from 0) of `total`.

    Warmup rises from peak / (warmup + 1) and the peak is reached at update `warmup`; a decay would reach `floor` at
    update `total`, so that the last update still learns.
    """
    if update < warmup:
        return peak * (update + 1) / (warmup + 1)
    if schedule == "constant":
        return peak
    done = min((update - warmup) / max(total - warmup, 1), 1.0)
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return floor + (peak - floor) * left
