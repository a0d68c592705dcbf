"""The quantizer that searches: from a matrix of floats to mlx's words, scales and biases.

`search` takes the same packing as mx.quantize and loses less: see quality/affine.py and quality/floats.py. It works on
some rows at a time and waits for them, so that a large matrix needs little beside itself and its result.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxinfer import runtime
from mlxinfer.convert.quality.affine import search_rows
from mlxinfer.convert.quality.floats import search_float_rows
from mlxinfer.convert.quality.grid import look_on_grid
from mlxinfer.convert.quantizing import min_max

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.convert.sources.base import Packing

Quantized = tuple[mx.array, mx.array, mx.array | None]
"""Words uint32 [..., rows, columns * bits / 32], scales [..., rows, columns / group_size], biases in affine mode."""

CPU_CHUNK = 1 << 18
"""Weights searched at a time on a CPU: what stays in its caches."""
GPU_CHUNK = 1 << 23
FEWEST_SEARCHED_BITS = 4
"""By `recommended`."""


def search(weight: mx.array, packing: Packing) -> Quantized:
    """mx.quantize with scales searched for: no group has a larger squared error. `weight`: [..., rows, columns].

    Scales and biases come in the weight's dtype, which the search takes into account. Affine weights that lie on a
    grid of so many bits keep their values, as exactly as that dtype holds the grid.
    """
    *leading, columns = weight.shape
    rows = weight.reshape(-1, columns)
    step = max(1, (CPU_CHUNK if runtime.on_cpu() else GPU_CHUNK) // columns)
    search_some = _searcher(rows, packing)
    pieces: list[tuple[mx.array, ...]] = []
    for start in range(0, rows.shape[0], step):
        piece = search_some(rows[start : start + step])
        mx.eval(piece)
        pieces.append(piece)
    joined = [mx.concatenate(list(part)).reshape(*leading, -1) for part in itertools.zip_longest(*pieces)]
    return joined[0], joined[1], joined[2] if len(joined) > 2 else None


def recommended(weight: mx.array, packing: Packing) -> Quantized:
    """What measured best in models: the search, but mx.quantize for affine weights of 2 and 3 bits off any grid.

    There the search has a quarter less squared error and still brought the models further from their sources
    (docs/quantization.md): it cuts the largest weights, and so few codes can't make up for them.
    """
    rows = weight.reshape(-1, weight.shape[-1])
    few = packing.mode == "affine" and packing.bits < FEWEST_SEARCHED_BITS
    if few and not look_on_grid(rows, packing.bits, packing.group_size):
        return min_max(weight, packing)
    return search(weight, packing)


def _searcher(rows: mx.array, packing: Packing) -> Callable[[mx.array], tuple[mx.array, ...]]:
    bits, group_size, mode = packing.bits, packing.group_size, packing.mode
    if mode == "mxfp8":
        return lambda some: tuple(mx.quantize(some, group_size, bits, mode))
    if mode != "affine":
        return lambda some: search_float_rows(some, mode)
    gridded = look_on_grid(rows, bits, group_size)
    return lambda some: search_rows(some, bits, group_size, look_for_grids=gridded)
