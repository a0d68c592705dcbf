"""Products with quantized and half-precision weights, against float64, and as drop-ins for mlx's own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.kernels.products import (
    AFFINE,
    DTYPES,
    MX,
    Weights,
    affine,
    assert_close,
    float64,
    micro,
    weights,
)

if TYPE_CHECKING:
    from types import ModuleType

FORMATS = [f"affine-{bits}-{group}" for bits, group in AFFINE] + [mode for mode, _ in MX]
examples = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def in_format(name: str, w: mx.array) -> Weights:
    if name in dict(MX):
        return micro(w, name, dict(MX)[name])
    _, bits, group = name.split("-")
    return affine(w, int(bits), int(group))


@examples
@given(weights(), st.integers(1, 70), st.sampled_from(DTYPES))
def test_a_quantized_product_is_that_of_the_decoded_numbers(
    kernels: ModuleType, w: Weights, rows: int, dtype: mx.Dtype
) -> None:
    x = mx.random.normal((rows, w.float64().shape[-1])).astype(dtype)
    y = kernels.quantized_matmul(x, *w.arrays, **w.how)
    assert y.dtype == mx.quantized_matmul(x, *w.arrays, **w.how).dtype
    assert_close(y, float64(x), w.float64())


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_decoded_in_both_paths(kernels: ModuleType, name: str) -> None:
    w = in_format(name, mx.random.normal((37, 1408)))
    for rows in (1, 2, 3, 7, 61):
        x = mx.random.normal((rows, 1408))
        assert_close(kernels.quantized_matmul(x, *w.arrays, **w.how), float64(x), w.float64())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 7, 30, 64, 70])
def test_half_weights_are_multiplied_in_float32(kernels: ModuleType, dtype: mx.Dtype, rows: int) -> None:
    x, w = mx.random.normal((rows, 672)), mx.random.normal((45, 672)).astype(dtype)
    y = kernels.half_matmul(x, w)
    assert y.dtype == mx.float32
    assert_close(y, float64(x), float64(w))
    assert_close(kernels.half_matmul(x[:, :45], w[:, :45]), float64(x[:, :45]), float64(w[:, :45]))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_every_code_and_scale_of_micro_formats_is_read_as_mlx_reads_it(kernels: ModuleType, name: str) -> None:
    words = 4 if name == "mxfp4" else 8
    codes = np.arange(256, dtype=np.uint8).reshape(-1, 4 * words)
    # 448 * 2^(245 - 127) is finite
    packed = mx.array(np.repeat(codes, 246, 0).view(np.uint32))
    scales = mx.array(np.tile(np.arange(246, dtype=np.uint8), len(codes))[:, None])
    # Each row of the unit matrix picks one weight; the others times 0 are 0, or NaN where the weight is.
    y = kernels.quantized_matmul(mx.eye(32), packed, scales, mode=name)
    np.testing.assert_array_equal(np.array(y), np.array(mx.quantized_matmul(mx.eye(32), packed, scales, mode=name)))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_nan_and_inf_come_out_where_the_reference_has_them(kernels: ModuleType, name: str, rows: int) -> None:
    # Away from 0: whether a weight is 0 or nearly so, and inf times it NaN or inf, is up to its rounding.
    w = in_format(name, mx.random.normal((21, 256)) + 8)
    x = np.array(mx.random.normal((rows, 256)))
    x[0, 77] = np.inf
    x[-1, 5] = -np.inf if rows > 1 else x[-1, 5]
    x[rows // 2, 200] = np.nan if rows > 2 else 1.0
    if w.how["mode"] == "affine":
        scales, biases = (np.array(a) for a in w.arrays[1:])
        scales[3, 1], scales[4, 0], biases[5, 1] = np.inf, np.nan, -np.inf
        w = Weights([w.arrays[0], mx.array(scales), mx.array(biases)], w.how)
    y = np.array(kernels.quantized_matmul(mx.array(x), *w.arrays, **w.how)).astype(np.float64)
    with np.errstate(invalid="ignore"):
        reference = x.astype(np.float64) @ w.float64().T
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(np.isfinite(y), finite)
    np.testing.assert_array_equal(y[~finite], reference[~finite])


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_has_the_same_bits_in_any_batch_and_beside_any_columns(kernels: ModuleType, name: str) -> None:
    # 1408 and 150 rows: several stretches of the depth, several blocks of rows, every height of a tile
    w = in_format(name, mx.random.normal((101, 1408)))
    x = mx.random.normal((150, 1408))
    whole = np.array(kernels.quantized_matmul(x, *w.arrays, **w.how))
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 48, 49):
        some = np.array(kernels.quantized_matmul(x[7 : 7 + rows], *w.arrays, **w.how))
        np.testing.assert_array_equal(some, whole[7 : 7 + rows])
    few = [a[50:57] for a in w.arrays]
    np.testing.assert_array_equal(np.array(kernels.quantized_matmul(x, *few, **w.how)), whole[:, 50:57])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_dense_weights_has_the_same_bits_in_any_batch(kernels: ModuleType, dtype: mx.Dtype) -> None:
    x, w = mx.random.normal((90, 1408)), mx.random.normal((103, 1408)).astype(dtype)
    whole = np.array(kernels.half_matmul(x, w))
    # float32 weights are used where they are from 7 rows to 64
    for rows in (1, 2, 3, 5, 6, 7, 8, 10, 13, 48, 64, 65):
        np.testing.assert_array_equal(np.array(kernels.half_matmul(x[3 : 3 + rows], w)), whole[3 : 3 + rows])


THREADS = """
import hashlib, importlib.machinery, importlib.util, sys
import mlx.core as mx
loader = importlib.machinery.ExtensionFileLoader("_kernels", sys.argv[1])
kernels = importlib.util.module_from_spec(importlib.util.spec_from_loader("_kernels", loader))
loader.exec_module(kernels)
mx.random.seed(5)
digest = hashlib.sha256()
w = mx.quantize(mx.random.normal((515, 1408)))
for rows in (1, 3, 77):
    digest.update(bytes(memoryview(kernels.quantized_matmul(mx.random.normal((rows, 1408)), *w))))
