"""Compiled calls: equal ones are merged and no others; those for any shape take whatever shape comes, and refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest

from tests.unit.kernels.compare import normal

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

ROPE: dict[str, Any] = {"traditional": False, "base": 1e4, "scale": 1.0}
PACKED = mx.quantize(normal(1, (9, 64)), group_size=32, bits=4)
EXPERTS = mx.quantize(normal(2, (3, 9, 64)), group_size=32, bits=4)
HALF = normal(3, (9, 64), mx.bfloat16)
HOW: dict[str, Any] = {"group_size": 32, "bits": 4}
QKV = [(1, 4, 3, 16), (1, 2, 9, 16), (1, 2, 9, 8)]
SINKS = mx.array([0.5, -0.25, 1.0, 0.0])


def quantized(place: Any, x: mx.array) -> mx.array:
    return place.quantized_matmul(x, *PACKED, **HOW)


def half(place: Any, x: mx.array) -> mx.array:
    if place is mx:
        return x @ HALF.astype(mx.float32).T
    return place.half_matmul(x, HALF)


def gathered(place: Any, x: mx.array, indices: mx.array) -> mx.array:
    return place.gather_qmm(x, *EXPERTS, lhs_indices=indices, rhs_indices=indices % 3, **HOW)


def attention(place: Any, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    return getattr(place, "fast", place).scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal", sinks=SINKS)


def masked(place: Any, q: mx.array, k: mx.array, mask: mx.array) -> mx.array:
    return getattr(place, "fast", place).scaled_dot_product_attention(q, k, k, scale=0.3, mask=mask)


CALLS: dict[str, tuple[Callable[..., mx.array], list[list[tuple[int, ...]]]]] = {
    "rms_norm": (lambda p, x: getattr(p, "fast", p).rms_norm(x, None, 1e-5), [[(3, 8)], [(5, 8)], [(2, 6)]]),
    "rope": (
        lambda p, x: getattr(p, "fast", p).rope(x, 8, offset=3, **ROPE),
        [[(1, 2, 3, 8)], [(2, 2, 5, 8)], [(2, 1, 1, 10)]],
    ),
    "softmax": (lambda p, x: p.softmax(x, axis=-1), [[(3, 8)], [(5, 9)]]),
    "logsumexp": (lambda p, x: p.logsumexp(x, axis=-1), [[(3, 8)], [(5, 9)]]),
    "logsumexp, keepdims": (lambda p, x: p.logsumexp(x, axis=-1, keepdims=True), [[(3, 8)], [(5, 9)]]),
    "quantized_matmul": (quantized, [[(3, 64)], [(1, 64)], [(13, 64)]]),
    "half_matmul": (half, [[(2, 3, 64)], [(1, 1, 64)], [(2, 13, 64)]]),
    "attention": (
        attention,
        [[(1, 4, 3, 16), (1, 2, 9, 16), (1, 2, 9, 8)], [(2, 4, 1, 16), (2, 2, 70, 16), (2, 2, 70, 16)]],
    ),
    "attention with a mask": (
        masked,
        [[(2, 4, 3, 16), (2, 2, 9, 16), (3, 9)], [(2, 4, 2, 16), (2, 2, 11, 16), (1, 11)]],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_compiled_for_any_shape_gives_what_mlx_gives(kernels: ModuleType, name: str) -> None:
    call, shapes = CALLS[name]
    compiled = mx.compile(lambda *args: call(kernels, *args), shapeless=True)
    for case in (*shapes, *shapes):
        args = [normal(i, shape) for i, shape in enumerate(case)]
        got, expected = compiled(*args), call(mx, *args)
        assert got.shape == expected.shape
        np.testing.assert_allclose(np.array(got), np.array(expected), rtol=1e-4, atol=1e-5)


def test_a_gathered_product_compiled_for_any_shape(kernels: ModuleType) -> None:
    compiled = mx.compile(lambda x, indices: gathered(kernels, x, indices), shapeless=True)
    for batches, rows, count in ((4, 1, 4), (2, 3, 7), (9, 2, 20), (2, 1, 0), (0, 1, 0)):
        x = normal(5, (batches, rows, 64))
        indices = mx.array(np.arange(count) % max(batches, 1), dtype=mx.uint32)
        got = compiled(x, indices)
        assert np.array(got).shape == (count, rows, 9)
        if count:
            np.testing.assert_allclose(np.array(got), np.array(gathered(mx, x, indices)), rtol=1e-4, atol=1e-4)


EMPTY: dict[str, tuple[Callable[..., mx.array], tuple[int, ...], list[tuple[int, ...]]]] = {
    "rms_norm": (lambda p, x: p.rms_norm(x, None, 1e-5), (3, 8), [(0, 8), (3, 0)]),
    "rope": (lambda p, x: p.rope(x, 8, offset=3, **ROPE), (1, 2, 3, 8), [(0, 2, 3, 8), (1, 0, 3, 8), (1, 2, 0, 8)]),
    "softmax": (lambda p, x: p.softmax(x, axis=-1), (3, 8), [(0, 8), (3, 0)]),
    "logsumexp": (lambda p, x: p.logsumexp(x, axis=-1, keepdims=True), (3, 8), []),
    "silu_mul": (lambda p, x: p.silu_mul(x, x), (3, 8), [(0, 8), (3, 0)]),
    "gelu_mul": (lambda p, x: p.gelu_mul(x, x), (3, 8), [(0, 8), (3, 0)]),
    "quantized_matmul": (quantized, (3, 64), [(0, 64)]),
    "half_matmul": (half, (3, 64), [(0, 64)]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_gives_nothing_in_a_call_compiled_for_something(kernels: ModuleType, name: str) -> None:
    call, traced, empty = EMPTY[name]
    compiled = mx.compile(lambda x: call(kernels, x), shapeless=True)
    mx.eval(compiled(normal(1, traced)))
    for shape in empty:
        assert np.array(compiled(mx.zeros(shape))).size == 0


def test_a_product_compiled_for_nothing_takes_something(kernels: ModuleType) -> None:
    compiled = mx.compile(lambda x: quantized(kernels, x), shapeless=True)
    assert np.array(compiled(mx.zeros((0, 64)))).shape == (0, 9)
    x = normal(1, (3, 64))
    np.testing.assert_array_equal(np.array(compiled(x)), np.array(quantized(kernels, x)))


@pytest.mark.parametrize(
    ("name", "call", "traced", "other"),
    [
        ("rms_norm", lambda p, x, w: p.rms_norm(x, w, 1e-5), [(3, 8), (8,)], [(3, 9), (8,)]),
        ("Mul", lambda p, x, y: p.silu_mul(x, y), [(3, 8), (3, 8)], [(3, 8), (1, 8)]),
        ("empty", lambda p, x: p.logsumexp(x, axis=-1), [(3, 8)], [(3, 0)]),
        ("quantized_matmul", quantized, [(3, 64)], [(3, 96)]),
        ("half_matmul", half, [(3, 64)], [(3, 32)]),
        ("half_matmul", lambda p, x, w: p.half_matmul(x, w), [(3, 64), (5, 64)], [(3, 64), (5, 32)]),
        ("attention", attention, QKV, [QKV[0], QKV[1], (1, 2, 8, 8)]),
        ("attention", attention, QKV, [(1, 6, 3, 16), *QKV[1:]]),
        ("attention", attention, QKV, [QKV[0], (1, 2, 0, 16), (1, 2, 0, 8)]),
        ("attention", masked, [(2, 4, 3, 16), (2, 2, 9, 16), (3, 9)], [(2, 4, 3, 16), (2, 2, 9, 16), (3, 8)]),
    ],
)  # fmt: skip
def test_shapes_that_do_not_go_together_are_refused(
    kernels: ModuleType,
    name: str,
    call: Callable[..., mx.array],
    traced: list[tuple[int, ...]],
    other: list[tuple[int, ...]],
) -> None:
    compiled = mx.compile(lambda *args: call(kernels, *args), shapeless=True)
    mx.eval(compiled(*(normal(1, shape) for shape in traced)))
    with pytest.raises(ValueError, match=name):
        mx.eval(compiled(*(normal(1, shape) for shape in other)))


def test_weights_of_other_rows_are_taken_together_or_refused(kernels: ModuleType) -> None:
    compiled = mx.compile(lambda x, w, s, b: kernels.quantized_matmul(x, w, s, b, **HOW), shapeless=True)
    x, more = normal(1, (3, 64)), mx.quantize(normal(4, (15, 64)), **HOW)
    mx.eval(compiled(x, *PACKED))
    np.testing.assert_allclose(
        np.array(compiled(x, *more)), np.array(mx.quantized_matmul(x, *more, **HOW)), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ValueError, match="no longer fit"):
        mx.eval(compiled(x, more[0], *PACKED[1:]))


def test_calls_that_differ_in_causal_alone_are_not_merged(kernels: ModuleType) -> None:
    q, k = normal(1, (1, 2, 5, 16)), normal(2, (1, 2, 9, 16))

    def both(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
        attend = kernels.scaled_dot_product_attention
        # Outputs themselves are never merged.
        return -attend(q, k, k, scale=0.3), -attend(q, k, k, scale=0.3, mask="causal")

    for got, expected in zip(mx.compile(both)(q, k), both(q, k), strict=True):
        np.testing.assert_array_equal(np.array(got), np.array(expected))
    assert not mx.array_equal(*both(q, k)).item()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"held": [5]}, {"held": [9]}),
        ({"window": 2}, {"window": 3}),
        ({"window": 2}, {}),
    ],
)
def test_steps_that_differ_in_one_number_alone_are_not_merged(
    kernels: ModuleType, first: dict[str, Any], second: dict[str, Any]
) -> None:
    q, k, buffer = normal(1, (2, 4, 1, 16)), normal(2, (2, 2, 1, 16)), normal(3, (1, 2, 20, 16))
    mx.eval(buffer)

    def both(q: mx.array, k: mx.array, buffer: mx.array) -> list[mx.array]:
        outs: list[mx.array] = []
        for options in (first, second):
            options = {"held": [5], "lengths": [2], "scale": 0.3} | options
            outs.append(-kernels.ragged_attention(q, k, k, [(buffer, buffer)], **options)[0])
        return outs

    expected = [np.array(out) for out in both(q, k, buffer)]
    for got, wanted in zip(mx.compile(both)(q, k, buffer), expected, strict=True):
        np.testing.assert_array_equal(np.array(got), wanted)
    assert not np.array_equal(expected[0], expected[1])


def test_a_step_compiled_for_any_shape_takes_buffers_of_any_capacity(kernels: ModuleType) -> None:
    q, k = normal(1, (2, 4, 1, 16)), normal(2, (2, 2, 1, 16))

    def step(q: mx.array, k: mx.array, buffer: mx.array) -> tuple[mx.array, mx.array]:
        out, buffers = kernels.ragged_attention(q, k, k, [(buffer, buffer)], [5], [2], scale=0.3)
        return out, buffers[0][0]

    compiled = mx.compile(step, shapeless=True)
    for capacity in (20, 40, 7):
        buffer = normal(3, (1, 2, capacity, 16))
        for got, expected in zip(compiled(q, k, buffer), step(q, k, buffer), strict=True):
            np.testing.assert_array_equal(np.array(got), np.array(expected))
    with pytest.raises(ValueError, match="no room"):
        mx.eval(compiled(q, k, normal(3, (1, 2, 6, 16))))
    with pytest.raises(ValueError, match="rows"):
        mx.eval(compiled(normal(1, (3, 4, 1, 16)), normal(2, (3, 2, 1, 16)), normal(3, (1, 2, 20, 16))))
