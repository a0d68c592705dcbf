"""What each kernel is tried on, and what mlx gives for it without kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlxinfer.kernels.calls import ORIGINAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def _whole(result: mx.array) -> mx.array:
    return result


@dataclass(frozen=True, slots=True)
class Case:
    """One call."""

    label: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    part: Callable[[mx.array], mx.array] = _whole
    """What of each result is defined."""


def _random(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    # A key of its own: a user's mx.random.seed gives the same numbers with kernels and without.
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _rms_norm() -> Iterator[Case]:
    for dtype in DTYPES:
        x, weight = _random(1, 3, 5, 97, dtype=dtype), _random(2, 97, dtype=dtype)
        yield Case(f"{dtype}", (x, weight, 1e-5))
        yield Case(f"{dtype}, no weight", (x, None, 1e-6))


def _rope() -> Iterator[Case]:
    for dtype in DTYPES:
        x = _random(1, 2, 7, 3, 40, dtype=dtype).transpose(0, 2, 1, 3)
        plain = {"traditional": False, "base": 10000.0, "scale": 1.0, "offset": 5}
        yield Case(f"{dtype}", (x, 40), plain)
        yield Case(f"{dtype}, traditional, part of the head", (x, 32), plain | {"traditional": True, "scale": 0.5})
        yield Case(f"{dtype}, an offset per row", (x, 40), plain | {"offset": mx.array([3, 11])})
        frequencies = mx.exp(mx.arange(20) / 4.0)
        yield Case(f"{dtype}, own frequencies", (x, 40), plain | {"base": None, "freqs": frequencies})


def _attention() -> Iterator[Case]:
    for dtype in DTYPES:
        q, k, v = (
            _random(i, 2, heads, length, 40, dtype=dtype) for i, heads, length in ((1, 6, 5), (2, 2, 83), (3, 2, 83))
        )
        yield Case(f"{dtype}", (q, k, v), {"scale": 0.15})
        yield Case(f"{dtype}, causal", (q, k, v), {"scale": 0.15, "mask": "causal"})
        yield Case(f"{dtype}, one query", (q[:, :, :1], k, v), {"scale": 0.15})
        added = _random(4, 2, 1, 5, 83, dtype=dtype)
        yield Case(f"{dtype}, additive mask", (q, k, v), {"scale": 0.15, "mask": added})
        kept = mx.arange(83)[None] <= mx.arange(5)[:, None] * 20
        yield Case(f"{dtype}, boolean mask", (q, k, v), {"scale": 0.15, "mask": kept})
        yield Case(f"{dtype}, sinks", (q, k, v), {"scale": 0.15, "sinks": _random(5, 6, dtype=dtype)})
    # More keys than a span: one query is split over them, several aren't.
    k, v = _random(6, 1, 2, 600, 40), _random(7, 1, 2, 600, 40)
    for queries in (1, 5):
        q = _random(8, 1, 6, queries, 40)
        more = {"scale": 0.15, "mask": "causal", "sinks": _random(5, 6)}
        yield Case(f"{queries} queries, 600 keys", (q, k, v), more)


FORMATS = [
    *(("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
]
ROWS = (1, 5, 13)
"""One row, a few and many are three paths through a product."""
DEEP = 704
"""Inputs enough for more than one stretch of the depth."""


def _packed(seed: int, mode: str, bits: int, group: int, dtype: mx.Dtype, *shape: int) -> tuple[mx.array, ...]:
    return tuple(mx.quantize(_random(seed, *shape, dtype=dtype), group_size=group, bits=bits, mode=mode))


def _quantized_matmul() -> Iterator[Case]:
    for mode, bits, group in FORMATS:
        for dtype in DTYPES if (bits, group) == (4, 32) else DTYPES[:1]:
            # 19 outputs and 256 inputs: no tile comes out even, every group size fits.
            packed = _packed(1, mode, bits, group, dtype, 19, 256)
            options = {"group_size": group, "bits": bits, "mode": mode, "transpose": True}
            for rows in ROWS:
                x = _random(2, rows, 256, dtype=dtype)
                yield Case(f"{mode} {bits}-bit, group {group}, {dtype}, {rows} rows", (x, *packed), options)
    for mode, bits, group in (("affine", 4, 64), ("affine", 8, 64), ("mxfp8", 8, 32)):
        packed = _packed(3, mode, bits, group, mx.float32, 19, DEEP)
        options = {"group_size": group, "bits": bits, "mode": mode, "transpose": True}
        for rows in ROWS:
            yield Case(f"{mode} {bits}-bit, {DEEP} inputs, {rows} rows", (_random(4, rows, DEEP), *packed), options)


def _gather_qmm() -> Iterator[Case]:
    # 1 row for matrix 0, 5 for matrix 1, 13 for matrix 3.
    spread = mx.array([0] + [1] * 5 + [3] * 13, dtype=mx.uint32)
    for mode, bits, group in (("affine", 4, 64), ("affine", 8, 32), ("mxfp4", 4, 32), ("mxfp8", 8, 32)):
        w, scales, *rest = _packed(1, mode, bits, group, mx.float32, 4, 19, 128)
        options = {"group_size": group, "bits": bits, "mode": mode, "transpose": True}
        options |= {"rhs_indices": mx.array([[0, 3], [2, 2], [1, 0]], dtype=mx.uint32)}
        x = _random(2, 3, 1, 1, 128)
        yield Case(f"{mode} {bits}-bit, group {group}", (x, w, scales, *(rest or [None])), options)
        x = _random(3, len(spread), 1, 128)
        more = options | {"rhs_indices": spread, "sorted_indices": True}
        yield Case(f"{mode} {bits}-bit, many rows", (x, w, scales, *(rest or [None])), more)


def _last_axis() -> Iterator[Case]:
    for dtype in DTYPES:
        x = _random(1, 3, 1003, dtype=dtype) * 4
        yield Case(f"{dtype}", (x,), {"axis": -1})
    x = _random(2, 3, 1003)
    yield Case("some minus infinity", (mx.where(x > 0, x, -mx.inf),), {"axis": -1})
    yield Case("a row of several spans", (_random(3, 2, 9001) * 4,), {"axis": -1})


def _two_alike() -> Iterator[Case]:
    for dtype in DTYPES:
        yield Case(f"{dtype}", (_random(1, 3, 203, dtype=dtype) * 4, _random(2, 3, 203, dtype=dtype)))


def _half_matmul() -> Iterator[Case]:
    for dtype in DTYPES:
        # 131 inputs go to mlx, which the kernels' blocks don't divide.
        for rows, depth in (*((rows, depth) for depth in (160, DEEP) for rows in ROWS), (1, 131)):
            x, w = _random(1, rows, depth), _random(2, 19, depth, dtype=dtype)
            yield Case(f"{dtype}, {rows} rows, {depth} inputs", (x, w))


def _ragged_attention() -> Iterator[Case]:
    held, lengths = [5, 70, 0], [1, 3, 2]
    rows, capacity = sum(lengths), 96
    for dtype in DTYPES:
        q, k, v = (_random(i, rows, heads, 1, 40, dtype=dtype) for i, heads in ((1, 6), (2, 2), (3, 2)))
        buffers = [
            tuple(_random(first + s, 1, 2, capacity, 40, dtype=dtype) for first in (10, 20)) for s in range(len(held))
        ]
        options = ("all keys", {}), ("window", {"window": 16}), ("sinks", {"sinks": _random(4, 6, dtype=dtype)})
        for label, more in options[: 3 if dtype == mx.float32 else 1]:
            yield Case(f"{dtype}, {label}", (q, k, v, buffers, held, lengths), {"scale": 0.15} | more)
    # One query over more keys than a span.
    q, k, v = (_random(i, 1, heads, 1, 40) for i, heads in ((1, 6), (2, 2), (3, 2)))
    buffers = [(_random(10, 1, 2, 610, 40), _random(20, 1, 2, 610, 40))]
    yield Case("600 keys", (q, k, v, buffers, [600], [1]), {"scale": 0.15, "sinks": _random(4, 6)})


def _plain_ragged_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    buffers: list[tuple[mx.array, mx.array]],
    held: list[int],
    lengths: list[int],
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, list[tuple[mx.array, mx.array]]]:
    """Rows [R, H, 1, D] of S sequences: their new keys are written, then each row looks at those up to its own."""
    attention = ORIGINAL["scaled_dot_product_attention"]
    outputs: list[mx.array] = []
    new: list[tuple[mx.array, mx.array]] = []
    begin = 0
    for (keys, values), before, length in zip(buffers, held, lengths, strict=True):
        rows, end = slice(begin, begin + length), before + length
        # [L, KH, 1, D] → [1, KH, L, D]
        keys = mx.slice_update(keys, k[rows].transpose(2, 1, 0, 3), mx.array(before), axes=(2,))
        values = mx.slice_update(values, v[rows].transpose(2, 1, 0, 3), mx.array(before), axes=(2,))
        new.append((keys, values))
        for i in range(length):
            last = before + i + 1
            first = 0 if window is None else max(0, last - window)
            seen = slice(first, last)
            outputs.append(
                attention(q[begin + i][None], keys[:, :, seen], values[:, :, seen], scale=scale, sinks=sinks)
            )
        begin += length
        assert end <= keys.shape[2]
    return mx.concatenate(outputs), new


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "scaled_dot_product_attention": _attention,
    "quantized_matmul": _quantized_matmul,
    "gather_qmm": _gather_qmm,
    "logsumexp": _last_axis,
    "softmax": _last_axis,
    "silu_mul": _two_alike,
    "gelu_mul": _two_alike,
    "half_matmul": _half_matmul,
    "ragged_attention": _ragged_attention,
}
"""Kernel → its calls, made afresh each time: on the thread that makes them."""

PLAIN: dict[str, Callable[..., Any]] = ORIGINAL | {
    "silu_mul": lambda gate, x: nn.silu(gate) * x,
    "gelu_mul": lambda gate, x: nn.gelu_approx(gate) * x,
    "half_matmul": lambda x, w: x @ w.astype(mx.float32).T,
    "ragged_attention": _plain_ragged_attention,
}
"""Kernel → the same out of mlx's own operations."""
