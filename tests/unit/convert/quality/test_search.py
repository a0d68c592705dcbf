"""The searching quantizer against mx.quantize, which it must beat at the same size and never fall behind."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxinfer.convert.quality.grid import look_on_grid
from mlxinfer.convert.quality.words import pack
from mlxinfer.convert.quantizing import min_max
from mlxinfer.convert.search import recommended, search
from mlxinfer.convert.sources.base import Packing

BITS = (2, 3, 4, 5, 6, 8)


def restored(quantized: Any, packing: Packing) -> np.ndarray:
    words, scales, biases = quantized
    if packing.mode == "affine":
        assert biases is not None
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    values = mx.dequantize(words, scales, biases, packing.group_size, packing.bits, packing.mode, dtype=mx.float32)
    return np.array(values)


def group_errors(weight: mx.array, quantizer: Any, packing: Packing) -> np.ndarray:
    difference = np.array(weight.astype(mx.float32)) - restored(quantizer(weight, packing), packing)
    return (difference.astype(np.float64) ** 2).reshape(-1, packing.group_size).sum(-1)


def weights(kind: str, rows: int = 48, columns: int = 512) -> mx.array:
    rng = np.random.default_rng(7)
    drawn = {
        "gauss": lambda: rng.normal(size=(rows, columns)),
        "laplace": lambda: rng.laplace(size=(rows, columns)),
        "heavy tails": lambda: rng.standard_t(3, size=(rows, columns)),
    }[kind]()
    return mx.array((0.02 * drawn).astype(np.float32))


@pytest.mark.parametrize("bits", BITS)
def test_words_are_laid_out_as_mlx_reads_them(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (3, 96), dtype=np.uint8)
    words = pack(mx.array(codes), bits)
    assert words.shape == (3, 96 * bits // 32)
    ones = mx.ones((3, 3))
    assert (np.array(mx.dequantize(words, ones, mx.zeros((3, 3)), 32, bits)) == codes).all()


@pytest.mark.parametrize("bits", BITS)
def test_codes_at_the_parameters_of_mlx_pack_to_the_words_of_mlx(bits: int) -> None:
    weight = weights("gauss", 8)
    words, scales, biases = mx.quantize(weight, 64, bits)
    codes = mx.dequantize(words, mx.ones_like(scales), mx.zeros_like(biases), 64, bits)
    assert mx.array_equal(pack(codes.astype(mx.uint8), bits), words).item()


@pytest.mark.parametrize("kind", ["gauss", "laplace", "heavy tails"])
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("bits", BITS)
def test_the_squared_error_is_15_percent_below_that_of_min_and_max(bits: int, group_size: int, kind: str) -> None:
    weight, packing = weights(kind, 192), Packing(bits, group_size)
    searched, plain = (group_errors(weight, q, packing) for q in (search, min_max))
    least = 0.86 if kind == "heavy tails" else 0.85
    assert searched.sum() < least * plain.sum()


@pytest.mark.parametrize(("bits", "most"), [(2, 0.75), (3, 0.85), (4, 0.86), (5, 0.9), (6, 0.91), (8, 0.92)])
def test_groups_of_128_gain_less_in_many_bits(bits: int, most: float) -> None:
    weight, packing = weights("gauss", 96), Packing(bits, 128)
    searched, plain = (group_errors(weight, q, packing) for q in (search, min_max))
    assert searched.sum() < most * plain.sum()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    "packing",
    [Packing(2, 64), Packing(4, 32), Packing(8, 128), Packing(4, 32, "mxfp4"), Packing(4, 16, "nvfp4")],
    ids=str,
)
def test_no_group_is_worse_than_by_min_and_max(packing: Packing, dtype: mx.Dtype) -> None:
    weight = weights("heavy tails").astype(dtype)
    searched, plain = (group_errors(weight, q, packing) for q in (search, min_max))
    assert (searched <= plain * (1 + 1e-5) + 1e-12).all()


@pytest.mark.parametrize(("mode", "block", "most"), [("mxfp4", 32, 0.95), ("nvfp4", 16, 0.85)])
def test_block_floats_gain_by_another_scale(mode: str, block: int, most: float) -> None:
    packing = Packing(4, block, "mxfp4" if mode == "mxfp4" else "nvfp4")
    # Large enough that nvfp4's scales aren't below its smallest normal number.
    weight = 50 * weights("gauss")
    searched, plain = (group_errors(weight, q, packing) for q in (search, min_max))
    assert searched.sum() < most * plain.sum()


def test_mxfp8_is_what_mlx_makes() -> None:
    packing = Packing(8, 32, "mxfp8")
    ours, theirs = search(weights("gauss"), packing), min_max(weights("gauss"), packing)
    assert mx.array_equal(ours[0], theirs[0]).item()
    assert ours[2] is None


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_weights_on_a_grid_keep_their_values(bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (64, 8, 32))
    codes[..., 0] = 0
    scale = rng.uniform(0.001, 0.02, (64, 8, 1)).astype(np.float16).astype(np.float32)
    bias = -rng.uniform(0.01, 0.2, (64, 8, 1)).astype(np.float16).astype(np.float32)
    weight = (codes.astype(np.float32) * scale + bias).reshape(64, 256)
    packing = Packing(bits, 32)
    error = np.abs(restored(search(mx.array(weight), packing), packing) - weight)
    assert error.max() <= 2e-7 * np.abs(weight).max()
    plain = np.abs(restored(min_max(mx.array(weight), packing), packing) - weight)
    assert plain.max() > 100 * error.max() + 1e-6


def test_ternary_weights_are_exact_in_two_bits_and_half_precision() -> None:
    rng = np.random.default_rng(1)
    signs = rng.integers(-1, 2, (32, 128)).astype(np.float32)
    weight = mx.array(signs * np.float32(0.03125)).astype(mx.float16)
    packing = Packing(2, 64)
    assert (restored(search(weight, packing), packing) == np.array(weight.astype(mx.float32))).all()


def test_random_weights_are_not_taken_for_a_grid() -> None:
    assert not look_on_grid(weights("gauss"), 8, 64)
    assert not look_on_grid(weights("laplace"), 4, 32)


def test_constant_zero_and_broken_groups_come_out_as_by_mlx() -> None:
    weight = np.array(weights("gauss", 4, 256))
    weight[0, :64], weight[0, 64:128], weight[1, :64], weight[1, 64] = 0.0, 0.5, np.nan, np.inf
    packing = Packing(4, 64)
    with np.errstate(all="ignore"):
        values = restored(search(mx.array(weight), packing), packing)
    assert (values[0, :64] == 0).all()
    assert np.abs(values[0, 64:128] - 0.5).max() < 1e-6
    assert np.isfinite(values[2:]).all()
    assert np.abs(values[2:] - weight[2:]).max() < 0.02


def test_experts_are_searched_as_their_matrices_are() -> None:
    weight = weights("gauss", 12).reshape(3, 4, 512)
    packing = Packing(4, 64)
    stacked = search(weight, packing)
    assert stacked[0].shape == (3, 4, 64)
    for i in range(3):
        for whole, part in zip(stacked, search(weight[i], packing), strict=True):
            assert whole is not None
            assert part is not None
            assert mx.array_equal(whole[i], part).item()


def test_few_bits_are_searched_only_where_weights_lie_on_a_grid() -> None:
    def words(quantizer: Any, weight: mx.array, bits: int) -> mx.array:
        return quantizer(weight, Packing(bits, 64))[0]

    weight = weights("gauss")
    assert mx.array_equal(words(recommended, weight, 3), words(min_max, weight, 3)).item()
    assert mx.array_equal(words(recommended, weight, 4), words(search, weight, 4)).item()
    ternary = mx.array(np.random.default_rng(2).integers(-1, 2, (8, 128)).astype(np.float32))
    assert (restored(recommended(ternary, Packing(2, 64)), Packing(2, 64)) == np.array(ternary)).all()


def test_scales_have_the_dtype_of_the_weight() -> None:
    _, scales, biases = search(weights("gauss").astype(mx.bfloat16), Packing(4, 64))
    assert biases is not None
    assert scales.dtype == biases.dtype == mx.bfloat16
