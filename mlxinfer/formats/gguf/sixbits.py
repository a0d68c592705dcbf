"""Q6_K as mlx's 8-bit affine groups of 32: near, for Q6_K has a scale for every 16 elements.

A block of 256 has w = d * s_j * (q - 32) for sixteen signed 8-bit s_j. One scale has to serve two neighbours: it is an
integer fraction of the larger one, so that half of the elements stay exact and the other half is rounded to a
step that is a quarter or less of the larger neighbour's own.
"""

from __future__ import annotations

import numpy as np

LARGEST = 255
"""The largest 8-bit code."""
FRACTIONS = 3
"""Tried for each group."""


def q6_k(b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks (n, 210) to codes uint8 (8 n, 32), scales and biases float32 (8 n, 1)."""
    d = np.ascontiguousarray(b[:, 208:210]).view("<f2").astype(np.float32)
    q = _codes(b).reshape(-1, 2, 16)
    s = np.ascontiguousarray(b[:, 192:208]).view(np.int8).reshape(-1, 2).astype(np.float32)
    values = s[:, :, None] * q
    step = _steps(values, s)
    low = values.min(axis=(1, 2))
    # In units of the step the larger neighbour's values are whole numbers; so must be the bias, to keep them.
    zero = np.rint(low / step)
    codes = np.clip(np.rint(values / step[:, None, None]) - zero[:, None, None], 0, LARGEST)
    scales = (np.repeat(d, 8, axis=0).reshape(-1) * step)[:, None]
    return codes.astype(np.uint8).reshape(-1, 32), scales, scales * zero[:, None]


def _codes(b: np.ndarray) -> np.ndarray:
    """(n, 256) codes from -32 to 31: each half of a block has 64 bytes of low nibbles and 32 of pairs of high bits."""
    low = b[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)) & 3
    return (low | (high << 4)).astype(np.float32) - 32


def _steps(values: np.ndarray, s: np.ndarray) -> np.ndarray:
    """The distance between two codes (groups,), in units of d: the best of a few fractions of the larger s.

    values: (groups, 2, 16); s: (groups, 2).
    """
    size = np.abs(s)
    large = size.max(axis=1)
    smaller = np.abs(values[np.arange(len(s)), size.argmin(axis=1)])
    spread = values.max(axis=(1, 2)) - values.min(axis=(1, 2))
    # How often the larger scale may be cut, so that all codes still fit; one more code is lost to rounding.
    most = np.floor((LARGEST - 1) * large / np.maximum(spread, 1))
    best = np.ones(len(s), dtype=np.float32)
    least = np.full(len(s), np.inf, dtype=np.float32)
    for fewer in range(FRACTIONS):
        step = np.where(large > 0, large / np.maximum(most - fewer, 1), 1)
        in_steps = smaller / step[:, None]
        error = (np.abs(in_steps - np.rint(in_steps)) * step[:, None]).sum(axis=1)
        better = error < least
        best, least = np.where(better, step, best), np.where(better, error, least)
    return best
