"""Products with one of several matrices per entry, against a loop over the entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.kernels.products import DTYPES, Weights, affine, assert_close, float64, micro, weights

if TYPE_CHECKING:
    from types import ModuleType

EXPERTS = 5
examples = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@examples
@given(weights((EXPERTS,)), st.data(), st.integers(1, 5), st.sampled_from(DTYPES))
def test_each_entry_is_the_product_with_its_matrix(
    kernels: ModuleType, w: Weights, data: st.DataObject, rows: int, dtype: mx.Dtype
) -> None:
    decoded, batches = w.float64(), data.draw(st.integers(1, 6))
    x = mx.random.normal((batches, rows, decoded.shape[-1])).astype(dtype)
    count = data.draw(st.integers(1, 40))
    draw = lambda n: data.draw(st.lists(st.integers(0, n - 1), min_size=count, max_size=count))  # noqa: E731
    left, right = draw(batches), draw(EXPERTS)
    y = kernels.gather_qmm(x, *w.arrays, lhs_indices=mx.array(left), rhs_indices=mx.array(right), **w.how)
    theirs = mx.gather_qmm(x, *w.arrays, lhs_indices=mx.array(left), rhs_indices=mx.array(right), **w.how)
    assert (y.dtype, y.shape) == (theirs.dtype, theirs.shape)
    assert_close(y, float64(x)[left], decoded[right])


def test_a_layer_of_experts_calls_it_without_indices_for_x(kernels: ModuleType) -> None:
    w = affine(mx.random.normal((EXPERTS, 48, 128)), 4, 64)
    # One token at a time, each to three experts, as mlx-lm's SwitchLinear does it; then sorted, one entry per pair.
    x, chosen = mx.random.normal((2, 7, 1, 1, 128)), mx.random.randint(0, EXPERTS, (2, 7, 3))
    y = kernels.gather_qmm(x, *w.arrays, rhs_indices=chosen, transpose=True, group_size=64, bits=4)
    assert y.shape == (2, 7, 3, 1, 48)
    assert_close(y, np.broadcast_to(float64(x), (2, 7, 3, 1, 128)), w.float64()[np.array(chosen)])
    flat, order = mx.random.normal((40, 1, 128)), mx.sort(mx.random.randint(0, EXPERTS, (40,)))
    y = kernels.gather_qmm(flat, *w.arrays, rhs_indices=order, sorted_indices=True)
    assert_close(y, float64(flat), w.float64()[np.array(order)])
    none = mx.array([], dtype=mx.uint32)
    assert np.array(kernels.gather_qmm(flat, *w.arrays, lhs_indices=none, rhs_indices=none)).shape == (0, 1, 48)
    y = kernels.gather_qmm(flat, *w.arrays, lhs_indices=mx.array([3, 9, 1, 0, 39]))
    assert_close(y, float64(flat)[[3, 9, 1, 0, 39]], w.float64())


def test_an_entry_has_the_same_bits_in_any_company(kernels: ModuleType) -> None:
    w = affine(mx.random.normal((EXPERTS, 101, 1408)), 4, 32)
    x, right = mx.random.normal((120, 1, 1408)), mx.random.randint(0, EXPERTS, (120,))
    whole = np.array(kernels.gather_qmm(x, *w.arrays, rhs_indices=right, **w.how))
    for begin, end in ((0, 1), (3, 9), (50, 90)):
        some = kernels.gather_qmm(x[begin:end], *w.arrays, rhs_indices=right[begin:end], **w.how)
        np.testing.assert_array_equal(np.array(some), whole[begin:end])
    expert = int(np.array(right)[0])
    alone = kernels.quantized_matmul(x[0], *(a[expert] for a in w.arrays), **w.how)
    np.testing.assert_array_equal(np.array(alone), whole[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_index_outside_gives_nan_and_touches_nothing(kernels: ModuleType, dtype: mx.Dtype) -> None:
    w = affine(mx.random.normal((EXPERTS, 9, 128)).astype(dtype), 4, 64)
    x = mx.random.normal((3, 2, 128)).astype(dtype)
    left, right = mx.array([0, 3, 1, -1, 2]), mx.array([0, 1, EXPERTS, 2, -(2**31)])
    y = float64(kernels.gather_qmm(x, *w.arrays, lhs_indices=left, rhs_indices=right))
    assert not np.isnan(y[0]).any()
    assert np.isnan(y[1:]).all()


def test_gradients_and_vmap_are_those_of_mlx(kernels: ModuleType) -> None:
    w = micro(mx.random.normal((EXPERTS, 9, 128)), "mxfp4", 4)
    x, right = mx.random.normal((4, 2, 128)), mx.array([4, 0, 0, 2])

    def gradient(product: Any) -> np.ndarray[Any, Any]:
        loss = lambda x: mx.square(product(x, *w.arrays, rhs_indices=right, **w.how)).sum()  # noqa: E731
        return np.array(mx.grad(loss)(x))

    np.testing.assert_allclose(gradient(kernels.gather_qmm), gradient(mx.gather_qmm), rtol=1e-4, atol=1e-2)


def test_what_the_kernel_does_not_support_goes_to_mlx(kernels: ModuleType) -> None:
    w = affine(mx.random.normal((EXPERTS, 64, 128)), 4, 64)
    x, right = mx.random.normal((2, 3, 64)), mx.array([1, 4])
    ours, theirs = (f(x, *w.arrays, rhs_indices=right, transpose=False) for f in (kernels.gather_qmm, mx.gather_qmm))
    np.testing.assert_array_equal(np.array(ours), np.array(theirs))
    for indices in (mx.array([0.0, 1.0]), mx.array([0, 1, 2])):
        for f in (kernels.gather_qmm, mx.gather_qmm):
            with pytest.raises(ValueError, match=r"gather_qmm|broadcast"):
                f(mx.ones((2, 3, 128)), *w.arrays, lhs_indices=mx.array([0, 1]), rhs_indices=indices)


def test_an_index_too_large_for_32_bits_is_outside_too(kernels: ModuleType) -> None:
    w = affine(mx.random.normal((EXPERTS, 9, 128)), 4, 64)
    x = mx.random.normal((3, 2, 128))
    for dtype, far in ((mx.int64, [2**32, 2**32 + 1, -(2**32), -(2**63), 2**63 - 1]), (mx.uint64, [2**32, 2**64 - 1])):
        for index in far:
            kind = np.int64 if dtype == mx.int64 else np.uint64
            indices, valid = (mx.array(np.array([1, i], dtype=kind)) for i in (index, 2))
            assert indices.dtype == dtype
            for pair in ((indices, valid), (valid, indices)):
                y = float64(kernels.gather_qmm(x, *w.arrays, lhs_indices=pair[0], rhs_indices=pair[1]))
                assert not np.isnan(y[0]).any()
                assert np.isnan(y[1]).all(), (dtype, index)
