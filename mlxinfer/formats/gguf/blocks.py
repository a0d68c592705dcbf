"""Tensor data to numpy arrays: block types whose codes mlx can hold keep them, everything becomes floats.

ggml computes w = d * (q - z) or w = d * q + m per block; mlx computes w = scale * q + bias per group. The codes are
kept and only their order in the words changes, so with float32 scales both give the same bits. A block holds its low
nibbles first (elements 0 to 15), then its high nibbles; mlx wants consecutive elements in consecutive bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from mlxinfer.errors import ModelFileError, UnsupportedModelError
from mlxinfer.formats.gguf.sixbits import q6_k

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.formats.gguf.reader import GGUFTensor

Split = tuple[np.ndarray, np.ndarray, "np.ndarray | None"]
"""Codes uint8 (groups, group size), scales (groups, 1): float32 in affine mode, else uint8, biases float32 or None."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How mlx holds a block type."""

    bits: int
    block_bytes: int
    split: Callable[[np.ndarray], Split]
    """Blocks (n, block_bytes) to codes, scales and biases."""
    group_size: int = 32
    mode: Literal["affine", "mxfp4", "nvfp4"] = "affine"
    exact: bool = True
    """With float32 scales every value is kept."""


def float_rows(tensor: GGUFTensor, raw: np.ndarray) -> np.ndarray:
    """Some rows of `tensor`, uint8 (rows, bytes), as float32 (rows, columns), by the `gguf` package's dequantizer."""
    # A corrupt scale may overflow or be NaN; that is the file's value, not worth a warning.
    with np.errstate(all="ignore"):
        if tensor.type == Kind.F64:
            return np.ascontiguousarray(raw).view("<f8").astype(np.float32)
        try:
            return np.ascontiguousarray(dequantize(raw, tensor.type), dtype=np.float32)
        except NotImplementedError:
            raise UnsupportedModelError(
                f"{tensor.path}: tensor {tensor.name} has type {tensor.type.name}, which cannot be dequantized"
            ) from None


def packed_rows(tensor: GGUFTensor, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Some rows of a `tensor` of a type in PACKED: uint32 words, scales and biases, each (rows, …).

    Raises ModelFileError for a scale that is no number.
    """
    layout = PACKED[tensor.type]
    with np.errstate(all="ignore"):
        codes, scales, biases = layout.split(raw.reshape(-1, layout.block_bytes))
    for factor in (scales, biases):
        if factor is not None and not (
            np.isfinite(factor).all() if layout.mode == "affine" else _sound(layout, factor)
        ):
            raise ModelFileError(
                f"{tensor.path}: tensor {tensor.name} has a block scale that is not finite; it is corrupt"
            )
    rows = raw.shape[0]
    words = pack_codes(codes.reshape(rows, -1), layout.bits)
    return words, scales.reshape(rows, -1), None if biases is None else biases.reshape(rows, -1)


def _sound(layout: Layout, scales: np.ndarray) -> bool:
    """No NaN among e8m0 (255) or e4m3 (127, and the sign that ggml's scales don't have)."""
    return bool((scales < (0xFF if layout.mode == "mxfp4" else 0x7F)).all())


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 codes (rows, columns) to mlx's uint32 words: element i takes the i-th run of `bits` bits, low first."""
    rows = codes.shape[0]
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    if bits == 2:
        quads = codes.reshape(rows, -1, 4) << np.arange(0, 8, 2, dtype=np.uint8)
        return np.bitwise_or.reduce(quads, axis=-1).view(np.uint32)
    if bits == 4:
        return np.ascontiguousarray(codes[:, 0::2] | (codes[:, 1::2] << 4)).view(np.uint32)
    # Eight codes fill exactly `bits` bytes: gather them in one 64-bit word and keep its low bytes.
    words = np.zeros((rows, codes.shape[1] // 8), dtype="<u8")
    for i in range(8):
        words |= codes[:, i::8].astype("<u8") << np.uint64(bits * i)
    return (
        np.ascontiguousarray(words.view(np.uint8).reshape(rows, -1, 8)[:, :, :bits]).reshape(rows, -1).view(np.uint32)
    )


def _half(raw: np.ndarray) -> np.ndarray:
    """Little-endian float16 bytes (n, 2) as float32 (n, 1)."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """(n, 16) bytes to (n, 32) codes."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _fifth_bits(raw: np.ndarray) -> np.ndarray:
    """(n, 4) bytes to (n, 32): bit i of the little-endian word, at the place of the fifth bit of a code."""
    return np.unpackbits(np.ascontiguousarray(raw), axis=-1, bitorder="little") << 4


def _q4_0(b: np.ndarray) -> Split:
    d = _half(b[:, :2])
    return _nibbles(b[:, 2:]), d, -8 * d


def _q4_1(b: np.ndarray) -> Split:
    return _nibbles(b[:, 4:]), _half(b[:, :2]), _half(b[:, 2:4])


def _q5_0(b: np.ndarray) -> Split:
    d = _half(b[:, :2])
    return _nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6]), d, -16 * d


def _q5_1(b: np.ndarray) -> Split:
    return _nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8]), _half(b[:, :2]), _half(b[:, 2:4])


