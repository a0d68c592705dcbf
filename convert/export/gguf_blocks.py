"""Packed parameters of mlx as GGUF blocks of 32: which type takes one, how exactly, and its bytes.

mlx computes w = scale * q + bias, Q4_1 and Q5_1 compute w = d * q + m with d and m in float16: the codes carry over,
and a group of 64 or 128 becomes blocks that share both. Q8_0 computes w = d * (q - 128), so a bias must be a whole
number of scales for the codes to carry over; otherwise the weights are quantized anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize

from mlxinfer.convert.export.folder import narrowed, slices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlxinfer.convert.export.folder import MLXFolder, Parameter
    from mlxinfer.convert.export.packed import PackedRows
    from mlxinfer.convert.sources.base import Handling

BLOCK = 32
Q8_ZERO = 128
WHOLE = 1 / 16
"""How far, in scales, a bias may be from a whole number of them: less than requantizing moves the weights."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one parameter."""

    kind: Kind
    handling: Handling
    note: str = ""


def fate_of(folder: MLXFolder, parameter: Parameter) -> Fate:
    """For a packed one. Reads its scales where the answer depends on them."""
    packing = parameter.packing
    assert packing is not None
    if packing.mode == "mxfp4":
        return Fate(Kind.MXFP4, "exact", "codes kept")
    if packing.mode != "affine":
        return Fate(Kind.Q8_0, "requantized", f"{packing.mode} has no type of its own")
    if packing.bits <= 5:
        kind = Kind.Q4_1 if packing.bits <= 4 else Kind.Q5_1
        moved = 0.0 if parameter.dtype == "F16" else _moved(folder, parameter)
        return _kept(kind, moved)
    return _eight_bits(folder, parameter)


def _kept(kind: Kind, moved: float) -> Fate:
    if moved == 0:
        return Fate(kind, "exact", "codes kept")
    return Fate(kind, "near", f"codes kept; scales rounded to float16 by up to {moved:.1e} of the largest")


def _moved(folder: MLXFolder, parameter: Parameter) -> float:
    """By how much float16 moves the scales and biases: the largest change over the largest value."""
    change = largest = 0.0
    for pair in folder.factors(parameter):
        for values in pair:
            half = widened_half(values, parameter.name)
            change = max(change, float(np.abs(half - values).max()))
            largest = max(largest, float(np.abs(values).max()))
    return change / largest if change else 0.0


def widened_half(values: np.ndarray, name: str) -> np.ndarray:
    """float32 as float16 holds it. Raises UnsupportedModelError for what is beyond it."""
    return narrowed(values, "F16", f"the scales of {name}").astype(np.float32)


def _eight_bits(folder: MLXFolder, parameter: Parameter) -> Fate:
    """6 and 8 bits to Q8_0: with the codes where every group's zero is a code and shifted ones fit into 8 bits."""
    assert parameter.packing is not None
    top = 2**parameter.packing.bits - 1
    off = 0.0
    for scales, biases in folder.factors(parameter):
        zeros = zero_codes(scales, biases)
        if not ((zeros <= Q8_ZERO).all() and (top - zeros <= Q8_ZERO - 1).all()):
            return Fate(Kind.Q8_0, "requantized", "its codes don't fit into Q8_0's")
        with np.errstate(divide="ignore", invalid="ignore"):
            gap = np.where(scales == 0, np.where(biases == 0, 0, np.inf), np.abs(biases / scales + zeros))
        off = max(off, float(gap.max()))
        if off > WHOLE:
            return Fate(Kind.Q8_0, "requantized", "its biases are no whole numbers of scales")
    moved = 0.0 if parameter.dtype == "F16" else _moved(folder, parameter)
    if off:
        return Fate(Kind.Q8_0, "near", f"codes kept; biases rounded by up to {off:.1e} of a scale")
    return _kept(Kind.Q8_0, moved)


def zero_codes(scales: np.ndarray, biases: np.ndarray) -> np.ndarray:
    """The code that stands for zero in each group, whole; 128 where all codes mean the same."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(scales == 0, Q8_ZERO, np.clip(np.rint(-biases / scales), -1024, 1024))


def chunks_of(folder: MLXFolder, parameter: Parameter, fate: Fate, order: np.ndarray | None) -> Iterator[np.ndarray]:
    """The blocks of a packed parameter, row after row; `order` picks the rows of the whole in another order."""
    assert parameter.packing is not None
    if order is not None:
        yield _blocks_of_rows(folder, parameter, fate, 0, parameter.rows)[order]
        return
    for start, stop in slices(parameter.rows, parameter.columns):
        yield _blocks_of_rows(folder, parameter, fate, start, stop)


def _blocks_of_rows(folder: MLXFolder, parameter: Parameter, fate: Fate, start: int, stop: int) -> np.ndarray:
    """uint8 (rows, bytes of a row)."""
    if fate.handling == "requantized":
        return quantize(folder.float_rows(parameter, start, stop), fate.kind)
    packed = folder.packed_rows(parameter, start, stop)
    rows = packed.codes.shape[0]
    assert parameter.packing is not None
    per_block = parameter.packing.group_size // BLOCK
    return _WRITE[fate.kind](packed, per_block, parameter.name).reshape(rows, -1)


def _halves(values: np.ndarray, per_block: int, name: str) -> np.ndarray:
    """Scales (rows, groups) as float16 bytes, one pair for each block (blocks, 2)."""
    half = narrowed(np.repeat(values.reshape(-1, 1), per_block, axis=1), "F16", f"the scales of {name}")
    return half.reshape(-1, 1).view(np.uint8)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Codes (blocks, 32) below 16 as bytes (blocks, 16): elements 0 to 15 low, 16 to 31 high."""
    return codes[:, :16] | (codes[:, 16:] << 4)


def _q4_1(packed: PackedRows, per_block: int, name: str) -> np.ndarray:
    assert packed.biases is not None
    codes = packed.codes.reshape(-1, BLOCK)
    factors = [_halves(f, per_block, name) for f in (packed.scales, packed.biases)]
    return np.concatenate([*factors, _nibbles(codes)], axis=1)


def _q5_1(packed: PackedRows, per_block: int, name: str) -> np.ndarray:
    assert packed.biases is not None
    codes = packed.codes.reshape(-1, BLOCK)
    factors = [_halves(f, per_block, name) for f in (packed.scales, packed.biases)]
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little")
    return np.concatenate([*factors, fifth, _nibbles(codes & 15)], axis=1)


def _q8_0(packed: PackedRows, per_block: int, name: str) -> np.ndarray:
    assert packed.biases is not None
    zeros = zero_codes(packed.scales, packed.biases).reshape(-1, 1)
    groups = packed.codes.reshape(zeros.shape[0], -1).astype(np.int16) - zeros.astype(np.int16)
    codes = groups.astype(np.int8).view(np.uint8).reshape(-1, BLOCK)
    return np.concatenate([_halves(packed.scales, per_block, name), codes], axis=1)


def _mxfp4(packed: PackedRows, per_block: int, name: str) -> np.ndarray:
    del per_block, name  # its groups are blocks, and its scales are one byte on both sides
    return np.concatenate([packed.scales.reshape(-1, 1), _nibbles(packed.codes.reshape(-1, BLOCK))], axis=1)


_WRITE = {Kind.Q4_1: _q4_1, Kind.Q5_1: _q5_1, Kind.Q8_0: _q8_0, Kind.MXFP4: _mxfp4}
