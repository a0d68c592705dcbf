"""Affine matrices of any checkpoint in mlx's terms: w = scale * (code - zero) becomes scale * code + bias.

The bias is -zero * scale. With scales of 16 bits both sides are exact in float32: a product has 11 + 8 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mlxinfer.convert.sources.base import Handling, Logical, PackedArrays, Packing
from mlxinfer.convert.sources.folder import Entry
from mlxinfer.formats.gguf.blocks import pack_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlxinfer.convert.sources.store import Stored

GROUP_SIZES = (128, 64, 32)
BITS = (2, 3, 4, 5, 6, 8)
"""Those of mlx's affine mode that the formats use."""


@dataclass(frozen=True, slots=True)
class Affine:
    """A matrix as its file means it, read in pieces when they are wanted."""

    codes: Callable[[], np.ndarray]
    """uint8 [rows, columns]."""
    factors: Callable[[], tuple[np.ndarray, np.ndarray]]
    """Scales and zeros, float32 [rows, groups of the file]."""
    words: Callable[[], np.ndarray] | None = None
    """The codes in mlx's own words, where the file holds them in that order."""


def mlx_group_size(columns: int, group_size: int) -> int | None:
    """The largest group of mlx that divides the file's, or None: a scale that is shared by more may be repeated."""
    return next((g for g in GROUP_SIZES if group_size % g == 0 and columns % g == 0), None)


def unpack_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [rows, n] to uint8 [rows, n * 32 / bits]: code i is the i-th run of `bits` bits, low first."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return raw
    mask = np.uint8((1 << bits) - 1)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return ((raw[..., None] >> shifts) & mask).reshape(len(raw), -1)
    # Eight codes fill `bits` bytes.
    runs = raw.reshape(len(raw), -1, bits)
    wide = np.zeros((*runs.shape[:2], 8), dtype=np.uint8)
    wide[..., :bits] = runs
    shifts = np.arange(8, dtype=np.uint64) * np.uint64(bits)
    codes = (wide.view("<u8") >> shifts).astype(np.uint8) & mask
    return codes.reshape(len(raw), -1)


def affine_entry(
    name: str,
    shape: tuple[int, int],
    parts: Sequence[Stored],
    matrix: Affine,
    *,
    bits: int,
    group_size: int,
    scale_dtype: str,
    why_not: str = "",
) -> Entry:
    """The entry of a matrix [rows, columns] whose groups of `group_size` columns share a scale.

    `why_not` is why the codes can't be kept, when the format rules it out; bits and groups that mlx lacks are found
    here.
    """
    rows, columns = shape
    group = mlx_group_size(columns, group_size)
    if not why_not and bits not in BITS:
        why_not = f"mlx has no {bits}-bit codes"
    if not why_not and group is None:
        why_not = f"groups of {group_size} in rows of {columns} are none of mlx's ({', '.join(map(str, GROUP_SIZES))})"

    def floats(part: int | None) -> np.ndarray:
        scales, zeros = matrix.factors()
        return dequantize(matrix.codes(), scales, zeros)

    def packed(part: int | None) -> PackedArrays:
        assert group is not None
        scales, zeros = matrix.factors()
        times = columns // group // scales.shape[1]
        # + 0: a zero of 0 would make the bias -0.
        biases = np.repeat(-zeros * scales + np.float32(0), times, axis=1)
        words = matrix.words() if matrix.words else pack_codes(matrix.codes(), bits)
        return PackedArrays(words, np.repeat(scales, times, axis=1), biases)

    packing = Packing(bits, group) if group is not None and not why_not else None
    handling: Handling = "exact"
    note = ""
    if packing is None:
        handling, note = "requantized", f"dequantized: {why_not}"
    elif scale_dtype not in ("F16", "BF16"):
        handling, note = "near", f"codes kept; {scale_dtype} scales, so products are rounded to float32"
    elif group != group_size:
        note = f"scales of {group_size} columns repeated for mlx's groups of {group}"
    logical = Logical(
        name, (rows, columns), "float32", sum(p.nbytes for p in parts), tuple(p.name for p in parts),
        packing, handling, note,
    )  # fmt: skip
    return Entry(logical, floats, packed if packing else None)


def dequantize(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    """scale * (code - zero) in float32, [rows, columns]."""
    rows, groups = scales.shape
    values = codes.reshape(rows, groups, -1).astype(np.float32)
    values -= zeros[..., None]
    values *= scales[..., None]
    return values.reshape(rows, -1)
