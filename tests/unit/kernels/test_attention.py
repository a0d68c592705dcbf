"""Attention against a float64 reference, mlx's own gradients, and itself in other batches and chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from numpy.typing import NDArray

BLOCK, SPAN = 64, 256
"""Where the kernel's loops over keys end: lengths on both sides of these are worth a test."""
KEY_COUNTS = [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 100, SPAN - 1, SPAN, SPAN + 1, 600]
HEAD_DIMS = [1, 5, 16, 33, 64, 80, 96, 128, 192, 256]
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}


def reference(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], scale: float, visible: NDArray[np.bool_] | None = None,
    added: NDArray[Any] | None = None, sinks: NDArray[Any] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # fmt: skip
    """The output and the scale of its rounding error, in float64. Hidden keys are left out; a query that sees none gets
    equal weights on all values, as in mlx.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out, size = (np.zeros((*q.shape[:3], v.shape[-1])) for _ in range(2))
    for b, h, i in np.ndindex(*q.shape[:3]):
        keys, values = k[b, h // group], v[b, h // group]
        scores = keys @ q[b, h, i] * scale
        if added is not None:
            scores = scores + np.broadcast_to(added, (*q.shape[:3], k.shape[2]))[b, h, i]
        if visible is not None:
            seen = np.broadcast_to(visible, (*q.shape[:3], k.shape[2]))[b, h, i]
            if not seen.any() and sinks is None:
                scores = np.zeros_like(scores)
            else:
                scores, values = scores[seen], values[seen]
        logits = scores if sinks is None else np.append(scores, np.float64(sinks[h]))
        with np.errstate(invalid="ignore"):
            weights = np.exp(logits - logits.max())
            weights = (weights / weights.sum())[: len(scores)]
            out[b, h, i], size[b, h, i] = weights @ values, weights @ np.abs(values)
    return out, size


def causal(queries: int, keys: int, window: int | None = None) -> NDArray[np.bool_]:
    own = np.arange(keys - queries, keys)[:, None]
    seen = np.arange(keys)[None] <= own
    return seen if window is None else seen & (np.arange(keys)[None] > own - window)


def assert_close(out: mx.array, expected: tuple[NDArray[np.float64], NDArray[np.float64]]) -> None:
    got = np.array(out.astype(mx.float32), np.float64)
    wanted, size = expected
    assert got.shape == wanted.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    error = np.abs(got - wanted).max(-1) / np.maximum(size.max(-1), 1e-30)
    assert np.nanmax(error, initial=0) <= TOLERANCE[out.dtype]


def bits(out: mx.array) -> NDArray[np.uint32]:
    return np.array(out.astype(mx.float32)).view(np.uint32)


def normal(rng: np.random.Generator, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def flags(x: NDArray[np.bool_]) -> mx.array:
    return mx.array(x.tolist())


def plain(x: mx.array) -> NDArray[np.float32]:
    return np.array(x.astype(mx.float32))


def transposed(x: mx.array) -> mx.array:
    return mx.contiguous(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def in_a_buffer(x: mx.array) -> mx.array:
    return mx.pad(x, [(0, 0), (0, 0), (0, 37), (0, 0)], constant_values=mx.array(float("nan")))[:, :, : x.shape[2]]


def every_second(x: mx.array) -> mx.array:
    return mx.repeat(x, 2, axis=-1)[..., ::2]


LAYOUTS: list[Callable[[mx.array], mx.array]] = [lambda x: x, transposed, in_a_buffer, every_second]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_shape_mask_and_layout_agrees_with_float64(kernels: ModuleType, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    batch, kv_heads, group = (data.draw(st.integers(1, n)) for n in (2, 3, 4))
    queries = data.draw(st.sampled_from([1, 2, 3, 7, 8, 30, 50]))
    keys = data.draw(st.sampled_from(KEY_COUNTS))
    dim, v_dim = data.draw(st.sampled_from(HEAD_DIMS)), data.draw(st.sampled_from(HEAD_DIMS))
    dtype = data.draw(st.sampled_from([mx.float32, mx.float32, mx.float16, mx.bfloat16]))
    heads = kv_heads * group
    q, k, v = (
        data.draw(st.sampled_from(LAYOUTS))(normal(rng, batch, *shape, dtype=dtype))
        for shape in ((heads, queries, dim), (kv_heads, keys, dim), (kv_heads, keys, v_dim))
    )
    sinks = normal(rng, heads, dtype=dtype) if data.draw(st.booleans()) else None
    mask: mx.array | str | None = None
    visible, added = None, None
    kind = data.draw(st.sampled_from(["none", "causal", "bool", "added"]))
    if kind == "causal":
        mask, visible = "causal", causal(queries, keys)
    elif kind != "none":
        full = (batch, heads, queries, keys)
        start = data.draw(st.integers(0, 3))
        shape = [n if data.draw(st.booleans()) else 1 for n in full[start:]]
        if kind == "bool":
            visible = rng.random(shape) < data.draw(st.sampled_from([0.05, 0.5, 0.95]))
            mask = flags(visible)
        else:
            mask = normal(rng, *shape, dtype=dtype)
            added = plain(mask)
    out = kernels.scaled_dot_product_attention(q, k, v, scale=dim**-0.5, mask=mask, sinks=sinks)
    assert out.dtype == dtype
    small = None if sinks is None else plain(sinks)
    assert_close(out, reference(plain(q), plain(k), plain(v), dim**-0.5, visible, added, small))


@pytest.mark.parametrize("dim", [64, 96, 80])
def test_a_long_prompt_agrees_with_float64(kernels: ModuleType, dim: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v = normal(rng, 1, 3, 200, dim), normal(rng, 1, 1, 700, dim), normal(rng, 1, 1, 700, dim)
    out = kernels.scaled_dot_product_attention(q, k, v, scale=dim**-0.5, mask="causal")
    assert_close(out, reference(plain(q), plain(k), plain(v), dim**-0.5, causal(200, 700)))


@pytest.mark.parametrize("spread", [1.0, 30.0, 1e4])
def test_large_scores_neither_overflow_nor_lose_the_maximum(kernels: ModuleType, spread: float) -> None:
    rng = np.random.default_rng(1)
    # Scores of small integers are exact in float32, so that only the softmax is tested.
    q = mx.array(rng.integers(-2, 3, (1, 2, 9, 16)).astype(np.float32))
    k = mx.array(rng.integers(-2, 3, (1, 2, 300, 16)).astype(np.float32))
    v = normal(rng, 1, 2, 300, 16)
    out = kernels.scaled_dot_product_attention(q, k, v, scale=spread)
    assert_close(out, reference(plain(q), plain(k), plain(v), spread))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_query_alone_has_the_bits_it_has_in_a_chunk(kernels: ModuleType, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    group, dim, v_dim = (data.draw(st.sampled_from(x)) for x in ([1, 2, 3, 5, 8], [16, 33, 64, 128], [16, 40, 64]))
    keys = data.draw(st.sampled_from([70, 256, 300, 900]))
    queries = data.draw(st.integers(2, min(keys, 150)))
    dtype = data.draw(st.sampled_from([mx.float32, mx.bfloat16]))
    q = normal(rng, 2, group * 2, queries, dim, dtype=dtype)
    k, v = normal(rng, 2, 2, keys, dim, dtype=dtype), normal(rng, 2, 2, keys, v_dim, dtype=dtype)
    attend = kernels.scaled_dot_product_attention
    chunk = bits(attend(q, k, v, scale=0.1, mask="causal"))
    for i in {0, 1, queries // 2, queries - 1}:
        end = keys - queries + i + 1
        alone = attend(q[1:, :, i : i + 1], k[1:, :, :end], v[1:, :, :end], scale=0.1)
        np.testing.assert_array_equal(chunk[1:, :, i : i + 1], bits(alone))


def test_a_sequence_has_the_same_bits_in_any_batch(kernels: ModuleType) -> None:
    rng = np.random.default_rng(2)
    q, k, v = normal(rng, 9, 6, 1, 64), normal(rng, 9, 2, 3000, 64), normal(rng, 9, 2, 3000, 64)
    attend = kernels.scaled_dot_product_attention
    together = bits(attend(q, k, v, scale=0.125))
    for i in range(9):
        # Alone it is split over its keys, in the batch it isn't.
        np.testing.assert_array_equal(
            together[i : i + 1], bits(attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], scale=0.125))
        )


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_nan_and_inf_reach_those_that_see_them(kernels: ModuleType, where: str, bad: float, mask: str | None) -> None:
    rng = np.random.default_rng(3)
    arrays = {"q": plain(normal(rng, 1, 4, 20, 32)), **{n: plain(normal(rng, 1, 2, 90, 32)) for n in ("k", "v")}}
    arrays[where][0, 1, 13, 5] = bad
    arrays[where][0, 1, -2, 7] = bad
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    out = kernels.scaled_dot_product_attention(mx.array(q), mx.array(k), mx.array(v), scale=0.2, mask=mask)
    with np.errstate(invalid="ignore"):
        wanted, _ = reference(q, k, v, 0.2, causal(20, 90) if mask else None)
    got = np.array(out)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    finite = ~np.isnan(wanted)
    np.testing.assert_allclose(got[finite], wanted[finite], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 2, 40])
def test_hidden_keys_and_values_may_be_nan(kernels: ModuleType, queries: int) -> None:
    rng = np.random.default_rng(4)
    q, k, v = (
        plain(normal(rng, 1, 2, queries, 16)),
        plain(normal(rng, 1, 1, 100, 16)),
        plain(normal(rng, 1, 1, 100, 16)),
    )
    visible = rng.random((queries, 100)) < 0.5
    visible[:, [3, 77]] = False
    visible[0, 77] = True
    k[0, 0, 3], v[0, 0, 3], v[0, 0, 77] = np.nan, np.inf, np.nan
    out = kernels.scaled_dot_product_attention(mx.array(q), mx.array(k), mx.array(v), scale=0.3, mask=flags(visible))
    wanted, _ = reference(q, k, v, 0.3, visible)
    assert np.isnan(wanted[0, :, 0]).all()
    assert np.isfinite(wanted[:, :, 1:]).all()
    np.testing.assert_allclose(np.array(out), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("case", ["bool", "causal", "added"])
def test_a_query_that_sees_nothing_gets_what_mlx_gives(kernels: ModuleType, case: str, dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (normal(rng, 1, 2, n, 16, dtype=dtype) for n in (9, 7, 7))
    mask: Any = "causal"
    if case == "bool":
        mask = flags(np.arange(9)[:, None] > np.arange(7)[None])
    elif case == "added":
        mask = mx.where(mx.arange(9)[:, None] > 2, mx.array(0.0), mx.array(-float("inf"))).astype(dtype)
    for sinks in (None, normal(rng, 2, dtype=dtype)):
        out = kernels.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask, sinks=sinks)
        own = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask, sinks=sinks)
        np.testing.assert_allclose(plain(out), plain(own), rtol=3e-3, atol=3e-3 if dtype == mx.float16 else 1e-6)


@pytest.mark.parametrize("sink", [float("nan"), float("inf"), -float("inf")])
def test_sinks_that_are_not_finite_do_what_they_do_in_mlx(kernels: ModuleType, sink: float) -> None:
    rng = np.random.default_rng(6)
    q, k, v = (normal(rng, 1, 2, n, 16) for n in (3, 70, 70))
    sinks = mx.array([sink, 0.5])
    out = kernels.scaled_dot_product_attention(q, k, v, scale=0.25, sinks=sinks)
    own = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, sinks=sinks)
    np.testing.assert_allclose(np.array(out), np.array(own), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", [None, "causal", "bool", "added"])
def test_gradients_are_those_of_mlx(kernels: ModuleType, mask: str | None) -> None:
    rng = np.random.default_rng(7)
    q, k, v, weight = (normal(rng, 1, h, n, 16) for h, n in ((4, 5), (2, 11), (2, 11), (4, 5)))
    sinks = normal(rng, 4)
    array = {"bool": flags(causal(5, 11)), "added": normal(rng, 5, 11)}
    chosen = array.get(mask, mask) if mask else None

    def loss(attend: Callable[..., mx.array]) -> Callable[..., mx.array]:
        return lambda q, k, v, s: (attend(q, k, v, scale=0.25, mask=chosen, sinks=s) * weight).sum()

    ours, own = (
        mx.grad(loss(attend), argnums=[0, 1, 2, 3])(q, k, v, sinks)
        for attend in (kernels.scaled_dot_product_attention, mx.fast.scaled_dot_product_attention)
    )
    for a, b in zip(ours, own, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-4, atol=1e-6)


def test_vmap_and_compile_work(kernels: ModuleType) -> None:
    rng = np.random.default_rng(8)
    q, k, v = normal(rng, 3, 1, 4, 5, 16), normal(rng, 3, 1, 2, 11, 16), normal(rng, 3, 1, 2, 11, 16)

    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return kernels.scaled_dot_product_attention(q, k, v, scale=0.25, mask="causal")

    one_by_one = mx.stack([attend(q[i], k[i], v[i]) for i in range(3)])
    np.testing.assert_allclose(np.array(mx.vmap(attend)(q, k, v)), np.array(one_by_one), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(bits(mx.compile(attend)(q[0], k[0], v[0])), bits(one_by_one[0]))


def test_mixed_dtypes_are_promoted_as_in_mlx(kernels: ModuleType) -> None:
    rng = np.random.default_rng(9)
    q, k, v = normal(rng, 1, 2, 3, 16), normal(rng, 1, 2, 9, 16, dtype=mx.bfloat16), normal(rng, 1, 2, 9, 16)
    mask = mx.array(rng.integers(-3, 3, (3, 9)).astype(np.int32))
    out = kernels.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask)
    own = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=mask)
    assert out.dtype == own.dtype == mx.float32
    np.testing.assert_allclose(np.array(out), np.array(own), rtol=1e-4, atol=1e-6)


Q, K = (1, 4, 3, 16), (1, 2, 9, 16)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ((Q[1:], K, K), {}),
        ((Q, (1, 3, 9, 16), (1, 3, 9, 16)), {}),
        ((Q, K, (1, 2, 8, 16)), {}),
        ((Q, (2, 2, 9, 16), K), {}),
        ((Q, (1, 2, 9, 15), K), {}),
        ((Q, K, K), {"mask": "window"}),
        ((Q, K, K), {"mask": mx.zeros((2, 9))}),
        ((Q, K, K), {"mask": mx.zeros((1, 1, 1, 3, 9))}),
        ((Q, K, K), {"mask": mx.zeros((3, 9), mx.complex64)}),
        ((Q, K, K), {"sinks": mx.zeros((3,))}),
        ((Q, K, K), {"force_fused": True}),
    ],
)
def test_invalid_arguments_raise_what_mlx_raises(
    kernels: ModuleType, shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]
) -> None:
    raised = []
    for attend in (kernels.scaled_dot_product_attention, mx.fast.scaled_dot_product_attention):
        try:
            mx.eval(attend(*(mx.ones(s) for s in shapes), scale=1.0, **options))
        except ValueError as error:
            raised.append(str(error))
    # mlx doesn't look at every argument; what it takes is for it to answer.
    assert len(raised) in (0, 2)
    assert len(set(raised)) <= 1


@pytest.mark.parametrize("queries", [1, 3])
def test_sinks_count_where_a_query_is_split_over_its_keys(kernels: ModuleType, queries: int) -> None:
    rng = np.random.default_rng(10)
    q, k, v = normal(rng, 1, 2, queries, 32), normal(rng, 1, 1, 8192, 32), normal(rng, 1, 1, 8192, 32)
    sinks = mx.array([9.0, -1.0])
    out = kernels.scaled_dot_product_attention(q, k, v, scale=0.2, sinks=sinks)
    assert_close(out, reference(plain(q), plain(k), plain(v), 0.2, sinks=plain(sinks)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("place", [0, 31, 32, 39])
def test_any_element_of_a_hidden_value_may_be_nan(kernels: ModuleType, bad: float, queries: int, place: int) -> None:
    rng = np.random.default_rng(11)
    q, k, v = (plain(normal(rng, 1, 1, n, 40)) for n in (queries, 70, 70))
    visible = rng.random((queries, 70)) < 0.5
    visible[:, 3], visible[:, 5] = False, True
    k[0, 0, 3, place] = v[0, 0, 3, place] = bad
    out = kernels.scaled_dot_product_attention(mx.array(q), mx.array(k), mx.array(v), scale=0.3, mask=flags(visible))
    k[0, 0, 3], v[0, 0, 3] = 0, 0
    assert_close(out, reference(q, k, v, 0.3, visible))


@pytest.mark.parametrize("place", [0, 31, 32, 39])
def test_any_element_of_a_seen_value_that_is_nan_shows(kernels: ModuleType, place: int) -> None:
    rng = np.random.default_rng(12)
    for queries in (1, 3, 40):
        q, k, v = (plain(normal(rng, 1, 1, n, 40)) for n in (queries, 70, 70))
        v[0, 0, 3, place] = np.nan
        out = plain(kernels.scaled_dot_product_attention(mx.array(q), mx.array(k), mx.array(v), scale=0.3))
        assert np.isnan(out[..., place]).all()
        assert np.isfinite(np.delete(out, place, -1)).all()
