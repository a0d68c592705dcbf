"""Folders of safetensors: floats as published, and models that mlx has quantized already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlxinfer.convert.sources import gpt_oss
from mlxinfer.convert.sources.base import Logical, PackedArrays, Packing
from mlxinfer.convert.sources.folder import (
    Entry,
    FolderSource,
    Layout,
    add_plain,
    check_dtype,
    gather,
    read_config,
    read_scales,
    require,
)
from mlxinfer.convert.sources.minifloat import E2M1, E4M3, e8m0, nibbles
from mlxinfer.convert.sources.packing import unpack_codes
from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.safetensors import TensorInfo, check_dtypes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mlxinfer.convert.sources.store import Store, Stored

PACKINGS = {Packing(bits, group) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64, 128)} | {
    Packing(4, 32, "mxfp4"),
    Packing(8, 32, "mxfp8"),
    Packing(4, 16, "nvfp4"),
}
"""All that mlx has."""


class SafetensorsSource(FolderSource):
    """bf16, fp16, fp32 or f64, and mlx's own quantized folders."""

    def __init__(self, folder: Path) -> None:
        super().__init__("safetensors", folder, lambda store: plain_or_packed(store, folder))


def plain_or_packed(store: Store, folder: Path) -> Layout:
    """Plain tensors, and packed ones where config.json has mlx's "quantization"."""
    check_dtypes({n: TensorInfo(n, t.dtype, t.shape, 0, t.nbytes) for n, t in store.tensors.items()}, str(folder))
    layout = Layout()
    config = read_config(folder)
    settings = config.get("quantization")
    used = gpt_oss.add_experts(layout, store, config) if config.get("model_type") == gpt_oss.MODEL_TYPE else set[str]()
    if isinstance(settings, dict):
        for path, tensors in gather(store, ("weight", "scales", "biases", "global_scale")).items():
            if "scales" in tensors:
                layout.entries.append(_packed_entry(store, path, tensors, settings, folder))
                used |= {stored.name for stored in tensors.values()}
    add_plain(layout, store, used, drop={})
    return layout


def _packing_of(path: str, settings: Mapping[str, Any], folder: Path) -> Packing:
    """What config.json says of one module: its own entry, else the default."""
    own = settings.get(path)
    chosen = own if isinstance(own, dict) else settings
    where = f"{folder / 'config.json'}: quantization of {path}"
    bits, group_size, mode = chosen.get("bits"), chosen.get("group_size"), chosen.get("mode", "affine")
    if not (type(bits) is int and type(group_size) is int and isinstance(mode, str)):
        raise ModelFileError(f"{where} needs bits and group_size as integers, and mode as text where it is there")
    packing = next((p for p in PACKINGS if (p.bits, p.group_size, p.mode) == (bits, group_size, mode)), None)
    if packing is None:
        raise UnsupportedModelError(
            f"{where} is {bits} bits in groups of {group_size}, mode {mode!r:.40}, which mlx doesn't have"
        )
    return packing


def _packed_entry(
    store: Store, path: str, tensors: Mapping[str, Stored], settings: Mapping[str, Any], folder: Path
) -> Entry:
    packing = _packing_of(path, settings, folder)
    affine = packing.mode == "affine"
    require(tensors, ("weight", "scales", "biases") if affine else ("weight", "scales"), path)
    weight, scales = tensors["weight"], tensors["scales"]
    if extra := tensors.get("global_scale"):
        raise UnsupportedModelError(f"{extra.where}: a scale for a whole quantized matrix is not read")
    check_dtype(weight, "U32")
    check_dtype(scales, *(("F16", "BF16", "F32") if affine else ("U8",)))
    shape = _shape_of(weight, scales, packing, path)
    biases = tensors["biases"] if affine else None
    if biases is not None and biases.shape != scales.shape:
        raise ModelFileError(f"{biases.where} has shape {biases.shape}, its scales {scales.shape}; they must agree")

    def packed(part: int | None) -> PackedArrays:
        factors = read_scales(store, scales, part) if affine else store.read(scales.name, part)
        offsets = read_scales(store, biases, part) if biases else None
        return PackedArrays(store.read(weight.name, part), factors, offsets)

    def floats(part: int | None) -> np.ndarray:
        return unpack(packed(part), packing)

    parts = [t for t in (weight, scales, biases) if t is not None]
    logical = Logical(
        weight.name, shape, "float32", sum(t.nbytes for t in parts), tuple(t.name for t in parts), packing, "exact",
        "quantized by mlx already",
    )  # fmt: skip
    return Entry(logical, floats, packed)


def _shape_of(weight: Stored, scales: Stored, packing: Packing, path: str) -> tuple[int, ...]:
    """Of the floats. Raises ModelFileError when words, scales and the packing don't agree."""
    if len(weight.shape) not in (2, 3) or weight.shape[:-1] != scales.shape[:-1]:
        raise ModelFileError(f"{weight.where} has shape {weight.shape}, its scales {scales.shape}; they must agree")
    columns = scales.shape[-1] * packing.group_size
    if columns * packing.bits != weight.shape[-1] * 32:
        raise ModelFileError(
            f"{weight.where} has {weight.shape[-1]} words a row for {columns} columns of {packing.bits} bits, "
            f"which config.json says {path} has"
        )
    return (*weight.shape[:-1], columns)


def unpack(packed: PackedArrays, packing: Packing) -> np.ndarray:
    """float32 of what mlx has packed, leading dimensions kept."""
    lead = packed.weight.shape[:-1]
    words = packed.weight.reshape(-1, packed.weight.shape[-1])
    if packing.mode == "affine":
        assert packed.biases is not None
        codes = unpack_codes(words, packing.bits)
        groups = packed.scales.shape[-1]
        values = codes.reshape(len(words), groups, -1).astype(np.float32)
        # A damaged scale may overflow; that is the file's value, not worth a warning.
        with np.errstate(all="ignore"):
            values *= packed.scales.reshape(-1, groups, 1)
            values += packed.biases.reshape(-1, groups, 1)
        return values.reshape(*lead, -1)
    raw = np.ascontiguousarray(words).view(np.uint8)
    values = E4M3[raw] if packing.mode == "mxfp8" else E2M1[nibbles(raw)]
    scales = E4M3[packed.scales] if packing.mode == "nvfp4" else e8m0(packed.scales)
    return dequantize_values(values, scales).reshape(*lead, -1)


def dequantize_values(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [rows, columns] times a scale for each group of columns."""
    rows = len(values)
    return (values.reshape(rows, -1, values.shape[-1] // scales.shape[-1]) * scales.reshape(rows, -1, 1)).reshape(
        rows, -1
    )
