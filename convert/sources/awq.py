"""AWQ in AutoAWQ's "gemm" form.

qweight int32 [columns, rows / 8]: eight 4-bit codes of neighbouring rows in a word, in the order 0 2 4 6 1 3 5 7 from
the low bits. qzeros int32 [groups, rows / 8] the same; scales [groups, rows]. w = scale * (code - zero).
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
from mlxinfer.convert.sources.packing import Affine, affine_entry, unpack_codes
from mlxinfer.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mlxinfer.convert.sources.store import Store, Stored

BITS = 4
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word the code of row 0, 1, … 7 is."""


class AWQSource(FolderSource):
    """4 bits, with zeros or (without qzeros) symmetric about 8."""

    def __init__(self, folder: Path) -> None:
        settings = quantization_settings(folder)
        super().__init__("awq", folder, lambda store: lay_out(store, settings, folder))


def lay_out(store: Store, settings: Mapping[str, Any], folder: Path) -> Layout:
    """Modules by their qweight; everything else as it is."""
    where = f"{folder}: quantization_config"
    # AutoAWQ's own names are w_bit and q_group_size.
    integer(settings, "bits" if "bits" in settings else "w_bit", where, among=(BITS,), default=BITS)
    group_size = integer(settings, "group_size" if "group_size" in settings else "q_group_size", where, default=128)
    version = str(settings.get("version") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedModelError(f"{where}: version {version!r:.40} packs for another kernel; only gemm is read")
    layout = Layout()
    used: set[str] = set()
    for path, tensors in gather(store, ("qweight", "qzeros", "scales")).items():
        needed = ("qweight", "scales") if settings.get("zero_point") is False else ("qweight", "qzeros", "scales")
        require(tensors, needed, path)
        layout.entries.append(_module(store, path, tensors, group_size))
        used |= {stored.name for stored in tensors.values()}
    add_plain(layout, store, used)
    return layout


def _module(store: Store, path: str, tensors: Mapping[str, Stored], group_size: int) -> Entry:
    qweight, scales, qzeros = tensors["qweight"], tensors["scales"], tensors.get("qzeros")
    check_dtype(qweight, "I32", "U32")
    check_dtype(scales, "F16", "BF16", "F32")
    if len(qweight.shape) != 2 or 0 in qweight.shape:
        raise ModelFileError(f"{qweight.where} has shape {qweight.shape}; [columns, rows / 8] is expected")
    columns, rows = qweight.shape[0], qweight.shape[1] * 8
    size = columns if group_size == -1 else group_size
    if columns % size:
        raise ModelFileError(f"{qweight.where} has {columns} columns, no multiple of the group size {size}")
    groups = columns // size
    check_shape(scales, (groups, rows), f"for {rows} rows of {columns} columns in groups of {size}")
    if qzeros is not None:
        check_dtype(qzeros, "I32", "U32")
        check_shape(qzeros, (groups, rows // 8), f"for {groups} groups of {rows} rows")

    def codes() -> np.ndarray:
        return np.ascontiguousarray(_in_order(store.read(qweight.name)).T)

    def factors() -> tuple[np.ndarray, np.ndarray]:
        by_row = np.ascontiguousarray(read_scales(store, scales).T)
        if qzeros is None:
            return by_row, np.full_like(by_row, 8)
        return by_row, np.ascontiguousarray(_in_order(store.read(qzeros.name)).T.astype(np.float32))

    parts = [t for t in (qweight, qzeros, scales) if t is not None]
    return affine_entry(
        f"{path}.weight", (rows, columns), parts, Affine(codes, factors),
        bits=BITS, group_size=size, scale_dtype=scales.dtype,
    )  # fmt: skip


def _in_order(words: np.ndarray) -> np.ndarray:
    """int32 [n, m] to codes uint8 [n, 8m]."""
    codes = unpack_codes(words.view(np.uint32), BITS)
    return codes.reshape(len(codes), -1, 8)[:, :, PLACES].reshape(len(codes), -1)
