"""The vector helpers that every kernel uses, by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import pytest

if TYPE_CHECKING:
    from types import ModuleType

EVERY_PATTERN = np.arange(65536, dtype=np.uint32)
SMALLEST_NORMAL = 2.0**-126


def test_exp_is_within_two_ulp(kernels: ModuleType) -> None:
    everywhere = np.linspace(-87.3, 88.7228, 2_000_001)
    near_zero = np.geomspace(1e-38, 1, 100_001)
    x = np.concatenate([everywhere, near_zero, -near_zero]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    got = np.array(kernels.exp_of(mx.array(x))).astype(np.float64)
    assert (np.abs(got - exact) / np.spacing(exact.astype(np.float32))).max() <= 2


def test_exp_of_special_values(kernels: ModuleType) -> None:
    largest = np.float32(88.72283)  # the last before e^x overflows
    last_normal = np.float32(-87.33654)
    x = np.array([np.inf, -np.inf, np.nan, 0, -0.0, 1e-45, 3e38, -3e38, largest, np.nextafter(largest, np.float32(99)),
                  last_normal, np.nextafter(last_normal, np.float32(-99)), -100], dtype=np.float32)  # fmt: skip
    got = np.array(kernels.exp_of(mx.array(x)))
    np.testing.assert_array_equal(got[:8], np.array([np.inf, 0, np.nan, 1, 1, 1, np.inf, 0], dtype=np.float32))
    assert np.isfinite(got[8])
    assert np.isinf(got[9])
    assert got[10] >= SMALLEST_NORMAL
    np.testing.assert_array_equal(got[11:], [0, 0])
    # NaNs of either sign, and in every lane
    for lane in range(kernels.lanes()):
        one = np.zeros(kernels.lanes(), dtype=np.float32)
        one[lane] = -np.nan
        np.testing.assert_array_equal(np.isnan(np.array(kernels.exp_of(mx.array(one)))), np.isnan(one))


def bits_as_float(bits: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    if dtype == mx.float16:
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("lanes", [False, True])
def test_every_half_pattern_widens_and_comes_back(kernels: ModuleType, dtype: mx.Dtype, lanes: bool) -> None:
    bits = EVERY_PATTERN.astype(np.uint16)
    expected = bits_as_float(bits, dtype)
    wide = np.array(kernels.widen(mx.array(bits), dtype, lanes))
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(wide[number].view(np.uint32), expected[number].view(np.uint32))
    assert np.isnan(wide[~number]).all()
    back = np.array(kernels.narrow(mx.array(wide), dtype, lanes))
    np.testing.assert_array_equal(back[number], bits[number])
    assert np.isnan(bits_as_float(back[~number], dtype)).all()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("lanes", [False, True])
def test_rounding_goes_to_the_nearest_even(kernels: ModuleType, dtype: mx.Dtype, lanes: bool) -> None:
    # each pattern, the middle between it and the next, the float32s to either side of both, and where infinity begins
    with np.errstate(over="ignore"):
        below = bits_as_float(EVERY_PATTERN, dtype)
        above = bits_as_float(EVERY_PATTERN + 1 & 0xFFFF, dtype)
        finite = np.isfinite(below) & np.isfinite(above)
        middle = ((below[finite].astype(np.float64) + above[finite]) / 2).astype(np.float32)
        near = np.concatenate([below[finite], middle])
        up, down = (np.nextafter(near, np.float32(side)) for side in (np.inf, -np.inf))
        edge = np.array([65504, 65519.996, 65520, 65536, 3.3895e38, 3.396e38, np.inf], dtype=np.float32)
        x = np.concatenate([near, up, down, edge, -edge])
        got = np.array(kernels.narrow(mx.array(x), dtype, lanes))
        if dtype == mx.float16:
            expected = x.astype(np.float16).view(np.uint16)
        else:
            expected = np.array(mx.array(x).astype(mx.bfloat16).view(mx.uint16))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("lanes", [False, True])
def test_nan_stays_nan_when_it_is_narrowed(kernels: ModuleType, dtype: mx.Dtype, lanes: bool) -> None:
    # the mantissa in the upper bits, the lower ones, all of them: rounding these up would end in another number
    bits = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0xFF800001, 0x7FFF8000] * 6, dtype=np.uint32)
    got = np.array(kernels.narrow(mx.array(bits.view(np.float32)), dtype, lanes))
    assert np.isnan(bits_as_float(got, dtype)).all()


def test_lanes_are_added_halves_onto_each_other(kernels: ModuleType) -> None:
    lanes = np.random.default_rng(0).standard_normal(kernels.lanes()).astype(np.float32) * 1000
    expected = lanes.copy()
    while len(expected) > 1:
        expected = expected[: len(expected) // 2] + expected[len(expected) // 2 :]
    assert kernels.sum_of_lanes(mx.array(lanes)) == expected[0]


def test_the_largest_lane_wherever_it_is(kernels: ModuleType) -> None:
    for lane in range(kernels.lanes()):
        lanes = np.full(kernels.lanes(), -np.inf, dtype=np.float32)
        lanes[lane] = -5.0
        assert kernels.largest_lane(mx.array(lanes)) == -5.0
