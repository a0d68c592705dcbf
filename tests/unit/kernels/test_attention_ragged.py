"""The engine's step in one kernel: its outputs, the buffers it takes over, and whose content stays as it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.test_attention import LAYOUTS, assert_close, bits, causal, normal, plain, reference

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

Buffers = list[tuple[mx.array, mx.array]]


@dataclass
class Step:
    q: mx.array
    k: mx.array
    v: mx.array
    buffers: Buffers
    held: list[int]
    lengths: list[int]


def step(
    rng: np.random.Generator, held: list[int], lengths: list[int], *, heads: int = 4, kv_heads: int = 2, dim: int = 16,
    v_dim: int = 16, spare: int = 5, dtype: mx.Dtype = mx.float32,
) -> Step:  # fmt: skip
    rows = sum(lengths)
    buffers = [
        (normal(rng, 1, kv_heads, n + more + spare, dim, dtype=dtype),
         normal(rng, 1, kv_heads, n + more + spare, v_dim, dtype=dtype))
        for n, more in zip(held, lengths, strict=True)
    ]  # fmt: skip
    q, k, v = (normal(rng, rows, n, 1, d, dtype=dtype) for n, d in ((heads, dim), (kv_heads, dim), (kv_heads, v_dim)))
    mx.eval(buffers, q, k, v)
    return Step(q, k, v, buffers, held, lengths)


def rows_of(step: Step, x: mx.array, i: int) -> NDArray[np.float32]:
    """The rows of sequence i, [1, heads, length, dim]."""
    begin = sum(step.lengths[:i])
    return plain(x)[begin : begin + step.lengths[i], :, 0].transpose(1, 0, 2)[None]


def updated(step: Step, i: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What the buffers of sequence i have to hold after the step."""
    keys, values = (plain(x).copy() for x in step.buffers[i])
    end = step.held[i] + step.lengths[i]
    keys[:, :, step.held[i] : end], values[:, :, step.held[i] : end] = (
        rows_of(step, step.k, i),
        rows_of(step, step.v, i),
    )
    return keys, values


