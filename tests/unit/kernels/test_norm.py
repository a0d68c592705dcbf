"""RMS norm against float64, and against mlx where mlx's behaviour is what counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.compare import HALF_TOLERANCE, TOLERANCE, VIEWS, double, normal, row_error, same_bits

if TYPE_CHECKING:
    from types import ModuleType


def reference(x: mx.array, weight: mx.array | None, eps: float) -> np.ndarray[Any, Any]:
    wide = double(x)
    with np.errstate(invalid="ignore", over="ignore"):
        normed = wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
        return normed if weight is None else normed * double(weight)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), max_size=3),
    dim=st.integers(1, 700),
    weighted=st.booleans(),
    spread=st.sampled_from([1e-3, 1.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_is_near_float64(
    kernels: ModuleType, shape: list[int], dim: int, weighted: bool, spread: float, seed: int
) -> None:
    x = normal(seed, (*shape, dim), spread=spread)
    weight = normal(seed + 1, (dim,)) if weighted else None
    y = kernels.rms_norm(x, weight, 1e-5, stream=mx.cpu)
    assert row_error(y, reference(x, weight, 1e-5)) <= TOLERANCE


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("dim", [1, 13, 64, 577])
def test_half_types_are_rounded_once(kernels: ModuleType, dtype: mx.Dtype, dim: int) -> None:
    x, weight = normal(1, (7, dim), dtype), normal(2, (dim,), dtype)
    y = kernels.rms_norm(x, weight, 1e-6, stream=mx.cpu)
    assert y.dtype == dtype
    assert row_error(y, reference(x, weight, 1e-6)) <= HALF_TOLERANCE[dtype]


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dim", [5, 64, 67])
def test_nan_and_inf_spoil_their_row_alone(kernels: ModuleType, special: float, dim: int) -> None:
    values = double(normal(3, (3, dim)))
    values[1, -1] = special
    x = mx.array(values.astype(np.float32))
    assert row_error(kernels.rms_norm(x, None, 1e-5, stream=mx.cpu), reference(x, None, 1e-5)) <= TOLERANCE


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_where_they_lie(kernels: ModuleType, view: str) -> None:
    x = VIEWS[view](normal(4, (2, 6, 5, 40)))
    weight = normal(5, (2 * x.shape[-1],))[::2]
    y = kernels.rms_norm(x, weight, 1e-5, stream=mx.cpu)
    assert row_error(y, reference(x, weight, 1e-5)) <= TOLERANCE


def test_more_axes_than_kept_apart(kernels: ModuleType) -> None:
    x = normal(6, (2,) * 8 + (6,)).transpose(*reversed(range(8)), 8)
    assert row_error(kernels.rms_norm(x, None, 1e-5, stream=mx.cpu), reference(x, None, 1e-5)) <= TOLERANCE


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(kernels: ModuleType, dtype: mx.Dtype) -> None:
    x, weight = normal(7, (301, 579), dtype), normal(8, (579,), dtype)
    together = kernels.rms_norm(x, weight, 1e-5, stream=mx.cpu)
    for row in (0, 150, 300):
        assert same_bits(together[row : row + 1], kernels.rms_norm(x[row : row + 1], weight, 1e-5, stream=mx.cpu))


def test_the_input_is_left_alone(kernels: ModuleType) -> None:
    x = normal(9, (4, 64)) + 0
    before = double(x)
    y = kernels.rms_norm(x, None, 1e-5, stream=mx.cpu)
    mx.eval(y)
    np.testing.assert_array_equal(double(x), before)
    # one that nobody else holds may be overwritten
    chained = kernels.rms_norm(normal(9, (4, 64)) * 2, None, 0.0, stream=mx.cpu)
    assert row_error(chained, reference(mx.array((before * 2).astype(np.float32)), None, 0.0)) <= TOLERANCE


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (3, 0)])
def test_nothing_gives_nothing(kernels: ModuleType, shape: tuple[int, ...]) -> None:
    assert kernels.rms_norm(mx.zeros(shape), None, 1e-5, stream=mx.cpu).shape == shape


def test_a_weight_of_another_dtype_promotes_as_in_mlx(kernels: ModuleType) -> None:
    x, weight = normal(10, (3, 16), mx.float16), normal(11, (16,))
    y, expected = (f(x, weight, 1e-5, stream=mx.cpu) for f in (kernels.rms_norm, mx.fast.rms_norm))
    assert y.dtype == expected.dtype
    np.testing.assert_array_equal(double(y), double(expected))


@pytest.mark.parametrize(("x", "weight"), [((3, 8), (7,)), ((3, 8), (8, 1)), ((), None)])
def test_errors_are_those_of_mlx(kernels: ModuleType, x: tuple[int, ...], weight: tuple[int, ...] | None) -> None:
    scale = None if weight is None else mx.zeros(weight)
    with pytest.raises(ValueError) as expected:
        mx.fast.rms_norm(mx.zeros(x), scale, 1e-5, stream=mx.cpu)
    with pytest.raises(ValueError) as raised:
        kernels.rms_norm(mx.zeros(x), scale, 1e-5, stream=mx.cpu)
    assert str(raised.value) == str(expected.value)


def test_gradients_and_vmap_are_those_of_mlx(kernels: ModuleType) -> None:
    x, weight = normal(12, (3, 4, 16)), normal(13, (16,))

    def loss(function: Any) -> Any:
        return lambda x, w: (function(x, w, 1e-5, stream=mx.cpu) ** 2 * x).sum()

    for got, expected in zip(
        mx.grad(loss(kernels.rms_norm), (0, 1))(x, weight),
        mx.grad(loss(mx.fast.rms_norm), (0, 1))(x, weight),
        strict=True,
    ):
        assert mx.allclose(got, expected, rtol=1e-4, atol=1e-5)
    mapped = mx.vmap(lambda row: kernels.rms_norm(row, weight, 1e-5, stream=mx.cpu))(x)
    assert row_error(mapped, reference(x, weight, 1e-5)) <= TOLERANCE


def test_compiled_for_any_shape(kernels: ModuleType) -> None:
    compiled = mx.compile(lambda x: kernels.rms_norm(x * 2, None, 1e-5, stream=mx.cpu) + 1, shapeless=True)
    for rows in (1, 5):
        x = normal(rows, (rows, 24))
        assert row_error(compiled(x) - 1, reference(x * 2, None, 1e-5)) <= 1e-5 + 2**-22


def test_compiled_for_any_shape_with_a_weight_that_stays(kernels: ModuleType) -> None:
    compiled = mx.compile(lambda x, w: kernels.rms_norm(x, w, 1e-5, stream=mx.cpu), shapeless=True)
    weight = normal(1, (8,))
    assert row_error(compiled(normal(2, (3, 8)), weight), reference(normal(2, (3, 8)), weight, 1e-5)) <= TOLERANCE
    with pytest.raises(ValueError, match="no longer fit"):
        mx.eval(compiled(normal(2, (3, 16)), weight))


def test_an_input_that_lies_in_another_order_is_not_taken_over(kernels: ModuleType) -> None:
    # A sum that nobody holds, whose memory an operation may use again.
    x = normal(14, (2, 6, 5, 40))
    y = kernels.rms_norm((x + 1).transpose(0, 2, 1, 3), None, 1e-5, stream=mx.cpu)
    assert row_error(y, reference(mx.contiguous((x + 1).transpose(0, 2, 1, 3)), None, 1e-5)) <= TOLERANCE
