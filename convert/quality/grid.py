"""Weights that are multiples of a step already: dequantized checkpoints, ternary ones, those trained for it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

PROBED_GROUPS = 64
MOST_STEPS_APART = 5
"""In steps, the smallest gap between the weights of a group that is still found to be several steps."""


def look_on_grid(weight: mx.array, bits: int, group_size: int) -> bool:
    """Whether most of a few groups, taken evenly from [rows, columns], lie on a grid of 2**bits levels."""
    groups = weight.reshape(-1, group_size)
    stride = max(1, groups.shape[0] // PROBED_GROUPS)
    sample = groups[::stride][: 2 * PROBED_GROUPS].astype(mx.float32)
    return 2 * int(np.count_nonzero(_levels(sample, bits)[1])) > sample.shape[0]


def grids(groups: mx.array, bits: int) -> list[tuple[mx.array, mx.array]]:
    """(scale, bias) per group, [groups, 1], that may reproduce a group exactly.

    A step that a file stored in half precision is found as that; the bias makes the smallest weight the first code, or
    the middle code zero.
    """
    step, _ = _levels(groups, bits)
    lowest = groups.min(axis=-1, keepdims=True)
    found: list[tuple[mx.array, mx.array]] = []
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        scale = step.astype(dtype).astype(mx.float32)
        found.append((scale, -scale * 2 ** (bits - 1)))
        found.append((scale, lowest))
    return found


def _levels(groups: mx.array, bits: int) -> tuple[mx.array, mx.array]:
    """The step of each group's grid and the number of steps from its smallest to its largest weight, [groups, 1].

    Zero steps: no grid of 2**bits levels was found.
    """
    steps = 2**bits - 1
    ordered = mx.sort(groups, axis=-1)
    lowest, highest = ordered[:, :1], ordered[:, -1:]
    span = highest - lowest
    gaps = ordered[:, 1:] - ordered[:, :-1]
    # On a grid no two weights are nearer than a step; what is nearer is one weight, rounded.
    gap = mx.where(gaps > span / (2 * steps), gaps, mx.inf).min(axis=-1, keepdims=True)
    used = mx.zeros_like(span)
    for parts in range(MOST_STEPS_APART, 0, -1):
        count = mx.round(span / gap * parts)
        places = (groups - lowest) * (count / mx.where(span > 0, span, 1.0))
        fits = (mx.abs(places - mx.round(places)).max(axis=-1, keepdims=True) < 2e-3) & (count <= steps)
        used = mx.where(fits & mx.isfinite(span) & (span > 0), count, used)
    return span / mx.maximum(used, 1), used
