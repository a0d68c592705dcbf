"""Rotary positions against float64, and against mlx at small positions."""

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


def reference(
    x: mx.array,
    dims: int,
    *,
    traditional: bool = False,
    base: float | None = 10000.0,
    scale: float = 1.0,
    offset: int | mx.array = 0,
    freqs: mx.array | None = None,
) -> np.ndarray[Any, Any]:
    wide = double(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        # options are float32 where mlx has them so
        inverse = (
            1 / double(freqs) if freqs is not None else float(np.float32(base or 0)) ** (-np.arange(0, dims, 2) / dims)
        )
        first = np.array(offset, dtype=np.int64).reshape(-1, *[1] * (x.ndim - 1))
        places = first + np.arange(x.shape[-2], dtype=np.int64)[:, None]
        angles = places * float(np.float32(scale)) * inverse
        cosine, sine = np.cos(angles), np.sin(angles)
        out = wide.copy()
        left, right = (np.s_[..., 0:dims:2], np.s_[..., 1:dims:2])
        if not traditional:
            left, right = np.s_[..., : dims // 2], np.s_[..., dims // 2 : dims]
        out[left] = wide[left] * cosine - wide[right] * sine
        out[right] = wide[left] * sine + wide[right] * cosine
    return out


DEFAULTS: dict[str, Any] = {"traditional": False, "base": 10000.0, "scale": 1.0, "offset": 0}


def rope(function: Any, x: mx.array, dims: int, **options: Any) -> mx.array:
    return function(x, dims, **(DEFAULTS | options), stream=mx.cpu)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.lists(st.integers(1, 4), max_size=3),
    batch=st.integers(1, 3),
    length=st.integers(1, 6),
    half=st.integers(1, 40),
    rest=st.integers(0, 9),
    traditional=st.booleans(),
    base=st.sampled_from([10000.0, 1e6, 500.5]),
    scale=st.sampled_from([1.0, 0.25, 1.7, -1.0, -1e-20]),
    offset=st.one_of(st.integers(-100, 131072), st.just("each")),
    seed=st.integers(0, 2**31),
)
def test_any_shape_is_near_float64(
    kernels: ModuleType,
    heads: list[int],
    batch: int,
    length: int,
    half: int,
    rest: int,
    traditional: bool,
    base: float,
    scale: float,
    offset: int | str,
    seed: int,
) -> None:
    x = normal(seed, (batch, *heads, length, 2 * half + rest))
    place = offset if isinstance(offset, int) else mx.array(np.random.default_rng(seed).integers(0, 131072, batch))
    options = {"traditional": traditional, "base": base, "scale": scale, "offset": place}
    assert row_error(rope(kernels.rope, x, 2 * half, **options), reference(x, 2 * half, **options)) <= TOLERANCE


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("offset", [0, 5, mx.array(5), mx.array([5]), mx.array([0, 9])])
@pytest.mark.parametrize("dims", [2, 30, 64])
def test_small_positions_agree_with_mlx(
    kernels: ModuleType, traditional: bool, offset: int | mx.array, dims: int
) -> None:
    x = normal(1, (2, 3, 4, 64))
    ours, theirs = (rope(f, x, dims, traditional=traditional, offset=offset) for f in (kernels.rope, mx.fast.rope))
    assert row_error(ours, double(theirs)) <= TOLERANCE


@pytest.mark.parametrize("dtype", [mx.int64, mx.int16, mx.uint8, mx.uint32])
def test_offsets_of_any_integer_type(kernels: ModuleType, dtype: mx.Dtype) -> None:
    x = normal(2, (3, 2, 1, 16))
    offset = mx.array([1, 7, 100])
    ours = rope(kernels.rope, x, 16, offset=offset.astype(dtype))
    assert row_error(ours, reference(x, 16, offset=offset)) <= 2 * TOLERANCE


def test_offsets_in_a_view(kernels: ModuleType) -> None:
    x = normal(2, (3, 2, 1, 16))
    offset = mx.array([1, 0, 7, 0, 131071, 0])[::2]
    assert row_error(rope(kernels.rope, x, 16, offset=offset), reference(x, 16, offset=offset)) <= TOLERANCE


@pytest.mark.parametrize("traditional", [False, True])
def test_custom_frequencies(kernels: ModuleType, traditional: bool) -> None:
    x = normal(3, (2, 3, 5, 26))
    freqs = mx.array(np.geomspace(0.3, 1e5, 24).astype(np.float32))[::2]
    options = {"base": None, "freqs": freqs, "offset": 4000, "scale": 0.5, "traditional": traditional}
    assert row_error(rope(kernels.rope, x, 24, **options), reference(x, 24, **options)) <= TOLERANCE


@pytest.mark.parametrize("special", [np.inf, np.nan, 0.0])
def test_frequencies_that_are_not_finite(kernels: ModuleType, special: float) -> None:
    x = normal(4, (1, 2, 3, 16))
    freqs = mx.array([1.0, 2.0, special, 4.0, 5.0, 6.0, 7.0, 8.0])
    options = {"base": None, "freqs": freqs}
    expected = reference(x, 16, **options)
    assert np.isnan(expected).any() == (special != np.inf)
    assert row_error(rope(kernels.rope, x, 16, **options), expected) <= TOLERANCE


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("traditional", [False, True])
def test_nan_and_inf_come_out_as_the_formula_has_them(kernels: ModuleType, special: float, traditional: bool) -> None:
    values = double(normal(5, (1, 2, 3, 22)))
    values[0, 1, :, 1] = values[0, 0, 1, 21] = special
    x = mx.array(values.astype(np.float32))
    options = {"traditional": traditional, "offset": 3}
    assert row_error(rope(kernels.rope, x, 20, **options), reference(x, 20, **options)) <= TOLERANCE


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("traditional", [False, True])
def test_views_are_read_where_they_lie(kernels: ModuleType, view: str, traditional: bool) -> None:
    x = VIEWS[view](normal(6, (2, 6, 5, 40)))
    dims = x.shape[-1] // 4 * 2
    options = {"traditional": traditional, "offset": mx.array([3, 77])}
    if dims:
        assert row_error(rope(kernels.rope, x, dims, **options), reference(x, dims, **options)) <= TOLERANCE


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("width", [18, 64])
def test_half_types_are_rounded_once(kernels: ModuleType, dtype: mx.Dtype, traditional: bool, width: int) -> None:
    x = normal(7, (2, 3, 4, width), dtype)
    options = {"traditional": traditional, "offset": 30000}
    y = rope(kernels.rope, x, 16, **options)
    assert y.dtype == dtype
    assert row_error(y, reference(x, 16, **options)) <= HALF_TOLERANCE[dtype]
    assert same_bits(y[..., 16:], x[..., 16:])


def test_a_token_has_the_same_bits_in_any_batch(kernels: ModuleType) -> None:
    x = normal(8, (3, 9, 70, 64))
    together = rope(kernels.rope, x, 64, offset=mx.array([0, 5, 100000]))
    for row, place, first in ((0, 69, 0), (1, 3, 5), (2, 33, 100000)):
        alone = rope(kernels.rope, x[row : row + 1, :, place : place + 1], 64, offset=first + place)
        assert same_bits(together[row : row + 1, :, place : place + 1], alone)


@pytest.mark.parametrize(
    ("shape", "dims", "options"),
    [
        ((4, 8), 8, {}),
        ((1, 4, 8), 8, {"base": None}),
        ((1, 4, 8), 8, {"freqs": mx.ones(4)}),
        ((1, 4, 8), 8, {"base": None, "freqs": mx.ones(3)}),
        ((2, 4, 8), 8, {"offset": mx.array([1, 2, 3])}),
        ((2, 4, 8), 8, {"offset": mx.array([[1, 2]])}),
        ((2, 4, 8), 8, {"offset": mx.array([1.0, 2.0])}),
    ],
)
def test_errors_are_those_of_mlx(
    kernels: ModuleType, shape: tuple[int, ...], dims: int, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError) as expected:
        rope(mx.fast.rope, mx.zeros(shape), dims, **options)
    with pytest.raises(ValueError) as raised:
        rope(kernels.rope, mx.zeros(shape), dims, **options)
    assert str(raised.value) == str(expected.value)


def test_nothing_gives_nothing(kernels: ModuleType) -> None:
    assert rope(kernels.rope, mx.zeros((2, 0, 3, 8)), 8).shape == (2, 0, 3, 8)


@pytest.mark.parametrize("offset", [3, mx.array([3, 4])])
def test_gradients_and_vmap_are_those_of_mlx(kernels: ModuleType, offset: int | mx.array) -> None:
    x = normal(9, (2, 3, 4, 16))

    def loss(function: Any) -> Any:
        return lambda x: (rope(function, x, 12, offset=offset) ** 2 * x).sum()

    got, expected = mx.grad(loss(kernels.rope))(x), mx.grad(loss(mx.fast.rope))(x)
    assert mx.allclose(got, expected, rtol=1e-4, atol=1e-5)
    stacked = mx.stack([x, 2 * x])
    mapped = mx.vmap(lambda one: rope(kernels.rope, one, 12, offset=offset))(stacked)
    assert row_error(mapped[1], reference(2 * x, 12, offset=offset)) <= TOLERANCE


def test_compiled_calls_with_other_options_stay_apart(kernels: ModuleType) -> None:
    x = normal(10, (1, 2, 3, 16))
    first, second = mx.compile(lambda x: (rope(kernels.rope, x, 16, offset=1), rope(kernels.rope, x, 16, offset=2)))(x)
    assert row_error(first, reference(x, 16, offset=1)) <= TOLERANCE
    assert row_error(second, reference(x, 16, offset=2)) <= TOLERANCE


def test_compiled_for_any_shape(kernels: ModuleType) -> None:
    compiled = mx.compile(lambda x, offset: rope(kernels.rope, x, 16, offset=offset), shapeless=True)
    for batch in (2, 3):
        x, offset = normal(11, (batch, 2, batch, 16)), mx.arange(batch)
        assert row_error(compiled(x, offset), reference(x, 16, offset=offset)) <= TOLERANCE
    with pytest.raises(ValueError, match="fit"):
        mx.eval(compiled(normal(12, (3, 2, 1, 16)), mx.arange(2)))
    with pytest.raises(ValueError, match="fit"):
        mx.eval(compiled(normal(12, (2, 2, 1, 8)), mx.arange(2)))


@pytest.mark.parametrize("offset", [-1, -7, -100000, mx.array(-3), mx.array([-2, 5]), mx.array([-9, -4], mx.int64)])
def test_positions_before_the_first(kernels: ModuleType, offset: int | mx.array) -> None:
    x = normal(13, (2, 3, 4, 32))
    for traditional in (False, True):
        options = {"traditional": traditional, "offset": offset}
        assert row_error(rope(kernels.rope, x, 32, **options), reference(x, 32, **options)) <= TOLERANCE


def test_a_position_is_a_number(kernels: ModuleType) -> None:
    for function in (kernels.rope, mx.fast.rope):
        for offset in (True, 1.0):
            with pytest.raises(ValueError, match="must be an integer"):
                rope(function, mx.zeros((1, 2, 8)), 8, offset=offset)
