"""The small floats of the OCP specifications as float32: 8 bits (E4M3, E5M2), 4 bits (E2M1), and scales (E8M0)."""

from __future__ import annotations

import numpy as np


def _table(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Every code of a sign, an exponent and a mantissa, without infinities or NaN."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    size = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    return np.where(codes >> (exponent_bits + mantissa_bits), -size, size).astype(np.float32)


def _with_nan(table: np.ndarray, codes: list[int]) -> np.ndarray:
    table[codes] = np.nan
    return table


E2M1 = _table(2, 1, 1)
"""0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
E4M3 = _with_nan(_table(4, 3, 7), [0x7F, 0xFF])
"""Up to 448; no infinities."""
E5M2 = _with_nan(_table(5, 2, 15), [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF])
E5M2[[0x7C, 0xFC]] = np.inf, -np.inf


def e8m0(exponents: np.ndarray) -> np.ndarray:
    """Powers of two: 2^(e - 127), and NaN for 255."""
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    return np.where(exponents == 255, np.float32(np.nan), powers).astype(np.float32)


def powers_of_two(scales: np.ndarray) -> np.ndarray | None:
    """float32 scales as E8M0 exponents, or None when one isn't a normal power of two."""
    bits = np.ascontiguousarray(scales, dtype=np.float32).view(np.uint32)
    exponents = bits >> 23
    # The sign and the mantissa must be zero; 0 is a subnormal or zero, 255 infinite or NaN.
    if (bits & 0x807FFFFF).any() or (exponents == 0).any() or (exponents == 255).any():
        return None
    return exponents.astype(np.uint8)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """uint8 [..., n] to 4-bit codes [..., 2n], the low half of a byte first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
