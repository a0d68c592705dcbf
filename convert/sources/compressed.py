"""compressed-tensors (llm-compressor): packed and plain integers, 8-bit floats, nvfp4 and mxfp4.

pack-quantized: weight_packed int32 [rows, ceil(columns / n)] holds n = 32 // bits codes a word from the low bits, each
2^(bits - 1) more than its value; weight_zero_point int32 [ceil(rows / n), groups] the same along the rows; weight_shape
the true shape. int-quantized: weight and weight_zero_point int8. w = scale * (value - zero). Scales are [rows, groups],
[rows, 1] or one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mlxinfer.convert.sources.folder import (
    DROPPED,
    Entry,
    FolderSource,
    Layout,
    add_plain,
    check_dtype,
    check_shape,
    gather,
    quantization_settings,
    read_scales,
    require,
)
from mlxinfer.convert.sources.fp4 import mxfp4_entry, nvfp4_entry
from mlxinfer.convert.sources.fp8 import scaled_entry
from mlxinfer.convert.sources.packing import Affine, affine_entry, dequantize, unpack_codes
from mlxinfer.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mlxinfer.convert.sources.store import Store, Stored

FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "nvfp4-pack-quantized",
           "mxfp4-pack-quantized", "mixed-precision", "dense")  # fmt: skip
SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
            "weight_global_scale")  # fmt: skip


class CompressedSource(FolderSource):
    """Every module by the tensors it has; config.json's groups say how many bits a word is split into."""

    def __init__(self, folder: Path) -> None:
        settings = quantization_settings(folder)
        super().__init__("compressed-tensors", folder, lambda store: lay_out(store, settings, folder))


def lay_out(store: Store, settings: Mapping[str, Any], folder: Path) -> Layout:
    """Modules by their scales; everything else, ignored modules too, as it is."""
    where = f"{folder}: quantization_config"
    forms = [settings.get("format"), *(g["format"] for g in _groups(settings, where) if g.get("format") is not None)]
    for form in forms:
        if form not in FORMATS:
            raise UnsupportedModelError(f"{where}: format {form!r:.60} is not read; read are {', '.join(FORMATS)}")
    sparsity = settings.get("sparsity_config") or {}
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise UnsupportedModelError(f"{where}: sparse weights ({sparsity.get('format')!r:.60}) are not read")
    layout = Layout()
    used: set[str] = set()
    for path, tensors in gather(store, SUFFIXES).items():
        if tensors.keys() == {"weight"}:
            continue
        layout.entries.append(_module(store, path, tensors, settings, where))
        used |= {stored.name for stored in tensors.values()}
    add_plain(layout, store, used, drop=DROPPED)
    return layout


