"""mlx's packed rows taken apart: codes, or the floats they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.convert.sources.base import Packing

BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Some rows of a packed matrix."""

    codes: np.ndarray
    """uint8 (rows, columns)."""
    scales: np.ndarray
    """(rows, groups): float32 in affine mode, uint8 in the others."""
    biases: np.ndarray | None


def unpack_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """uint32 words (rows, columns * bits / 32) → uint8 codes (rows, columns); the low bits of a word come first."""
    rows = words.shape[0]
    raw = np.ascontiguousarray(words, "<u4").view(np.uint8)
    if bits == 8:
        return raw
    if bits in (2, 4):
        parts = [(raw >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
        return np.stack(parts, axis=-1).reshape(rows, -1)
    # Eight codes fill exactly `bits` bytes: widen those to a 64-bit word.
    wide = np.zeros((raw.size // bits, 8), np.uint8)
    wide[:, :bits] = raw.reshape(-1, bits)
    shifts = np.arange(8, dtype="<u8") * np.uint64(bits)
    codes = (wide.view("<u8") >> shifts) & np.uint64(2**bits - 1)
    return codes.astype(np.uint8).reshape(rows, -1)


def floats_of(words: np.ndarray, factors: Sequence[np.ndarray], packing: Packing) -> np.ndarray:
    """float32 (rows, columns). `factors` are the scales and, in affine mode, the biases, as float32."""
    scales, *biases = (mx.array(np.ascontiguousarray(f)) for f in factors)
    values = mx.dequantize(
        mx.array(np.ascontiguousarray(words)),
        scales,
        biases[0] if biases else None,
        group_size=packing.group_size,
        bits=packing.bits,
        mode=packing.mode,
        dtype=mx.float32,
    )
    return np.array(values)
