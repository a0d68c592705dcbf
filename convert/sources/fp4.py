"""4-bit floats (E2M1), two in a byte, the low half first: mxfp4 (E8M0 for 32 columns) and nvfp4 (E4M3 for 16).

nvfp4 has one more float32 scale for the whole matrix, for which mlx's quantized layers have no place. Where it is a
power of two it may go into the scales; else it can't: rounded to E4M3 again they would be off by 3 % and, below 2^-6,
by much more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mlxinfer.convert.sources.base import Logical, PackedArrays, Packing
from mlxinfer.convert.sources.folder import Entry, check_dtype, check_shape, finite_exponents, read_scales
from mlxinfer.convert.sources.minifloat import E2M1, E4M3, e8m0, nibbles
from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from mlxinfer.convert.sources.store import Store, Stored

MXFP4, NVFP4 = Packing(4, 32, "mxfp4"), Packing(4, 16, "nvfp4")


def _columns(packed: Stored, group_size: int) -> int:
    check_dtype(packed, "U8")
    columns = packed.shape[-1] * 2 if len(packed.shape) == 2 else 0
    if not columns or not packed.shape[0] or columns % group_size:
        raise ModelFileError(
            f"{packed.where} has shape {packed.shape}; rows of whole groups of {group_size} are expected"
        )
    return columns


def scaled(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """E2M1 codes [..., columns] times a scale [..., groups] for each group of columns, float32."""
    groups = scales.shape[-1]
    values = E2M1[codes].reshape(*codes.shape[:-1], groups, -1) * scales[..., None]
    return values.reshape(codes.shape)


def mxfp4_entry(store: Store, path: str, packed: Stored, scale: Stored) -> Entry:
    """Bytes uint8 [rows, columns / 2], E8M0 scales [rows, columns / 32]: mlx's own form."""
    columns = _columns(packed, 32)
    rows = packed.shape[0]
    check_dtype(scale, "U8", "F8_E8M0")
    check_shape(scale, (rows, columns // 32), f"for {rows} rows of {columns} columns in groups of 32")

    def read(part: int | None) -> PackedArrays:
        exponents = finite_exponents(store, scale)
        return PackedArrays(np.ascontiguousarray(store.read(packed.name)).view(np.uint32), exponents, None)

    def floats(part: int | None) -> np.ndarray:
        arrays = read(None)
        return scaled(nibbles(arrays.weight.view(np.uint8)), e8m0(arrays.scales))

    logical = Logical(
        f"{path}.weight", (rows, columns), "float32", packed.nbytes + scale.nbytes, (packed.name, scale.name), MXFP4
    )
    return Entry(logical, floats, read)


def nvfp4_entry(
    store: Store, path: str, packed: Stored, scale: Stored, whole: Stored, *, divided: bool = False
) -> Entry:
    """Bytes uint8 [rows, columns / 2], E4M3 scales [rows, columns / 16], one float32 that multiplies (or divides)."""
    columns = _columns(packed, 16)
    rows = packed.shape[0]
    check_dtype(scale, "F8_E4M3")
    check_shape(scale, (rows, columns // 16), f"for {rows} rows of {columns} columns in groups of 16")
    check_dtype(whole, "F32")
    if whole.shape not in ((), (1,)):
        raise ModelFileError(f"{whole.where} has shape {whole.shape}; one number is expected")
    number = float(read_scales(store, whole).reshape(()))
    if number <= 0:
        raise ModelFileError(f"{whole.where} is {number}; a positive number is expected")
    factor = np.float32(1) / np.float32(number) if divided else np.float32(number)
    exact = _folded(store, scale, factor) is not None

    def floats(part: int | None) -> np.ndarray:
        return scaled(nibbles(store.read(packed.name)), read_scales(store, scale) * factor)

    def read(part: int | None) -> PackedArrays:
        folded = _folded(store, scale, factor)
        if folded is None:
            raise ModelFileError(f"{scale.where} changed while it was read")
        return PackedArrays(np.ascontiguousarray(store.read(packed.name)).view(np.uint32), folded, None)

    note = "" if exact else f"dequantized: the scale {number:.6g} of the whole matrix doesn't go into E4M3 scales"
    logical = Logical(
        f"{path}.weight", (rows, columns), "float32", packed.nbytes + scale.nbytes + whole.nbytes,
        (packed.name, scale.name, whole.name), NVFP4 if exact else None, "exact" if exact else "requantized", note,
    )  # fmt: skip
    return Entry(logical, floats, read if exact else None)


def _folded(store: Store, scale: Stored, factor: np.float32) -> np.ndarray | None:
    """E4M3 codes of every scale times `factor`, or None where one has none. Scales are read only if it can be."""
    if np.frexp(factor)[0] != 0.5:
        return None
    wanted = read_scales(store, scale) * factor
    positive = E4M3[:0x7F]
    codes = np.searchsorted(positive, np.abs(wanted)).clip(max=len(positive) - 1).astype(np.uint8)
    if not np.array_equal(positive[codes], np.abs(wanted)):
        return None
    return codes | (np.signbit(wanted).astype(np.uint8) << 7)
