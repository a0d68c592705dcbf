"""8-bit floats (E4M3) with scales: DeepSeek's blocks of 128 x 128, fbgemm's rows, one for a matrix.

w = value * scale. Powers of two as scales (ue8m0) make it mxfp8, in which mlx scales every 32 columns by one; any other
scale has no place there, so the matrix is dequantized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlxinfer.convert.sources.base import Logical, PackedArrays, Packing
from mlxinfer.convert.sources.folder import (
    Entry,
    FolderSource,
    Layout,
    add_plain,
    check_dtype,
    finite_exponents,
    gather,
    quantization_settings,
    read_scales,
    require,
)
from mlxinfer.convert.sources.minifloat import E4M3, powers_of_two
from mlxinfer.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mlxinfer.convert.sources.store import Store, Stored

MXFP8 = Packing(8, 32, "mxfp8")
SUFFIXES = ("weight", "weight_scale_inv", "weight_scale")


class Fp8Source(FolderSource):
    """quant_method fp8 and fbgemm_fp8."""

    def __init__(self, folder: Path) -> None:
        settings = quantization_settings(folder)
        super().__init__("fp8", folder, lambda store: lay_out(store, settings, folder))


def lay_out(store: Store, settings: Mapping[str, Any], folder: Path) -> Layout:
    """Modules by their scales; everything else as it is."""
    form = settings.get("fmt", "e4m3")
    if form not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModelError(f"{folder}: quantization_config: fmt {form!r:.40} is not read; only e4m3 is")
    block = _block(settings, folder)
    powers = settings.get("scale_fmt") == "ue8m0"
    layout = Layout()
    used: set[str] = set()
    for path, tensors in gather(store, SUFFIXES).items():
        if tensors.keys() == {"weight"} and tensors["weight"].dtype != "F8_E4M3":
            continue
        scale = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
        require(tensors, ("weight", scale), path)
        layout.entries.append(scaled_entry(store, path, tensors["weight"], tensors[scale], block, look=powers))
        used |= {tensors["weight"].name, tensors[scale].name}
    add_plain(layout, store, used)
    return layout


def _block(settings: Mapping[str, Any], folder: Path) -> tuple[int, int]:
    block = settings.get("weight_block_size") or (128, 128)
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        raise ModelFileError(f"{folder}: quantization_config: weight_block_size {block!r:.60} must be two counts")
    return block[0], block[1]


def scaled_entry(
    store: Store, path: str, weight: Stored, scale: Stored, block: tuple[int, int] = (128, 128), *, look: bool = False
) -> Entry:
    """A matrix of E4M3 [rows, columns] and its scales: [rows / b0, columns / b1], [rows, 1], [rows] or one.

    `look`: read the scales now, to see whether all are powers of two; scales of type F8_E8M0 are by themselves.
    """
    check_dtype(weight, "F8_E4M3")
    check_dtype(scale, "F32", "BF16", "F16", "F8_E8M0")
    if len(weight.shape) not in (2, 3) or 0 in weight.shape:
        raise ModelFileError(f"{weight.where} has shape {weight.shape}; rows and columns are expected")
    *lead, rows, columns = weight.shape
    high, wide = _scale_block(weight, scale, block)
    exact = scale.dtype == "F8_E8M0" or (look and powers_of_two(read_scales(store, scale)) is not None)
    of_experts = bool(lead) and len(scale.shape) == 3
    exact = exact and columns % 32 == 0 and wide % 32 == 0

    def read(part: int | None) -> np.ndarray:
        codes = store.read(weight.name, part)
        if ((codes & 0x7F) == 0x7F).any():
            raise ModelFileError(f"{weight.where} holds NaN; it is corrupt")
        return codes

    def spread(values: np.ndarray) -> np.ndarray:
        """Scales of blocks, perhaps of each expert, to one for each row: [..., rows, blocks in a row]."""
        blocks = values.reshape(*values.shape[: max(0, values.ndim - 2)], -(-rows // high), -(-columns // wide))
        return np.repeat(blocks, high, axis=-2)[..., :rows, :]

    def floats(part: int | None) -> np.ndarray:
        scales = spread(read_scales(store, scale, part if of_experts else None))
        return E4M3[read(part)] * np.repeat(scales, wide, axis=-1)[..., :columns]

    def packed(part: int | None) -> PackedArrays:
        exponents = _exponents(store, scale, part if of_experts else None)
        groups = np.repeat(spread(exponents), wide // 32, axis=-1)[..., : columns // 32]
        return PackedArrays(np.ascontiguousarray(read(part)).view(np.uint32), np.ascontiguousarray(groups), None)

    what = f"blocks of {high} x {wide}"
    note = f"8-bit floats, power-of-two scales in {what}" if exact else f"dequantized: {scale.dtype} scales in {what}"
    logical = Logical(
        weight.name, weight.shape, "float32", weight.nbytes + scale.nbytes, (weight.name, scale.name),
        MXFP8 if exact else None, "exact" if exact else "requantized", note,
    )  # fmt: skip
    return Entry(logical, floats, packed if exact else None)


def _exponents(store: Store, scale: Stored, part: int | None) -> np.ndarray:
    """Scales as E8M0. Raises ModelFileError when one is none, though all were when the file was opened."""
    if scale.dtype == "F8_E8M0":
        return finite_exponents(store, scale, part)
    exponents = powers_of_two(read_scales(store, scale, part))
    if exponents is None:
        raise ModelFileError(f"{scale.where} changed while it was read: no powers of two any more")
    return exponents


def _scale_block(weight: Stored, scale: Stored, block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    *lead, rows, columns = weight.shape
    if all(n == 1 for n in scale.shape):
        return rows, columns
    if scale.shape in ((rows,), (rows, 1), (*lead, rows, 1)):
        return 1, columns
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    if scale.shape == (*lead, *blocks):
        return block
    raise ModelFileError(
        f"{scale.where} has shape {scale.shape}; {(*lead, *blocks)} is expected for {weight.shape} in blocks of "
        f"{block[0]} x {block[1]}"
    )
