"""gpt-oss: experts in MXFP4, [experts, rows, groups, 16] bytes of `*_blocks` and [experts, rows, groups] `*_scales`.

gate_up_proj has the rows of gate and up in turn. They are taken apart here, codes and biases alike, and named as
mlx-lm's layers are: its `sanitize` leaves tensors of those names alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mlxinfer.convert.sources.base import Logical, PackedArrays
from mlxinfer.convert.sources.folder import (
    FLOATS,
    Entry,
    FolderSource,
    Layout,
    add_plain,
    check_dtype,
    check_shape,
    finite_exponents,
    plain_entry,
)
from mlxinfer.convert.sources.fp4 import MXFP4, scaled
from mlxinfer.convert.sources.minifloat import e8m0, nibbles
from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlxinfer.convert.sources.store import Store, Stored

FUSED = "gate_up_proj"
HALVES = {"gate_proj": 0, "up_proj": 1}
"""Which rows of the fused matrix."""


class MXFP4Source(FolderSource):
    """quant_method mxfp4."""

    def __init__(self, folder: Path) -> None:
        super().__init__("mxfp4", folder, lay_out)


def lay_out(store: Store) -> Layout:
    """Modules by their blocks; the biases beside them; everything else as it is."""
    layout = Layout()
    used: set[str] = set()
    for name, stored in store.tensors.items():
        for suffix in ("_blocks", "_scales"):
            if name.endswith(suffix):
                path = name.removesuffix(suffix)
                pair = {s: t for s in ("_blocks", "_scales") if (t := store.tensors.get(path + s))}
                if len(pair) < 2:
                    other = "_scales" if suffix == "_blocks" else "_blocks"
                    raise ModelFileError(f"{stored.where} needs {path}{other}, which no file holds")
                used.add(name)
                if suffix == "_blocks":
                    layout.entries += _matrices(store, path, pair["_blocks"], pair["_scales"])
        if name.endswith("_proj_bias"):
            layout.entries += biases(store, stored)
            used.add(name)
    add_plain(layout, store, used)
    return layout


def layers_of(path: str) -> Iterator[tuple[str, slice]]:
    """(path of the layer, its rows) for each layer that a matrix of the file holds."""
    parent, _, last = path.rpartition(".")
    if last != FUSED:
        yield path, slice(None)
        return
    for name, first in HALVES.items():
        yield f"{parent}.{name}", slice(first, None, 2)


def _matrices(store: Store, path: str, blocks: Stored, scales: Stored) -> list[Entry]:
    check_dtype(blocks, "U8")
    check_dtype(scales, "U8", "F8_E8M0")
    if len(blocks.shape) != 4 or blocks.shape[-1] != 16 or 0 in blocks.shape:
        raise ModelFileError(f"{blocks.where} has shape {blocks.shape}; [experts, rows, groups, 16] is expected")
    check_shape(scales, blocks.shape[:-1], "as its blocks have")
    if path.endswith(f".{FUSED}") and blocks.shape[1] % 2:
        raise ModelFileError(f"{blocks.where} has {blocks.shape[1]} rows; gate and up need an even number")
    return [_matrix(store, name, rows, blocks, scales) for name, rows in layers_of(path)]


def _matrix(store: Store, path: str, rows: slice, blocks: Stored, scales: Stored) -> Entry:
    experts, all_rows, groups, _ = blocks.shape
    shape = (experts, len(range(all_rows)[rows]), groups * 32)

    def packed(part: int | None) -> PackedArrays:
        codes = store.read(blocks.name, part)
        codes = codes.reshape(*codes.shape[:-2], groups * 16)[..., rows, :]
        exponents = finite_exponents(store, scales, part)[..., rows, :]
        return PackedArrays(np.ascontiguousarray(codes).view(np.uint32), np.ascontiguousarray(exponents), None)

    def floats(part: int | None) -> np.ndarray:
        arrays = packed(part)
        return scaled(nibbles(arrays.weight.view(np.uint8)), e8m0(arrays.scales))

    nbytes = (blocks.nbytes + scales.nbytes) * shape[1] // all_rows
    note = "" if rows == slice(None) else f"every second row of {blocks.name}"
    logical = Logical(
        f"{path}.weight", shape, "float32", nbytes, (blocks.name, scales.name), MXFP4, "exact", note
    )  # fmt: skip
    return Entry(logical, floats, packed)


def biases(store: Store, stored: Stored) -> list[Entry]:
    """Those of experts, [experts, rows]: as `bias` of the layers."""
    path = stored.name.removesuffix("_bias")
    if len(stored.shape) != 2:
        raise ModelFileError(f"{stored.where} has shape {stored.shape}; [experts, rows] is expected")
    check_dtype(stored, *FLOATS)
    return [_bias(store, stored, f"{name}.bias", rows) for name, rows in layers_of(path)]


def _bias(store: Store, stored: Stored, name: str, rows: slice) -> Entry:
    whole = plain_entry(store, stored)
    shape = (stored.shape[0], len(range(stored.shape[1])[rows]))

    def floats(part: int | None) -> np.ndarray:
        return np.ascontiguousarray(whole.floats(part)[..., rows])

    return Entry(
        replace(whole.logical, name=name, shape=shape, nbytes=stored.nbytes * shape[1] // stored.shape[1]), floats
    )
