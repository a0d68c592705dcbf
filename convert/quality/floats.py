"""Scales of mxfp4 and nvfp4 blocks by search: the neighbours of the scale that mx.quantize takes.

A block's scale is a power of two (mxfp4) or an e4m3 number (nvfp4). The one by which the largest weight fits is
not always the one with the least squared error: a smaller one cuts that weight and is finer for the rest. mxfp8 would
gain nothing: its weights are floats with three bits after the point, as fine at any scale.
"""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from mlxinfer.convert.quality.words import pack

FloatMode = Literal["mxfp4", "nvfp4"]

BLOCK: dict[FloatMode, int] = {"mxfp4": 32, "nvfp4": 16}
BITS = 4

NEIGHBOURS: dict[FloatMode, tuple[int, ...]] = {"mxfp4": (-1, 1), "nvfp4": (-2, -1, 1, 2, 3, 4, 5)}
"""Added to the stored byte of the scale. Eight of nvfp4's are a factor of two, five bring the largest weight from the
code for 6 to that for 4."""


def search_float_rows(weight: mx.array, mode: FloatMode) -> tuple[mx.array, mx.array]:
    """[rows, columns] → words, scales (uint8). Lazy. No block has a larger squared error than mx.quantize gives it."""
    block = BLOCK[mode]
    rows, columns = weight.shape
    words, scales, *_ = mx.quantize(weight, block, BITS, mode)
    plain = mx.dequantize(words, scales, None, block, BITS, mode, dtype=mx.float32)
    groups = weight.reshape(-1, block).astype(mx.float32)
    smallest = _squares(groups - plain.reshape(groups.shape))
    words, scales = words.reshape(groups.shape[0], -1), scales.reshape(-1, 1)
    first = scales
    largest = 126 if mode == "nvfp4" else 254
    for offset in NEIGHBOURS[mode]:
        scale = mx.clip(first.astype(mx.int32) + offset, 0 if mode != "nvfp4" else 1, largest).astype(mx.uint8)
        factor = _factor(scale, mode)
        codes, values = _fp4(groups / factor)
        error = _squares(groups - values * factor)
        better = error < smallest
        smallest = mx.where(better, error, smallest)
        words = mx.where(better, pack(codes, BITS), words)
        scales = mx.where(better, scale, scales)
    return words.reshape(rows, columns * BITS // 32), scales.reshape(rows, -1)


def _factor(scale: mx.array, mode: FloatMode) -> mx.array:
    if mode == "nvfp4":
        return mx.from_fp8(scale, dtype=mx.float32)
    # e8m0: the exponent's bits of a float32; the byte 0 is 2**-127, which has none.
    return mx.maximum(scale.astype(mx.uint32) << 23, 1 << 22).view(mx.float32)


def _fp4(values: mx.array) -> tuple[mx.array, mx.array]:
    """The nearest e2m1 numbers, ties to even: codes uint8, values float32."""
    size = mx.minimum(mx.abs(values), 6.0)
    spacing = mx.where(size < 2, 0.5, mx.where(size < 4, 1.0, 2.0))
    nearest = mx.round(size / spacing) * spacing
    code = mx.where(nearest < 2, nearest * 2, mx.where(nearest < 4, nearest + 2, nearest / 2 + 4))
    negative = values < 0
    return (code + mx.where(negative, 8.0, 0.0)).astype(mx.uint8), mx.where(negative, -nearest, nearest)


def _squares(values: mx.array) -> mx.array:
    return (values * values).sum(axis=-1, keepdims=True)
