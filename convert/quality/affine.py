"""Scales and biases of affine groups by search: less squared error than the range of the group gives, at the same size.

mx.quantize lays the codes from the smallest to the largest weight and moves the range so that zero is met. Here a few
ranges are tried that end nearly half a step inside of that: at neither end, at both, at the one or the other. For the
codes of each the best scale and bias are the least-squares line through (code, weight). The best line is fitted once
more, rounded to what is stored, and taken where it beats mx.quantize. Weights that lie on a grid already can be found
out and keep their values.
"""

from __future__ import annotations

import mlx.core as mx

from mlxinfer.convert.quality.grid import grids
from mlxinfer.convert.quality.words import pack

Affine = tuple[mx.array, mx.array, mx.array]
"""Words, scales, biases."""
Line = tuple[mx.array, mx.array]
"""Scale and bias of every group, [groups, 1] in float32."""

STARTS = ((0.0, 0.0), (0.49, 0.49), (0.0, 0.49), (0.49, 0.0))
"""By how much the lowest and the highest weight stand outside the codes, in steps: less than half of one, so that they
still round to the outermost. The last two also shift the grid by a quarter of a step."""

ROUND = 12582912.0
"""1.5 * 2**23: adding it to a small float32 and taking it away again rounds, and on a CPU faster than mx.round."""


def search_rows(weight: mx.array, bits: int, group_size: int, *, look_for_grids: bool = False) -> Affine:
    """[rows, columns] → words, scales and biases, these in the weight's dtype. Lazy.

    No group has a larger squared error than mx.quantize gives it. A group that isn't finite is left as mx.quantize
    makes it.
    """
    rows, columns = weight.shape
    words, scales, biases = mx.quantize(weight, group_size, bits)
    plain = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), group_size, bits)
    groups = weight.reshape(-1, group_size).astype(mx.float32)
    smallest = _squares(groups - plain.reshape(groups.shape))
    words, scales, biases = (part.reshape(groups.shape[0], -1) for part in (words, scales, biases))
    for line in [_fitted(groups, bits), *(grids(groups, bits) if look_for_grids else ())]:
        scale, bias = (part.astype(weight.dtype) for part in line)
        slope, intercept = scale.astype(mx.float32), bias.astype(mx.float32)
        codes = _rounded(mx.clip((groups - intercept) * (1 / mx.where(slope == 0, 1.0, slope)), 0, 2**bits - 1))
        error = _squares(groups - (codes * slope + intercept))
        better = error < smallest
        smallest = mx.where(better, error, smallest)
        words = mx.where(better, pack(codes.astype(mx.uint8), bits), words)
        scales = mx.where(better, scale, scales)
        biases = mx.where(better, bias, biases)
    return words.reshape(rows, columns * bits // 32), scales.reshape(rows, -1), biases.reshape(rows, -1)


def _fitted(groups: mx.array, bits: int) -> Line:
    """The best of the lines that the starts lead to, fitted once more."""
    steps = 2**bits - 1
    half = 2 ** (bits - 1)
    lowest = groups.min(axis=-1, keepdims=True)
    step = (groups.max(axis=-1, keepdims=True) - lowest) / steps
    step = mx.where(step > 0, step, 1.0)
    # In steps and around zero, so that sums of squares keep their small differences.
    scaled = (groups - lowest) * (1 / step) - half
    total = scaled.sum(axis=-1, keepdims=True)
    fits = [_line(scaled, total, codes) for codes in _starts(scaled, bits)]
    error, slope, intercept = fits[0]
    for fit in fits[1:]:
        better = fit[0] < error
        error, slope, intercept = (mx.where(better, n, o) for n, o in zip(fit, (error, slope, intercept), strict=True))
    inverse = 1 / slope
    codes = _rounded(mx.clip(scaled * inverse - intercept * inverse, -half, steps - half))
    _, slope, intercept = _line(scaled, total, codes)
    return slope * step, lowest + (half + intercept - half * slope) * step


def _starts(scaled: mx.array, bits: int) -> list[mx.array]:
    """Codes around zero for each of STARTS. None needs clipping."""
    steps, half = 2**bits - 1, 2 ** (bits - 1)
    codes: list[mx.array] = []
    for left, right in STARTS:
        stretch = (steps + left + right) / steps
        codes.append(_rounded(scaled * stretch + (half * stretch - left - half)))
    return codes


def _line(scaled: mx.array, total: mx.array, codes: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The least-squares line through (code, weight) of every group: what its squared error leaves to compare, slope,
    intercept."""
    count = scaled.shape[-1]
    mean = codes.sum(axis=-1, keepdims=True) / count
    spread = _squares(codes) - count * mean * mean
    shared = (codes * scaled).sum(axis=-1, keepdims=True) - mean * total
    slope = mx.where(spread > 0, shared / mx.maximum(spread, 1e-6), 1.0)
    # The squared error is the variance of the weights, the same for every line, minus this.
    return -slope * shared, slope, total / count - slope * mean


def _rounded(values: mx.array) -> mx.array:
    return (values + ROUND) - ROUND


def _squares(values: mx.array) -> mx.array:
    return (values * values).sum(axis=-1, keepdims=True)