def _groups(settings: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    groups = settings.get("config_groups", {})
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise ModelFileError(f"{where}: config_groups must map names to objects")
    return list(groups.values())


def _weight_settings(settings: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    return [g["weights"] for g in _groups(settings, where) if isinstance(g.get("weights"), dict)]


def _module(store: Store, path: str, tensors: Mapping[str, Stored], settings: Mapping[str, Any], where: str) -> Entry:
    require(tensors, ("weight_scale", "weight_packed" if "weight_packed" in tensors else "weight"), path)
    packed = tensors.get("weight_packed")
    if packed is None:
        weight = tensors["weight"]
        if weight.dtype == "I8":
            return _integers(store, path, tensors)
        check_dtype(weight, "I8", "F8_E4M3")
        return scaled_entry(store, path, weight, tensors["weight_scale"])
    if packed.dtype == "U8":
        if "weight_global_scale" in tensors:
            return nvfp4_entry(
                store, path, packed, tensors["weight_scale"], tensors["weight_global_scale"], divided=True
            )
        return mxfp4_entry(store, path, packed, tensors["weight_scale"])
    require(tensors, ("weight_shape",), path)
    asymmetric = [w.get("symmetric") is False for w in _weight_settings(settings, where)]
    if asymmetric and all(asymmetric):
        require(tensors, ("weight_zero_point",), path)
    return _words(store, path, tensors, _weight_settings(settings, where))


def _words(store: Store, path: str, tensors: Mapping[str, Stored], weights: list[dict[str, Any]]) -> Entry:
    packed, scale, zero = tensors["weight_packed"], tensors["weight_scale"], tensors.get("weight_zero_point")
    check_dtype(packed, "I32", "U32")
    rows, columns = _true_shape(store, tensors["weight_shape"], packed)
    bits = _bits(packed, columns, weights)
    per_word = 32 // bits
    groups = _scale_groups(scale, rows, columns)
    zero_rows = rows if len(scale.shape) == 2 and scale.shape[0] == rows else 1
    if zero is not None:
        check_dtype(zero, "I32", "U32")
        check_shape(zero, (-(-zero_rows // per_word), groups), f"for {groups} groups of {zero_rows} rows, {bits} bits")
    order = _order(store, tensors.get("weight_g_idx"), columns, groups)

    def codes() -> np.ndarray:
        return _split(store.read(packed.name), bits)[:, :columns]

    def factors() -> tuple[np.ndarray, np.ndarray]:
        scales = _spread(read_scales(store, scale), rows, groups)
        if zero is None:
            return scales, np.full_like(scales, 1 << (bits - 1))
        zeros = _split(np.ascontiguousarray(store.read(zero.name).T), bits).T
        return scales, _spread(zeros[:zero_rows].astype(np.float32), rows, groups)

    reason = "" if order is None else "act-order: the columns of a group are not neighbours"
    entry = affine_entry(
        f"{path}.weight", (rows, columns), list(tensors.values()), Affine(codes, factors),
        bits=bits, group_size=columns // groups, scale_dtype=scale.dtype, why_not=reason,
    )  # fmt: skip
    if order is None:
        return entry

    def floats(part: int | None) -> np.ndarray:
        scales, zeros = factors()
        return dequantize(codes(), scales[:, order], zeros[:, order])

    return Entry(entry.logical, floats)


def _integers(store: Store, path: str, tensors: Mapping[str, Stored]) -> Entry:
    """int8 values as 8-bit codes, 128 more."""
    weight, scale, zero = tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero_point")
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise ModelFileError(f"{weight.where} has shape {weight.shape}; rows and columns are expected")
    rows, columns = weight.shape
    groups = _scale_groups(scale, rows, columns)
    if zero is not None:
        check_dtype(zero, "I8")
        check_shape(zero, scale.shape, "as its scales have")

    def codes() -> np.ndarray:
        return store.read(weight.name).view(np.uint8) ^ np.uint8(128)

    def factors() -> tuple[np.ndarray, np.ndarray]:
        scales = _spread(read_scales(store, scale), rows, groups)
        if zero is None:
            return scales, np.full_like(scales, 128)
        return scales, _spread(store.read(zero.name).astype(np.float32) + 128, rows, groups)

    return affine_entry(
        weight.name, (rows, columns), list(tensors.values()), Affine(codes, factors),
        bits=8, group_size=columns // groups, scale_dtype=scale.dtype,
    )  # fmt: skip


def _true_shape(store: Store, shape: Stored, packed: Stored) -> tuple[int, int]:
    check_dtype(shape, "I32", "I64")
    check_shape(shape, (2,), "for rows and columns")
    rows, columns = (int(n) for n in store.read(shape.name))
    fits = len(packed.shape) == 2 and packed.shape[0] == rows and rows > 0 and columns > 0
    if not fits:
        raise ModelFileError(f"{shape.where} is {(rows, columns)}, but {packed.name} has shape {packed.shape}")
    return rows, columns


def _bits(packed: Stored, columns: int, weights: list[dict[str, Any]]) -> int:
    """Those of the groups of config.json that fit the words of a row: 3 to 8 bits differ in codes per word."""
    said = {w.get("num_bits") for w in weights}
    fit = [n for n in sorted(s for s in said if type(s) is int and 0 < s <= 8)
           if -(-columns // (32 // n)) == packed.shape[1]]  # fmt: skip
    if len(fit) != 1:
        raise ModelFileError(
            f"{packed.where} has {packed.shape[1]} words for {columns} columns; config.json's num_bits "
            f"({', '.join(sorted(map(str, said))) or 'none'}) don't say how many bits a code has"
        )
    return fit[0]


def _scale_groups(scale: Stored, rows: int, columns: int) -> int:
    """Groups in a row. Raises ModelFileError for scales that fit no strategy."""
    check_dtype(scale, "F16", "BF16", "F32")
    if scale.shape in ((), (1,), (1, 1), (rows, 1), (rows,)):
        return 1
    if len(scale.shape) == 2 and scale.shape[0] == rows and scale.shape[1] and columns % scale.shape[1] == 0:
        return scale.shape[1]
    raise ModelFileError(f"{scale.where} has shape {scale.shape}, no groups of {rows} rows and {columns} columns")


def _spread(factors: np.ndarray, rows: int, groups: int) -> np.ndarray:
    """[rows, groups] of scales that may be one for all or one a row."""
    if factors.size == 1:
        return np.full((rows, groups), factors.reshape(()), dtype=np.float32)
    return np.ascontiguousarray(factors.reshape(rows, groups))


def _order(store: Store, g_idx: Stored | None, columns: int, groups: int) -> np.ndarray | None:
    """The group of each column, or None where groups are runs of columns; -1 everywhere says so too."""
    if g_idx is None:
        return None
    check_dtype(g_idx, "I32", "I64")
    check_shape(g_idx, (columns,), "for as many columns")
    order = store.read(g_idx.name).astype(np.int64)
    if (order == -1).all() or np.array_equal(order, np.arange(columns) // (columns // groups)):
        return None
    if not (order.min() >= 0 and order.max() < groups):
        raise ModelFileError(f"{g_idx.where} has {order.min()} to {order.max()}; 0 to {groups - 1} are its groups")
    return order


def _split(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [n, m] to codes uint8 [n, m * (32 // bits)]; bits left over at the top of a word are unused."""
    if 32 % bits == 0:
        return unpack_codes(words.view(np.uint32), bits)
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)
