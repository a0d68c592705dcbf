"""BitNet: -1, 0 and 1 times one scale for a matrix, four rows in a byte.

weight uint8 [rows / 4, columns]: the first quarter of the rows in the two low bits, then the next; a code is one more
than its value. The scale multiplies in layers of linear_class "autobitlinear" and divides in the others.
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
    gather,
    quantization_settings,
    read_scales,
    require,
)
from mlxinfer.convert.sources.packing import Affine, affine_entry
from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mlxinfer.convert.sources.store import Store, Stored


class BitNetSource(FolderSource):
    """quant_method bitnet."""

    def __init__(self, folder: Path) -> None:
        settings = quantization_settings(folder)
        super().__init__("bitnet", folder, lambda store: lay_out(store, settings))


def lay_out(store: Store, settings: Mapping[str, Any]) -> Layout:
    """Modules by their scale; everything else as it is."""
    divides = settings.get("linear_class", "") != "autobitlinear"
    layout = Layout()
    used: set[str] = set()
    for path, tensors in gather(store, ("weight", "weight_scale")).items():
        if tensors.keys() == {"weight"} and tensors["weight"].dtype != "U8":
            continue
        require(tensors, ("weight", "weight_scale"), path)
        layout.entries.append(_module(store, tensors["weight"], tensors["weight_scale"], divides=divides))
        used |= {stored.name for stored in tensors.values()}
    add_plain(layout, store, used)
    return layout


def _module(store: Store, weight: Stored, scale: Stored, *, divides: bool) -> Entry:
    check_dtype(weight, "U8")
    check_dtype(scale, "F32", "BF16", "F16")
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise ModelFileError(f"{weight.where} has shape {weight.shape}; [rows / 4, columns] is expected")
    if scale.shape not in ((), (1,)):
        raise ModelFileError(f"{scale.where} has shape {scale.shape}; one number is expected")
    rows, columns = weight.shape[0] * 4, weight.shape[1]

    def codes() -> np.ndarray:
        packed = store.read(weight.name)
        return np.concatenate([(packed >> shift) & 3 for shift in (0, 2, 4, 6)])

    def factors() -> tuple[np.ndarray, np.ndarray]:
        factor = read_scales(store, scale).reshape(())
        if divides and factor == 0:
            raise ModelFileError(f"{scale.where} is 0, by which nothing can be divided")
        scales = np.full((rows, 1), np.float32(1) / factor if divides else factor, dtype=np.float32)
        return scales, np.ones_like(scales)

    # Codes of two bits times any float32 scale: no product is rounded, whatever the scale's own type.
    return affine_entry(
        weight.name, (rows, columns), [weight, scale], Affine(codes, factors),
        bits=2, group_size=columns, scale_dtype="BF16",
    )  # fmt: skip
