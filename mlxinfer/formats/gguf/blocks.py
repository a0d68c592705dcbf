"""Tensor data to arrays: block types whose codes mlx can hold become affine groups of 32, the rest become floats.

ggml computes w = d * (q - z) or w = d * q + m per block; mlx computes w = scale * q + bias per group. The codes are
kept and only their order in the words changes, so with float32 scales both give the same bits. A block holds its low
nibbles first (elements 0 to 15), then its high nibbles; mlx wants consecutive elements in consecutive bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from mlxinfer.errors import ModelFileError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mlxinfer.formats.gguf.reader import GGUFTensor

GROUP_SIZE = 32
SLICE_ELEMENTS = 2**24
"""Elements dequantized at a time: 64 MiB of float32, so that a large matrix is never whole as floats."""


@dataclass(frozen=True, slots=True)
class Packed:
    """An affine-quantized matrix of mlx: uint32 words (rows, columns * bits / 32), scales and biases (rows, groups)."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bits: int


def read_tensor(tensor: GGUFTensor, dtype: mx.Dtype) -> Packed | mx.array:
    """Matrices of a type in PACKED as Packed, everything else as an array of `dtype`.

    Scales and biases get `dtype` too: float32 holds every one exactly; float16 does for Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0
    (short of overflow), whose own are float16, and rounds those of Q4_K and Q5_K; bfloat16 keeps 8 bits of each.
    """
    reading = read_in_slices(tensor, dtype)
    while True:
        try:
            next(reading)
        except StopIteration as done:
            return done.value


def read_in_slices(tensor: GGUFTensor, dtype: mx.Dtype) -> Generator[None, None, Packed | mx.array]:
    """`read_tensor` that yields between two slices of SLICE_ELEMENTS."""
    raw = tensor.read()
    step = max(1, SLICE_ELEMENTS // tensor.shape[-1])
    slices = [raw[start : start + step] for start in range(0, raw.shape[0], step)]
    if tensor.type in PACKED and len(tensor.shape) == 2:
        pieces: list[tuple[mx.array, mx.array, mx.array]] = []
        for rows in slices:
            pieces.append(_pack(tensor, rows, dtype))
            yield
        words, scales, biases = (_joined([piece[i] for piece in pieces]) for i in range(3))
        return Packed(words, scales, biases, PACKED[tensor.type][0])
    floats: list[mx.array] = []
    for rows in slices:
        floats.append(_floats(tensor, rows, dtype))
        yield
    return _joined(floats).reshape(tensor.shape)


def narrowed(value: Packed | mx.array) -> Packed | mx.array:
    """A matrix, or the scales and biases of a packed one, in half precision where that loses nothing."""
    if isinstance(value, Packed):
        scales, biases = _in_half([value.scales, value.biases])
        return Packed(value.weight, scales, biases, value.bits)
    return _in_half([value])[0] if value.ndim == 2 else value


def _in_half(arrays: list[mx.array]) -> list[mx.array]:
    for dtype in (mx.float16, mx.bfloat16):
        half = [a.astype(dtype) for a in arrays]
        if all(mx.array_equal(h.astype(a.dtype), a).item() for h, a in zip(half, arrays, strict=True)):
            return half
    return arrays


def _joined(pieces: list[mx.array]) -> mx.array:
    whole = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)
    mx.eval(whole)
    return whole


def _floats(tensor: GGUFTensor, raw: np.ndarray, dtype: mx.Dtype) -> mx.array:
    """Some rows of `tensor` by the `gguf` package's dequantizer."""
    try:
        # A corrupt scale may overflow or be NaN; that is the file's value, not worth a warning.
        with np.errstate(all="ignore"):
            values = np.ascontiguousarray(dequantize(raw, tensor.type), dtype=np.float32)
    except NotImplementedError:
        raise UnsupportedModelError(
            f"{tensor.path}: tensor {tensor.name} has type {tensor.type.name}, which cannot be dequantized"
        ) from None
    array = mx.array(values).astype(dtype)
    mx.eval(array)
    return array


def _pack(tensor: GGUFTensor, raw: np.ndarray, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Some rows of `tensor`: words, scales and biases."""
    bits, block_bytes, split = PACKED[tensor.type]
    with np.errstate(all="ignore"):
        codes, scales, biases = split(raw.reshape(-1, block_bytes))
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise ModelFileError(f"{tensor.path}: tensor {tensor.name} has a block scale that is not finite; it is corrupt")
    rows = raw.shape[0]
    words = mx.array(pack_codes(codes.reshape(rows, -1), bits))
    factors = [mx.array(f.reshape(rows, -1)).astype(dtype) for f in (scales, biases)]
    mx.eval(words, *factors)
    return words, factors[0], factors[1]


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 codes (rows, columns) to mlx's uint32 words: element i takes the i-th run of `bits` bits, low first."""
    rows = codes.shape[0]
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    if bits == 4:
        return np.ascontiguousarray(codes[:, 0::2] | (codes[:, 1::2] << 4)).view(np.uint32)
    # Eight codes fill exactly `bits` bytes: gather them in one 64-bit word and keep its low bytes.
    words = np.zeros((rows, codes.shape[1] // 8), dtype="<u8")
    for i in range(8):
        words |= codes[:, i::8].astype("<u8") << np.uint64(bits * i)
    return (
        np.ascontiguousarray(words.view(np.uint8).reshape(rows, -1, 8)[:, :, :bits]).reshape(rows, -1).view(np.uint32)
    )


Split = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Codes uint8 (groups, 32), scales and biases float32 (groups, 1)."""


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
    return codes.reshape(-1, GROUP_SIZE), (d * scales).reshape(-1, 1), (-dmin * minima).reshape(-1, 1)


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


PACKED: dict[Kind, tuple[int, int, Callable[[np.ndarray], Split]]] = {
    Kind.Q4_0: (4, 18, _q4_0),
    Kind.Q4_1: (4, 20, _q4_1),
    Kind.Q5_0: (5, 22, _q5_0),
    Kind.Q5_1: (5, 24, _q5_1),
    Kind.Q8_0: (8, 34, _q8_0),
    Kind.Q4_K: (4, 144, _q4_k),
    Kind.Q5_K: (5, 176, _q5_k),
}
"""Type: bits, bytes of a block, and how a block falls into codes, scales and biases."""
