"""What the tests of products share: weights in every format, and the numbers they stand for in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
AFFINE = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
MX = [("mxfp4", 4), ("mxfp8", 8)]
# How far a result is rounded, relative.
EPS = {mx.float32: 0.0, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


@dataclass(frozen=True, slots=True)
class Weights:
    """`arrays` are what mlx.quantize gives, `how` the keywords that go with them."""

    arrays: list[Any]  # of mx.array; so that they can be spread over mlx's positional parameters
    how: dict[str, Any]

    def float64(self) -> np.ndarray[Any, Any]:
        """Decoded here, not by mlx: it would round affine weights to the dtype of the scales."""
        if self.how["mode"] != "affine":
            exact = mx.dequantize(*self.arrays, **self.how, dtype=mx.float32)
            return np.array(exact).astype(np.float64)
        packed, bits = np.array(self.arrays[0]), self.how["bits"]
        stream = np.unpackbits(packed.view(np.uint8), axis=-1, bitorder="little")
        quants = stream.reshape(*packed.shape[:-1], -1, bits) @ (1 << np.arange(bits))
        scales, biases = (np.repeat(float64(a), self.how["group_size"], -1) for a in self.arrays[1:])
        return quants * scales + biases


def float64(a: mx.array) -> np.ndarray[Any, Any]:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def affine(w: mx.array, bits: int, group: int) -> Weights:
    how = {"bits": bits, "group_size": group, "mode": "affine"}
    return Weights(list(mx.quantize(w, **how)), how)


def micro(w: mx.array, mode: str, bits: int) -> Weights:
    how = {"bits": bits, "group_size": 32, "mode": mode}
    return Weights(list(mx.quantize(w, **how)), how)


@st.composite
def weights(draw: st.DrawFn, leading: tuple[int, ...] = ()) -> Weights:
    """A matrix, or `leading` of them, in any format; its values come from mx.random, which the caller seeds."""
    rows = draw(st.integers(1, 70))
    mx.random.seed(draw(st.integers(0, 99)))
    if draw(st.integers(0, 9)) < 8:
        bits, group = draw(st.sampled_from(AFFINE))
        shape = (*leading, rows, group * draw(st.integers(1, 6)))
        return affine(mx.random.normal(shape).astype(draw(st.sampled_from(DTYPES))), bits, group)
    mode, bits = draw(st.sampled_from(MX))
    return micro(mx.random.normal((*leading, rows, 32 * draw(st.integers(1, 24)))), mode, bits)


def assert_close(y: mx.array, x: np.ndarray[Any, Any], w: np.ndarray[Any, Any]) -> None:
    """y = x times the transpose of w, within 1e-5 of the sum of the products' magnitudes and y's own rounding."""
    reference, magnitude = x @ w.swapaxes(-1, -2), np.abs(x) @ np.abs(w).swapaxes(-1, -2)
    error = np.abs(float64(y) - reference)
    assert (error <= 1e-5 * magnitude + EPS[y.dtype] * np.abs(reference)).all(), (error / magnitude).max()