def assert_right(
    step: Step,
    out: mx.array,
    buffers: Buffers,
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> None:
    for i, (length, held) in enumerate(zip(step.lengths, step.held, strict=True)):
        keys, values = updated(step, i)
        np.testing.assert_array_equal(plain(buffers[i][0]), keys)
        np.testing.assert_array_equal(plain(buffers[i][1]), values)
        end = held + length
        wanted, size = reference(
            rows_of(step, step.q, i), keys[:, :, :end], values[:, :, :end], scale, causal(length, end, window),
            sinks=None if sinks is None else plain(sinks),
        )  # fmt: skip
        begin = sum(step.lengths[:i])
        assert_close(out[begin : begin + length], (wanted.transpose(2, 1, 0, 3), size.transpose(2, 1, 0, 3)))


def run(kernels: ModuleType, step: Step, **options: Any) -> tuple[mx.array, Buffers]:
    return kernels.ragged_attention(step.q, step.k, step.v, step.buffers, step.held, step.lengths, **options)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_batch_agrees_with_float64(kernels: ModuleType, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    count = data.draw(st.integers(1, 4))
    held = [data.draw(st.sampled_from([0, 1, 40, 63, 64, 200, 255, 256, 500])) for _ in range(count)]
    lengths = [data.draw(st.sampled_from([1, 1, 1, 2, 7, 33])) for _ in range(count)]
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 3, 5]))
    dim, v_dim = (data.draw(st.sampled_from([7, 16, 64, 96])) for _ in range(2))
    dtype = data.draw(st.sampled_from([mx.float32, mx.float32, mx.float16, mx.bfloat16]))
    one = step(
        rng, held, lengths, heads=kv_heads * group, kv_heads=kv_heads, dim=dim, v_dim=v_dim, dtype=dtype,
        spare=data.draw(st.integers(0, 9)),
    )  # fmt: skip
    window = data.draw(st.sampled_from([None, 1, 5, 64, 300]))
    sinks = normal(rng, kv_heads * group, dtype=dtype) if data.draw(st.booleans()) else None
    one.q, one.k, one.v = (data.draw(st.sampled_from(LAYOUTS))(x) for x in (one.q, one.k, one.v))
    one.buffers = [
        (data.draw(st.sampled_from(LAYOUTS))(a), data.draw(st.sampled_from(LAYOUTS))(b)) for a, b in one.buffers
    ]
    out, buffers = run(kernels, one, scale=dim**-0.5, window=window, sinks=sinks)
    assert out.shape == (sum(lengths), kv_heads * group, 1, v_dim)
    assert_right(one, out, buffers, scale=dim**-0.5, window=window, sinks=sinks)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_row_has_the_same_bits_in_any_batch_and_chunk(kernels: ModuleType, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    held = [data.draw(st.integers(0, 700)) for _ in range(3)]
    lengths = [1, data.draw(st.integers(2, 130)), 1]
    window = data.draw(st.sampled_from([None, 100]))
    one = step(rng, held, lengths, heads=6, kv_heads=2, dim=64, v_dim=32)
    out, _ = run(kernels, one, scale=0.125, window=window)
    begin = 0
    for i, length in enumerate(lengths):
        keys, values = (mx.array(x) for x in updated(one, i))
        for row in {0, length // 2, length - 1}:
            at = begin + row
            alone, _ = kernels.ragged_attention(
                one.q[at : at + 1], one.k[at : at + 1], one.v[at : at + 1], [(keys, values)], [held[i] + row], [1],
                scale=0.125, window=window,
            )  # fmt: skip
            np.testing.assert_array_equal(bits(out[at]), bits(alone[0]))
        end = held[i] + length
        if window is None:
            q = mx.array(rows_of(one, one.q, i))
            attend = kernels.scaled_dot_product_attention
            same = attend(q, keys[:, :, :end], values[:, :, :end], scale=0.125, mask="causal")
            np.testing.assert_array_equal(bits(out[begin : begin + length]), bits(same.transpose(2, 1, 0, 3)))
        begin += length


def addresses(buffers: Buffers) -> list[int]:
    return [np.array(x, copy=False).__array_interface__["data"][0] for pair in buffers for x in pair]


def test_buffers_that_nobody_else_holds_are_taken_over_for_a_thousand_steps(kernels: ModuleType) -> None:
    rng = np.random.default_rng(0)
    buffers: Buffers = [(mx.zeros((1, 2, 1100, 16)), mx.zeros((1, 2, 1100, 16))) for _ in range(2)]
    mx.eval(buffers)
    before, memory = addresses(buffers), 0
    q, k, v = normal(rng, 2, 4, 1, 16), normal(rng, 2, 2, 1, 16), normal(rng, 2, 2, 1, 16)
    for i in range(1000):
        out, buffers = kernels.ragged_attention(q, k, v, buffers, [i, i + 3], [1, 1], scale=0.25)
        mx.eval(out, buffers)
        memory = memory or mx.get_active_memory()
    assert addresses(buffers) == before
    assert mx.get_active_memory() <= memory
    np.testing.assert_array_equal(plain(buffers[0][0])[0, :, :1000], np.repeat(plain(k)[0], 1000, axis=1))


def test_a_chain_of_unevaluated_steps_takes_them_over_too(kernels: ModuleType) -> None:
    rng = np.random.default_rng(1)
    buffers: Buffers = [(mx.zeros((1, 2, 9, 16)), mx.zeros((1, 2, 9, 16)))]
    steps = [[normal(rng, 1, n, 1, 16) for n in (4, 2, 2)] for _ in range(5)]
    mx.eval(buffers, steps)
    outs: list[mx.array] = []
    for i, (q, k, v) in enumerate(steps):
        out, buffers = kernels.ragged_attention(q, k, v, buffers, [i], [1], scale=0.25)
        outs.append(out)
    mx.eval(outs, buffers)
    keys, values = (np.concatenate([plain(arrays[i]) for arrays in steps], axis=2) for i in (1, 2))
    np.testing.assert_array_equal(plain(buffers[0][0])[:, :, :5], keys)
    for i, (q, _, _) in enumerate(steps):
        assert_close(outs[i], reference(plain(q), keys[:, :, : i + 1], values[:, :, : i + 1], 0.25))


@pytest.mark.parametrize("held_by", ["array", "slice", "twice", "unevaluated"])
def test_whoever_else_holds_a_buffer_goes_on_seeing_what_it_held(kernels: ModuleType, held_by: str) -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        one = step(rng, [3, 3], [1, 2])
        if held_by == "twice":
            one.buffers[1] = one.buffers[0]
        old = [plain(x).copy() for pair in one.buffers for x in pair]
        kept: list[mx.array] = []
        if held_by == "array":
            kept = [x for pair in one.buffers for x in pair]
        elif held_by == "slice":
            kept = [x[:, :, 2:4] for pair in one.buffers for x in pair]
            mx.eval(kept)
        elif held_by == "unevaluated":
            kept = [x * 1.0 for pair in one.buffers for x in pair]
        expected = [updated(one, i) for i in range(2)]
        given_away, one.buffers = one.buffers, []
        out, buffers = kernels.ragged_attention(one.q, one.k, one.v, given_away, one.held, one.lengths, scale=0.25)
        del given_away
        mx.eval(out, buffers)
        mx.eval(kept)
        for i, pair in enumerate(buffers):
            for got, wanted in zip(pair, expected[i], strict=True):
                np.testing.assert_array_equal(plain(got), wanted)
        for x, content in zip(kept, old, strict=held_by == "array"):
            np.testing.assert_array_equal(plain(x), content[:, :, 2:4] if held_by == "slice" else content)


def test_steps_in_flight_do_not_write_into_what_others_read(kernels: ModuleType) -> None:
    rng = np.random.default_rng(3)
    buffers: Buffers = [(mx.zeros((1, 2, 400, 64)), mx.zeros((1, 2, 400, 64)))]
    mx.eval(buffers)
    q, k, v = normal(rng, 1, 4, 1, 64), normal(rng, 1, 2, 1, 64), normal(rng, 1, 2, 1, 64)
    snapshots: list[mx.array] = []
    for i in range(40):
        out, buffers = kernels.ragged_attention(q, k * (i + 1), v, buffers, [300 + i], [1], scale=0.1)
        if i % 7 == 0:
            snapshots.append(buffers[0][0])
        mx.async_eval(out, buffers)
    for i, snapshot in enumerate(snapshots):
        held = plain(snapshot)[0, :, 300:, 0]
        assert (held[:, 7 * i] != 0).all()
        assert (held[:, 7 * i + 1 :] == 0).all()


def test_the_outputs_may_be_asked_for_in_any_order(kernels: ModuleType) -> None:
    rng = np.random.default_rng(4)
    for first in range(3):
        one = step(rng, [5], [2])
        out, buffers = run(kernels, one, scale=0.25)
        mx.eval((out, *buffers[0])[first])
        assert_right(one, out, buffers, scale=0.25)


def test_nan_reaches_only_those_that_see_it(kernels: ModuleType) -> None:
    rng = np.random.default_rng(5)
    one = step(rng, [70, 3], [6, 1])
    keys, values = (plain(x).copy() for x in one.buffers[0])
    keys[:, :, 10], values[:, :, 20] = np.nan, np.inf
    keys[:, :, 76:], values[:, :, 76:] = np.nan, np.nan
    one.buffers[0] = (mx.array(keys), mx.array(values))
    v = plain(one.v).copy()
    v[3] = np.nan
    one.v = mx.array(v)
    out, _ = run(kernels, one, scale=0.25, window=40)
    assert np.isfinite(plain(out)[:3]).all()
    assert np.isnan(plain(out)[3:6]).all()
    assert np.isfinite(plain(out)[6]).all()


def test_gradients_are_those_of_mlx(kernels: ModuleType) -> None:
    rng = np.random.default_rng(6)
    one = step(rng, [4, 0], [2, 3])
    weight = normal(rng, 5, 4, 1, 16)

    def with_mlx(q: mx.array, k: mx.array, v: mx.array, keys: mx.array) -> mx.array:
        outs, begin = [], 0
        for i, length in enumerate(one.lengths):
            rows = slice(begin, begin + length)
            held = (keys, one.buffers[0][1]) if i == 0 else one.buffers[1]
            a, b = (
                mx.concatenate([x[:, :, : one.held[i]], y[rows].transpose(2, 1, 0, 3)], axis=2)
                for x, y in zip(held, (k, v), strict=True)
            )
            query = q[rows].transpose(2, 1, 0, 3)
            out = mx.fast.scaled_dot_product_attention(query, a, b, scale=0.25, mask="causal")
            outs.append(out.transpose(2, 1, 0, 3))
            begin += length
        return (mx.concatenate(outs) * weight).sum()

    def ours(q: mx.array, k: mx.array, v: mx.array, keys: mx.array) -> mx.array:
        buffers = [(keys, one.buffers[0][1]), one.buffers[1]]
        out, _ = kernels.ragged_attention(q, k, v, buffers, one.held, one.lengths, scale=0.25)
        return (out * weight).sum()

    arguments = (one.q, one.k, one.v, one.buffers[0][0])
    for a, b in zip(*(mx.grad(f, argnums=[0, 1, 2, 3])(*arguments) for f in (ours, with_mlx)), strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [1, 1]}, "rows"),
        ({"lengths": [3, 0]}, "at least 1 row"),
        ({"lengths": [3]}, "of one length"),
        ({"held": [-1, 0]}, "negative"),
        ({"held": [2**31 - 1, 0]}, "no room"),
        ({"held": [9, 0]}, "no room"),
        ({"window": 0}, "window"),
        ({"sinks": mx.zeros((3,))}, "sinks"),
        ({"q": mx.zeros((3, 4, 2, 16))}, "heads, 1, dim"),
        ({"q": mx.zeros((3, 3, 1, 16))}, "multiple"),
        ({"q": mx.zeros((3, 4, 1, 15))}, "head dim"),
        ({"k": mx.zeros((2, 2, 1, 16))}, "same number of rows"),
        ({"v": mx.zeros((3, 2, 1, 16), mx.int32)}, "dtype"),
        ({"v": mx.zeros((3, 2, 1, 8))}, "buffer"),
        ({"buffers": [(mx.zeros((1, 2, 9, 16)), mx.zeros((1, 2, 1, 16)))] * 2}, "no room"),
        ({"buffers": [(mx.zeros((1, 2, 9, 16)), mx.zeros((2, 9, 16)))] * 2}, "buffer"),
        ({"buffers": [(mx.zeros((1, 2, 9, 16)), mx.zeros((1, 2, 9, 16), mx.float16))] * 2}, "dtype"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kernels: ModuleType, change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": mx.zeros((3, 4, 1, 16)), "k": mx.zeros((3, 2, 1, 16)), "v": mx.zeros((3, 2, 1, 16)),
        "buffers": [(mx.zeros((1, 2, 9, 16)), mx.zeros((1, 2, 9, 16)))] * 2, "held": [0, 0], "lengths": [2, 1],
        "window": None, "sinks": None,
    }  # fmt: skip
    arguments |= change
    q, k, v = (arguments.pop(n) for n in "qkv")
    with pytest.raises(ValueError, match=message):
        kernels.ragged_attention(q, k, v, **arguments, scale=1.0)


@pytest.mark.parametrize("place", [0, 31, 32, 39])
def test_nan_in_a_hidden_value_stays_there(kernels: ModuleType, place: int) -> None:
    rng = np.random.default_rng(7)
    one = step(rng, [70], [3], dim=40, v_dim=40)
    keys, values = (plain(x).copy() for x in one.buffers[0])
    for x in (keys, values):
        x[:, :, 10, place], x[:, :, 75, place] = np.nan, np.inf
    one.buffers[0] = (mx.array(keys), mx.array(values))
    out, _ = run(kernels, one, scale=0.25, window=40)
    assert np.isfinite(plain(out)).all()


def test_a_buffer_that_lies_in_another_order_is_not_taken_over(kernels: ModuleType) -> None:
    rng = np.random.default_rng(8)
    one = step(rng, [40], [2])
    keys, values = one.buffers[0]
    swapped = [mx.contiguous(x.transpose(0, 2, 1, 3)) for x in (keys, values)]
    mx.eval(swapped)
    # Sums that nobody holds, whose memory an operation may use again.
    given = [((swapped[0] + 0).transpose(0, 2, 1, 3), (swapped[1] + 0).transpose(0, 2, 1, 3))]
    out, buffers = kernels.ragged_attention(one.q, one.k, one.v, given, one.held, one.lengths, scale=0.25)
    del given
    mx.eval(out, buffers)
    assert_right(one, out, buffers, scale=0.25)


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_gradient_is_right_where_outputs_are_evaluated_on_the_way(kernels: ModuleType, asked: int) -> None:
    rng = np.random.default_rng(9)
    one = step(rng, [4, 0], [2, 3])

    def loss(evaluate: bool) -> Any:
        def function(q: mx.array, k: mx.array, v: mx.array, keys: mx.array) -> mx.array:
            held = [(keys, one.buffers[0][1]), one.buffers[1]]
            out, buffers = kernels.ragged_attention(q, k, v, held, one.held, one.lengths, scale=0.25)
            if evaluate:
                mx.eval((out, buffers[0][0], buffers[1][1])[asked])
            return (out * out).sum() + (buffers[0][0] * buffers[0][0]).sum()

        return function

    arguments = (one.q, one.k, one.v, one.buffers[0][0])
    got, expected = (mx.grad(loss(evaluate), argnums=[0, 1, 2, 3])(*arguments) for evaluate in (True, False))
    for a, b in zip(got, expected, strict=True):
        assert np.abs(np.array(b)).max() > 0
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-5, atol=1e-6)
