"""Attention of a batch's rows, each over its own sequence's keys: row by row, or for all of them in one kernel."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer import kernels
from mlxinfer.engine.kv import SeqKV
from mlxinfer.engine.quantized import QuantizedKV
from mlxinfer.upstream import create_causal_mask

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    Lengths = list[int] | None


def by_sequence(array: mx.array, rows: Seq[SeqKV], lengths: Lengths) -> list[mx.array]:
    """[R, heads, L, dim] as one [1, heads, L', dim] per sequence; with `lengths`, L is 1 and L' the sequence's."""
    if lengths is None:
        return list(mx.split(array, len(rows)))
    parts = mx.split(array, list(accumulate(lengths[:-1])))
    return [part if part.shape[0] == 1 else mx.swapaxes(part, 0, 2) for part in parts]


def attend(
    queries: mx.array,
    rows: Seq[SeqKV],
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    lengths: Lengths = None,
) -> mx.array:
    """Queries [B, heads, L, head_dim], row b over the keys of rows[b] → [B, heads, L, value_dim].

    With `lengths`, L is 1 and sequence i has the next lengths[i] rows of the batch.
    """
    attention = mx.fast.scaled_dot_product_attention
    out: list[mx.array] = []
    for query, row in zip(by_sequence(queries, rows, lengths), rows, strict=True):
        length = query.shape[2]
        if length == 1 and window is None and type(row) is SeqKV:
            out.append(attention(query, *row.view(1), scale=scale, sinks=sinks))
            continue
        if length == 1 and isinstance(row, QuantizedKV):
            out.append(row.attend(query, scale=scale, window=window, sinks=sinks))
            continue
        keys, values = row.view(length)
        if window is not None:
            seen = min(keys.shape[2], window - 1 + length)
            keys, values = keys[..., -seen:, :], values[..., -seen:, :]
        limit = window or row.window
        mask: Any = None
        if length > 1:
            before = keys.shape[2] - length
            windowed = limit is not None and keys.shape[2] > limit
            mask = create_causal_mask(length, before, window_size=limit) if windowed else "causal"
        one = attention(query, keys, values, scale=scale, mask=mask, sinks=sinks)
        out.append(one if lengths is None or length == 1 else mx.swapaxes(one, 0, 2))
    return mx.concatenate(out, axis=0) if len(out) > 1 else out[0]


def one_kernel_serves(rows: Seq[SeqKV]) -> bool:
    """Whether `append_and_attend` can take these rows: on a CPU with the kernels, keys that aren't packed."""
    return kernels.kernel("ragged_attention") is not None and all(type(row) is SeqKV for row in rows)


def append_and_attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    rows: Seq[SeqKV],
    *,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
    lengths: Lengths = None,
) -> mx.array:
    """Append keys and values [R, kv_heads, 1, dim] to `rows` and attend from queries [R, heads, 1, head_dim], at once.

    Returns [R, heads, 1, value_dim]. With `lengths`, sequence i has the next lengths[i] of the R rows.
    """
    kernel = kernels.kernel("ragged_attention")
    assert kernel is not None
    counts = lengths or [1] * len(rows)
    held = [row.reserve(count, [keys, values]) for row, count in zip(rows, counts, strict=True)]
    buffers = [tuple(row.buffers()) for row in rows]
    limit = window if window is not None else rows[0].window
    out, written = kernel(queries, keys, values, buffers, held, counts, scale=scale, window=limit, sinks=sinks)
    for row, count, pair in zip(rows, counts, written, strict=True):
        row.keys, row.values = pair
        row.end += count
    return out