def _q8_0(b: np.ndarray) -> Split:
    d = _half(b[:, :2])
    return b[:, 2:] ^ 0x80, d, -128 * d


def _sub_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, 12) bytes to 6-bit scales and 6-bit minima, each (n, 8); the last four have their top bits apart."""
    low, mid, high = b[:, 0:4], b[:, 4:8], b[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 0x30)], axis=-1)
    minima = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 0x30)], axis=-1)
    return scales, minima


def _k_split(b: np.ndarray, codes: np.ndarray) -> Split:
    """Super-blocks of 256 with a float16 d and dmin before `_sub_scales`: w = d * scale * q - dmin * minimum."""
    scales, minima = _sub_scales(b[:, 4:16])
    d, dmin = _half(b[:, :2]), _half(b[:, 2:4])
    return codes.reshape(-1, 32), (d * scales).reshape(-1, 1), (-dmin * minima).reshape(-1, 1)


def _k_nibbles(b: np.ndarray) -> np.ndarray:
    """(n, 128) bytes to (n, 8, 32): 32 bytes hold one sub-block in their low nibbles, the next in their high."""
    runs = b.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(b: np.ndarray) -> Split:
    return _k_split(b, _k_nibbles(b[:, 16:]))


def _q5_k(b: np.ndarray) -> Split:
    # Bit j of the 32 bytes after the scales is the fifth bit of sub-block j.
    fifth = (b[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    return _k_split(b, _k_nibbles(b[:, 48:]) | (fifth << 4))


# What the 16 codes of IQ4_NL and IQ4_XS stand for (ggml's kvalues_iq4nl), moved up by 128.
_IQ4 = (np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]) + 128).astype(np.uint8)


def _iq4_nl(b: np.ndarray) -> Split:
    d = _half(b[:, :2])
    return _IQ4[_nibbles(b[:, 2:])], d, -128 * d


def _iq4_xs(b: np.ndarray) -> Split:
    """d, then the top two bits of eight 6-bit scales, then their low four, then eight runs of nibbles."""
    high = (np.ascontiguousarray(b[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    scales = (_half(b[:, :2]) * ((low | (high << 4)).astype(np.float32) - 32)).reshape(-1, 1)
    return _IQ4[_nibbles(b[:, 8:].reshape(-1, 16))], scales, -128 * scales


def _ternary(kind: Kind, d_at: int) -> Callable[[np.ndarray], Split]:
    """Blocks of 256 values of -d, 0 or d."""

    def split(b: np.ndarray) -> Split:
        d = np.repeat(_half(b[:, d_at : d_at + 2]), 2, axis=0)
        signs = np.sign(dequantize(b, kind).reshape(-1, 128)) * np.sign(d)
        # A scale that isn't finite is left to the caller to refuse.
        return (np.nan_to_num(signs) + 1).astype(np.uint8), d, -d

    return split


def _mxfp4(b: np.ndarray) -> Split:
    return _nibbles(b[:, 1:]), b[:, :1], None


def _nvfp4(b: np.ndarray) -> Split:
    """Four e4m3 scales, then four runs of 8 bytes: low nibbles first in each."""
    runs = b[:, 4:].reshape(-1, 8)
    return np.concatenate([runs & 15, runs >> 4], axis=-1), np.ascontiguousarray(b[:, :4]).reshape(-1, 1), None


PACKED: dict[Kind, Layout] = {
    Kind.Q4_0: Layout(4, 18, _q4_0),
    Kind.Q4_1: Layout(4, 20, _q4_1),
    Kind.Q5_0: Layout(5, 22, _q5_0),
    Kind.Q5_1: Layout(5, 24, _q5_1),
    Kind.Q8_0: Layout(8, 34, _q8_0),
    Kind.Q4_K: Layout(4, 144, _q4_k),
    Kind.Q5_K: Layout(5, 176, _q5_k),
    Kind.Q6_K: Layout(8, 210, q6_k, exact=False),
    Kind.IQ4_NL: Layout(8, 18, _iq4_nl),
    Kind.IQ4_XS: Layout(8, 136, _iq4_xs),
    Kind.TQ1_0: Layout(2, 54, _ternary(Kind.TQ1_0, 52), group_size=128),
    Kind.TQ2_0: Layout(2, 66, _ternary(Kind.TQ2_0, 64), group_size=128),
    Kind.MXFP4: Layout(4, 17, _mxfp4, mode="mxfp4"),
    Kind.NVFP4: Layout(4, 36, _nvfp4, group_size=16, mode="nvfp4"),
}
"""The types whose codes mlx can hold."""
