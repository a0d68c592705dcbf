"""silu(gate) * x and gelu(gate) * x against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.compare import HALF_TOLERANCE, TOLERANCE, VIEWS, double, normal, row_error, same_bits

if TYPE_CHECKING:
    from types import ModuleType

NAMES = ["silu_mul", "gelu_mul"]
MLX = {"silu_mul": nn.silu, "gelu_mul": nn.gelu_approx}


def reference(name: str, gate: mx.array, x: mx.array) -> np.ndarray[Any, Any]:
    g = double(gate)
    with np.errstate(over="ignore", invalid="ignore"):
        # (1 + tanh(u)) / 2 is the sigmoid of 2u, without its cancellation
        inner = g if name == "silu_mul" else 2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
        return g * (1 / (1 + np.exp(-inner))) * double(x)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    shape=st.lists(st.integers(1, 6), max_size=3),
    dim=st.integers(1, 400),
    spread=st.sampled_from([1e-3, 1.0, 30.0, 1e6]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_is_near_float64(
    kernels: ModuleType, name: str, shape: list[int], dim: int, spread: float, seed: int
) -> None:
    gate, x = normal(seed, (*shape, dim), spread=spread), normal(seed + 1, (*shape, dim))
    y = getattr(kernels, name)(gate, x, stream=mx.cpu)
    assert row_error(y, reference(name, gate, x)) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_each_element_is_near_float64(kernels: ModuleType, name: str) -> None:
    gate = mx.linspace(-80 if name == "silu_mul" else -8, 100, 100001)
    expected = reference(name, gate, mx.ones_like(gate))
    y = double(getattr(kernels, name)(gate, mx.ones_like(gate), stream=mx.cpu))
    # relative to the element itself; the cubic's rounding is multiplied by the exponent's size
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("dim", [1, 13, 576])
def test_half_types_are_rounded_once(kernels: ModuleType, name: str, dtype: mx.Dtype, dim: int) -> None:
    gate, x = normal(1, (5, dim), dtype, 3.0), normal(2, (5, dim), dtype)
    y = getattr(kernels, name)(gate, x, stream=mx.cpu)
    assert y.dtype == dtype
    assert row_error(y, reference(name, gate, x)) <= HALF_TOLERANCE[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_inf_come_out_as_the_formula_has_them(kernels: ModuleType, name: str) -> None:
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -200.0, 3e38, -3e38, 1e-40], dtype=np.float32)
    gate, x = (mx.array(a.ravel()) for a in np.meshgrid(special, special[:6]))
    y = getattr(kernels, name)(gate, x, stream=mx.cpu)
    # in float32, where the gate of -200 is 0: mlx's are the reference
    assert row_error(y, double(MLX[name](gate) * x)) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_where_they_lie(kernels: ModuleType, name: str, view: str) -> None:
    gate = VIEWS[view](normal(3, (2, 6, 5, 40)))
    x = normal(4, gate.shape)
    for a, b in ((gate, x), (x, gate), (gate, gate)):
        assert row_error(getattr(kernels, name)(a, b, stream=mx.cpu), reference(name, a, b)) <= TOLERANCE


def test_halves_of_one_projection(kernels: ModuleType) -> None:
    both = normal(5, (2, 3, 2 * 77))
    gate, x = mx.split(both, 2, axis=-1)
    assert row_error(kernels.silu_mul(gate, x, stream=mx.cpu), reference("silu_mul", gate, x)) <= TOLERANCE


def test_an_element_has_the_same_bits_in_any_batch(kernels: ModuleType) -> None:
    gate, x = normal(6, (97, 1531)), normal(7, (97, 1531))
    together = kernels.silu_mul(gate, x, stream=mx.cpu)
    for row in (0, 50, 96):
        alone = kernels.silu_mul(gate[row : row + 1], x[row : row + 1], stream=mx.cpu)
        assert same_bits(together[row : row + 1], alone)


def test_inputs_are_left_alone(kernels: ModuleType) -> None:
    gate, x = normal(8, (4, 64)) + 0, normal(9, (4, 64)) + 0
    before = double(gate), double(x)
    mx.eval(kernels.silu_mul(gate, x, stream=mx.cpu))
    np.testing.assert_array_equal(double(gate), before[0])
    np.testing.assert_array_equal(double(x), before[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("gate", "x"),
    [
        (mx.ones((2, 8)), mx.ones((8,))),
        (mx.ones((0, 8)), mx.ones((0, 8))),
        (mx.array(2.0), mx.array(3.0)),
        (mx.ones((2, 8), dtype=mx.float16), mx.ones((2, 8))),
    ],
    ids=["broadcast", "empty", "scalars", "mixed"],
)
def test_the_rest_is_left_to_mlx(kernels: ModuleType, name: str, gate: mx.array, x: mx.array) -> None:
    y, expected = getattr(kernels, name)(gate, x, stream=mx.cpu), MLX[name](gate) * x
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    assert mx.allclose(y, expected, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_and_vmap_are_those_of_mlx(kernels: ModuleType, name: str) -> None:
    gate, x = normal(10, (3, 16)), normal(11, (3, 16))
    ours = mx.grad(lambda g, x: (getattr(kernels, name)(g, x, stream=mx.cpu) ** 2).sum(), (0, 1))(gate, x)
    theirs = mx.grad(lambda g, x: ((MLX[name](g) * x) ** 2).sum(), (0, 1))(gate, x)
    for got, expected in zip(ours, theirs, strict=True):
        assert mx.allclose(got, expected, rtol=1e-4, atol=1e-5)
    mapped = mx.vmap(lambda g, x: getattr(kernels, name)(g, x, stream=mx.cpu))(gate, x)
    assert row_error(mapped, reference(name, gate, x)) <= TOLERANCE


def test_compiled_for_any_shape(kernels: ModuleType) -> None:
    compiled = mx.compile(lambda g, x: kernels.silu_mul(g, x, stream=mx.cpu), shapeless=True)
    for rows in (1, 5):
        gate, x = normal(rows, (rows, 24)), normal(rows + 1, (rows, 24))
        assert row_error(compiled(gate, x), reference("silu_mul", gate, x)) <= TOLERANCE
    with pytest.raises(ValueError, match="no longer fit"):
        mx.eval(compiled(mx.ones((5, 24)), mx.ones((1, 24))))
