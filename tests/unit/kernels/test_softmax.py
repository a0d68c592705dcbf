"""logsumexp and softmax along the last axis against float64."""

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

SPAN = 8192  # of the kernel


def logsumexp(x: mx.array) -> np.ndarray[Any, Any]:
    wide = double(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.logaddexp.reduce(wide, axis=-1)


def softmax(x: mx.array) -> np.ndarray[Any, Any]:
    wide = double(x)
    with np.errstate(invalid="ignore"):
        exps = np.exp(wide - wide.max(axis=-1, keepdims=True))
        return exps / exps.sum(axis=-1, keepdims=True)


def check(kernels: ModuleType, x: mx.array) -> None:
    got = kernels.logsumexp(x, axis=-1, stream=mx.cpu)
    # an error of e^x's is one of the logarithm's at 1, however small the logarithm is
    expected = logsumexp(x)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(double(got)[~finite], expected[~finite])
    np.testing.assert_allclose(double(got)[finite], expected[finite], rtol=TOLERANCE / 2, atol=TOLERANCE / 2)
    assert row_error(kernels.softmax(x, axis=-1, stream=mx.cpu), softmax(x)) <= TOLERANCE


@settings(max_examples=50, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    dim=st.integers(1, 700),
    spread=st.sampled_from([1e-3, 1.0, 30.0, 1000.0]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_is_near_float64(kernels: ModuleType, shape: list[int], dim: int, spread: float, seed: int) -> None:
    check(kernels, normal(seed, (*shape, dim), spread=spread))


@pytest.mark.parametrize("dim", [SPAN - 1, SPAN, SPAN + 1, 49152, 262144])
@pytest.mark.parametrize("spread", [0.1, 10.0])
def test_long_rows_are_near_float64(kernels: ModuleType, dim: int, spread: float) -> None:
    check(kernels, normal(dim, (2, dim), spread=spread))


@pytest.mark.parametrize("dim", [3, 40, 2 * SPAN + 5])
@pytest.mark.parametrize("fill", [0.0, -np.inf, 1000.0, -1000.0])
@pytest.mark.parametrize(
    "special", [[], [np.inf], [-np.inf], [np.nan], [np.inf, np.nan], [-np.inf, np.nan], [np.inf, -np.inf]]
)
def test_nan_and_inf_come_out_as_the_formula_has_them(
    kernels: ModuleType, dim: int, fill: float, special: list[float]
) -> None:
    values = np.full((2, dim), fill, dtype=np.float32)
    values[0, [dim - 1, 0][: len(special)]] = special
    check(kernels, mx.array(values))


@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_where_they_lie(kernels: ModuleType, view: str) -> None:
    check(kernels, VIEWS[view](normal(1, (2, 6, 5, 40))))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("dim", [1, 13, 576, SPAN + 3])
def test_half_types_are_rounded_once(kernels: ModuleType, dtype: mx.Dtype, dim: int) -> None:
    x = normal(2, (5, dim), dtype, 3.0)
    largest, each = kernels.logsumexp(x, -1, stream=mx.cpu), kernels.softmax(x, -1, stream=mx.cpu)
    assert largest.dtype == each.dtype == dtype
    np.testing.assert_allclose(double(largest), logsumexp(x), rtol=HALF_TOLERANCE[dtype], atol=1e-5)
    assert row_error(each, softmax(x)) <= HALF_TOLERANCE[dtype]


@pytest.mark.parametrize("dim", [1000, 3 * SPAN + 17])
def test_a_row_has_the_same_bits_in_any_batch(kernels: ModuleType, dim: int) -> None:
    x = normal(3, (23, dim))
    for function in (kernels.logsumexp, kernels.softmax):
        together = function(x, -1, stream=mx.cpu)
        for row in (0, 11, 22):
            assert same_bits(together[row : row + 1], function(x[row : row + 1], -1, stream=mx.cpu))


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 4), None), ((5,), None), ((3, 4), 0), ((3, 4), 1), ((3, 4), [1]), ((3, 4), [0, 1]), ((3, 4), []), ((), None)],
)
def test_axes_are_those_of_mlx(kernels: ModuleType, shape: tuple[int, ...], axis: int | list[int] | None) -> None:
    x = normal(4, shape)
    for keepdims in (False, True):
        got, expected = (f(x, axis=axis, keepdims=keepdims, stream=mx.cpu) for f in (kernels.logsumexp, mx.logsumexp))
        assert got.shape == expected.shape
        assert mx.allclose(got, expected)
    assert mx.allclose(kernels.softmax(x, axis=axis, stream=mx.cpu), mx.softmax(x, axis=axis, stream=mx.cpu))


def test_integers_and_errors_are_those_of_mlx(kernels: ModuleType) -> None:
    for ours, theirs in ((kernels.logsumexp, mx.logsumexp), (kernels.softmax, mx.softmax)):
        integers = mx.arange(6).reshape(2, 3)
        assert ours(integers, -1, stream=mx.cpu).dtype == theirs(integers, -1, stream=mx.cpu).dtype
        with pytest.raises(IndexError) as expected:
            theirs(mx.zeros((2, 3)), 2, stream=mx.cpu)
        with pytest.raises(IndexError) as raised:
            ours(mx.zeros((2, 3)), 2, stream=mx.cpu)
        assert str(raised.value) == str(expected.value)


def test_the_input_is_left_alone(kernels: ModuleType) -> None:
    x = normal(5, (4, 64)) + 0
    before = double(x)
    mx.eval(kernels.softmax(x, -1, stream=mx.cpu))
    np.testing.assert_array_equal(double(x), before)


def test_gradients_and_vmap_are_those_of_mlx(kernels: ModuleType) -> None:
    x, weight = normal(6, (2, 3, 16)), normal(7, (2, 3, 16))

    def loss(module: Any) -> Any:
        return lambda x: (
            (module.softmax(x, -1, stream=mx.cpu) * weight).sum() + module.logsumexp(x, -1, stream=mx.cpu).sum()
        )

    assert mx.allclose(mx.grad(loss(kernels))(x), mx.grad(loss(mx))(x), rtol=1e-4, atol=1e-6)
    mapped = mx.vmap(lambda row: kernels.softmax(row, -1, stream=mx.cpu))(x)
    assert row_error(mapped, softmax(x)) <= TOLERANCE


def test_an_input_that_lies_in_another_order_is_not_taken_over(kernels: ModuleType) -> None:
    x = normal(20, (2, 6, 5, 40))
    y = kernels.softmax((x + 1).transpose(0, 2, 1, 3), axis=-1, stream=mx.cpu)
    wide = double(x + 1).transpose(0, 2, 1, 3)
    expected = np.exp(wide) / np.exp(wide).sum(-1, keepdims=True)
    assert row_error(y, expected) <= TOLERANCE
