"""GPTQ as AutoGPTQ and GPTQModel publish it.

qweight int32 [columns * bits / 32, rows] is a stream of codes along the columns, low bits first, 3-bit codes across the
borders of words: turned round it is mlx's own order. qzeros int32 [groups, rows * bits / 32] is the same along the rows
and, unless checkpoint_format is gptq_v2, one less than the zero. scales [groups, rows]; g_idx [columns] says which
group a column belongs to: with desc_act (act-order) in no order that mlx has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlxinfer.convert.sources.folder import (
    Entry,
    FolderSource,
    Layout,
    add_plain,
    check_dtype,
    check_shape,
    gather,
    integer,
    quantization_settings,
    read_scales,
    require,
)
from mlxinfer.convert.sources.packing import Affine, affine_entry, dequantize, unpack_codes
from mlxinfer.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mlxinfer.convert.sources.store import Store, Stored

BITS = (2, 3, 4, 8)
FORMATS = {"gptq": 1, "gptq_v2": 0}
"""What is added to a stored zero."""


class GPTQSource(FolderSource):
    """2, 3, 4 or 8 bits, symmetric or not, in groups of any size."""

    def __init__(self, folder: Path) -> None:
        settings = quantization_settings(folder)
        super().__init__("gptq", folder, lambda store: lay_out(store, settings, folder))


def lay_out(store: Store, settings: Mapping[str, Any], folder: Path) -> Layout:
    """Modules by their qweight; everything else as it is."""
    where = f"{folder}: quantization_config"
    bits = integer(settings, "bits", where, among=BITS)
    group_size = integer(settings, "group_size", where, default=-1)
    form = settings.get("checkpoint_format", "gptq")
    if not isinstance(form, str) or form not in FORMATS:
        raise UnsupportedModelError(f"{where}: checkpoint_format {form!r:.40} is not read; read are {list(FORMATS)}")
    layout = Layout()
    used: set[str] = set()
    for path, tensors in gather(store, ("qweight", "qzeros", "scales", "g_idx")).items():
        require(tensors, ("qweight", "qzeros", "scales"), path)
        layout.entries.append(_module(store, path, tensors, bits, group_size, FORMATS[form]))
        used |= {stored.name for stored in tensors.values()}
    add_plain(layout, store, used)
    return layout


def _module(store: Store, path: str, tensors: Mapping[str, Stored], bits: int, group_size: int, offset: int) -> Entry:
    qweight, qzeros, scales = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    check_dtype(qweight, "I32", "U32")
    check_dtype(qzeros, "I32", "U32")
    check_dtype(scales, "F16", "BF16", "F32")
    if len(qweight.shape) != 2 or qweight.shape[0] * 32 % bits or 0 in qweight.shape:
        raise ModelFileError(f"{qweight.where} has shape {qweight.shape}, no whole rows of {bits}-bit codes")
    columns, rows = qweight.shape[0] * 32 // bits, qweight.shape[1]
    size = columns if group_size == -1 else group_size
    groups = -(-columns // size)
    check_shape(scales, (groups, rows), f"for {rows} rows of {columns} columns in groups of {size}")
    check_shape(qzeros, (groups, -(-rows * bits // 32)), f"for {groups} groups of {rows} rows, {bits} bits")
    order = _order(store, tensors.get("g_idx"), columns, groups, size)

    def words() -> np.ndarray:
        return np.ascontiguousarray(store.read(qweight.name).view(np.uint32).T)

    def codes() -> np.ndarray:
        return unpack_codes(words(), bits)

    def factors() -> tuple[np.ndarray, np.ndarray]:
        zeros = unpack_codes(store.read(qzeros.name).view(np.uint32), bits)[:, :rows]
        # A zero of 0 was stored as -1 in `bits` bits.
        zeros = (zeros + np.uint8(offset)) & np.uint8((1 << bits) - 1)
        return np.ascontiguousarray(read_scales(store, scales).T), zeros.T.astype(np.float32)

    reason = ""
    if order is not None:
        reason = "act-order: the columns of a group are not neighbours"
    elif columns % size:
        reason = f"{columns} columns are no multiple of the group size {size}"
    parts = [t for t in (qweight, qzeros, scales, tensors.get("g_idx")) if t is not None]
    entry = affine_entry(
        f"{path}.weight", (rows, columns), parts, Affine(codes, factors, words),
        bits=bits, group_size=size, scale_dtype=scales.dtype, why_not=reason,
    )  # fmt: skip
    if not reason:
        return entry
    of_column = np.arange(columns) // size if order is None else order

    def floats(part: int | None) -> np.ndarray:
        by_group, zeros = factors()
        return dequantize(codes(), by_group[:, of_column], zeros[:, of_column])

    return Entry(entry.logical, floats)


def _order(store: Store, g_idx: Stored | None, columns: int, groups: int, size: int) -> np.ndarray | None:
    """The group of each column, or None where groups are runs of `size` columns."""
    if g_idx is None:
        return None
    check_dtype(g_idx, "I32", "I64")
    check_shape(g_idx, (columns,), "for as many columns")
    order = store.read(g_idx.name).astype(np.int64)
    if order.size and not (order.min() >= 0 and order.max() < groups):
        raise ModelFileError(f"{g_idx.where} has {order.min()} to {order.max()}; 0 to {groups - 1} are its groups")
    return None if np.array_equal(order, np.arange(columns) // size) else order
