"""What the kernel tests share: float64 references, errors by row, and views with odd strides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

TOLERANCE = 1e-5
"""Of the largest element of a row, in float32."""

HALF_TOLERANCE = {mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
"""One rounding of the largest element, and a little."""


def normal(seed: int, shape: tuple[int, ...], dtype: mx.Dtype = mx.float32, spread: float = 1.0) -> mx.array:
    values = np.random.default_rng(seed).standard_normal(shape) * spread
    return mx.array(values.astype(np.float32)).astype(dtype)


def double(a: mx.array) -> np.ndarray[Any, Any]:
    """The values of any float array, exactly."""
    return np.array(a.astype(mx.float32)).astype(np.float64)


def row_error(result: mx.array, reference: np.ndarray[Any, Any]) -> float:
    """The largest error, each row's over its largest magnitude. NaN and inf must be where the reference has them."""
    got = double(result)
    assert got.shape == reference.shape
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(got[~finite], reference[~finite])
    got, reference = np.where(finite, got, 0), np.where(finite, reference, 0)
    size = np.maximum(np.abs(reference).max(axis=-1, keepdims=True), 1e-30)
    return float((np.abs(got - reference) / size).max())


def same_bits(a: mx.array, b: mx.array) -> bool:
    words = {4: mx.uint32, 2: mx.uint16}[a.itemsize]
    return a.shape == b.shape and a.dtype == b.dtype and bool((a.view(words) == b.view(words)).all())


VIEWS: dict[str, Callable[[mx.array], mx.array]] = {
    "transposed": lambda a: a.transpose(0, 2, 1, 3),
    "half of each row": lambda a: a[..., : a.shape[-1] // 2],
    "odd rows": lambda a: a[:, 1::2],
    "every other element": lambda a: a[..., ::2],
    "backwards": lambda a: a[..., ::-1],
    "columns": lambda a: a.transpose(0, 1, 3, 2),
    "repeated": lambda a: mx.broadcast_to(a[:, :1], a.shape),
    "one element repeated": lambda a: mx.broadcast_to(a[..., :1], a.shape),
}
"""Views of a (2, 6, 5, 8n) array."""