print(kernels.threads(), digest.hexdigest())
"""


def test_the_number_of_threads_does_not_show_in_the_bits(kernels: ModuleType) -> None:
    path = kernels.__loader__.path  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    seen: dict[str, str] = {}
    for count in ("1", "2", "5"):
        environment = {**os.environ, "MLXINFER_THREADS": count}
        done = subprocess.run(
            [sys.executable, "-c", THREADS, path], env=environment, capture_output=True, text=True, check=True
        )
        threads, seen[count] = done.stdout.split()
        assert threads == count
    assert len(set(seen.values())) == 1


def test_leading_dimensions_are_kept(kernels: ModuleType) -> None:
    w = affine(mx.random.normal((5, 64)), 4, 64)
    for shape in ((64,), (2, 64), (2, 3, 1, 64)):
        y = kernels.quantized_matmul(mx.ones(shape), *w.arrays)
        assert y.shape == (*shape[:-1], 5)
        assert mx.allclose(y, mx.quantized_matmul(mx.ones(shape), *w.arrays), atol=1e-4)
    # mlx's own dies of a division by zero rows
    assert np.array(kernels.quantized_matmul(mx.ones((3, 0, 64)), *w.arrays)).shape == (3, 0, 5)


def test_inputs_that_lie_in_another_order_are_read_right(kernels: ModuleType) -> None:
    w = affine(mx.random.normal((20, 128)), 4, 64)
    strided = [mx.repeat(a, 2, 0)[::2] for a in w.arrays]
    x = mx.random.normal((128, 9)).T
    assert_close(kernels.quantized_matmul(x, *strided), float64(x), w.float64())
    compiled = mx.compile(lambda x: kernels.quantized_matmul(x, *strided))
    assert_close(compiled(x), float64(x), w.float64())
    assert_close(compiled(mx.contiguous(x)), float64(x), w.float64())


def test_what_the_kernels_do_not_support_goes_to_mlx(kernels: ModuleType) -> None:
    w = affine(mx.random.normal((64, 128)), 4, 64)
    odd: list[tuple[mx.array, list[Any], dict[str, Any]]] = [
        (mx.random.normal((3, 64)), w.arrays, {"transpose": False}),
        (mx.random.normal((2, 3, 128)), [mx.stack([a, a]) for a in w.arrays], {}),
        (mx.random.normal((3, 128)), [w.arrays[0], w.arrays[1], w.arrays[2].astype(mx.float16)], {}),
        (mx.random.normal((3, 128)), list(mx.quantize(mx.random.normal((8, 128)), mode="nvfp4")), {"mode": "nvfp4"}),
        (mx.random.normal((3, 128)), list(mx.quantize(mx.random.normal((8, 128)), bits=1)), {"bits": 1}),
    ]
    for x, arrays, how in odd:
        ours, theirs = (f(x, *arrays, **how) for f in (kernels.quantized_matmul, mx.quantized_matmul))
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.array(ours.astype(mx.float32)), np.array(theirs.astype(mx.float32)))


def test_wrong_arguments_are_refused_as_mlx_refuses_them(kernels: ModuleType) -> None:
    x, (w, scales, biases) = mx.random.normal((3, 128)), affine(mx.random.normal((64, 128)), 4, 64).arrays
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x[:, :64], w, scales, biases), {}),
        ((x, w.astype(mx.int32), scales, biases), {}),
        ((x, w, scales[:, :1], biases[:, :1]), {}),
        ((x, w, scales, biases[:10]), {}),
        ((x, w, scales), {}),
        ((x, w, scales, biases), {"bits": 7}),
        ((x, w, scales, biases), {"bits": 8}),
        ((x, w, scales, biases), {"group_size": 32}),
        ((x, w, scales, biases), {"mode": "mxfp4"}),
        ((x, w, scales, biases), {"mode": "other"}),
    ]
    for arguments, how in wrong:
        with pytest.raises(ValueError, match=r"quantized_matmul") as theirs:
            mx.quantized_matmul(*arguments, **how)
        with pytest.raises(ValueError, match=r"quantized_matmul") as ours:
            kernels.quantized_matmul(*arguments, **how)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(ValueError, match="rows"):  # mlx's own reads past the end of the scales
        kernels.quantized_matmul(x, w, scales[:10], biases[:10])
    with pytest.raises(ValueError, match="matmul"):
        kernels.half_matmul(mx.ones((2, 64)), mx.ones((3, 32)))


def test_gradients_and_vmap_are_those_of_mlx(kernels: ModuleType) -> None:
    x, arrays = mx.random.normal((4, 3, 128)), affine(mx.random.normal((20, 128)), 4, 64).arrays

    def loss(product: Any, x: mx.array, scales: mx.array) -> mx.array:
        return mx.square(product(x, arrays[0], scales, arrays[2])).sum()

    ours = mx.grad(lambda x, s: loss(kernels.quantized_matmul, x, s), argnums=(0, 1))(x, arrays[1])
    theirs = mx.grad(lambda x, s: loss(mx.quantized_matmul, x, s), argnums=(0, 1))(x, arrays[1])
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-2)
    for product in (kernels.quantized_matmul, mx.quantized_matmul):
        with pytest.raises(RuntimeError, match="NYI"):
            mx.vmap(lambda x, f=product: f(x, *arrays))(x)

    w = mx.random.normal((20, 128)).astype(mx.bfloat16)
    each = mx.vmap(lambda x: kernels.half_matmul(x, w))(x)
    np.testing.assert_allclose(np.array(each), np.array(x @ w.astype(mx.float32).T), atol=1e-4)
    gradient = mx.grad(lambda x: mx.square(kernels.half_matmul(x, w)).sum())(x)
    expected = mx.grad(lambda x: mx.square(x @ w.astype(mx.float32).T).sum())(x)
    np.testing.assert_allclose(np.array(gradient), np.array(expected), rtol=1e-4, atol=1e-2)
