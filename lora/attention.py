"""Attention of a training step in blocks of queries: a causal block sees no keys behind it, so they aren't computed.

That leaves half of the [width, width] scores of each head; while layers are recomputed, blocks are too, and only one
block's scores are alive at a time.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer import upstream

if TYPE_CHECKING:
    from collections.abc import Iterator

QUERY_BLOCK = 128
"""Queries of a block; more than a block and a half of them are cut."""


class _State(threading.local):
    blocks = False
    recompute = False


_state = _State()


@contextlib.contextmanager
def in_blocks(*, recompute: bool = False) -> Iterator[None]:
    """Inside, on this thread, attention without a cache goes by blocks; with `recompute` each is computed again going
    back, for which the gradient must be taken inside.
    """
    before = _state.blocks, _state.recompute
    _state.blocks, _state.recompute = True, recompute or before[1]
    upstream.route_attention(_takes, _attend)
    try:
        yield
    finally:
        _state.blocks, _state.recompute = before


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
    window: int | None = None,
) -> mx.array:
    """As mlx-lm's, [rows, heads, width, head_dim]; in blocks where that is asked for and worth while.

    `window`, with a causal mask only, is how many keys a query sees.
    """
    width = queries.shape[2]
    if not _state.blocks or mask is None or keys.shape[2] != width or 2 * width <= 3 * QUERY_BLOCK:
        whole: Any = _causal(width, 0, window) if isinstance(mask, str) else mask
        return upstream.mlx_lm_attention(queries, keys, values, None, scale=scale, mask=whole, sinks=sinks)
    out: list[mx.array] = []
    starts = range(0, width, QUERY_BLOCK)
    for start, query in zip(starts, mx.split(queries, list(starts)[1:], axis=2), strict=True):
        stop = start + query.shape[2]
        first, last = 0, width
        own: Any = mask
        if isinstance(mask, str):
            first, last = (max(0, start - window + 1) if window else 0), stop
            own = _causal(query.shape[2], start - first, window)
        elif mask.shape[-2] == width:
            own = mask[..., start:stop, :]
        if out:
            query = mx.depends([query], [out[-1]])[0]
        out.append(_block(query, keys[..., first:last, :], values[..., first:last, :], scale, own, sinks))
    return mx.concatenate(out, axis=2)


def _block(
    query: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str, sinks: mx.array | None
) -> mx.array:
    masks = [mask] if isinstance(mask, mx.array) else []
    rest = [sinks] if sinks is not None else []

    # A mask may hold scores, and sinks may be trained: what isn't an argument gets no gradient.
    def run(query: mx.array, keys: mx.array, values: mx.array, *more: mx.array) -> mx.array:
        own: Any = more[0] if masks else mask
        return upstream.mlx_lm_attention(
            query, keys, values, None, scale=scale, mask=own, sinks=more[-1] if rest else None
        )

    return (mx.checkpoint(run) if _state.recompute else run)(query, keys, values, *masks, *rest)


def _causal(length: int, before: int, window: int | None) -> mx.array | str:
    """For `length` queries after `before` other keys."""
    if window is None or before + length <= window:
        return "causal"
    return upstream.create_causal_mask(length, before, window_size=window)


def _takes(cache: Any) -> bool:
    return cache is None and _state.blocks


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, cache: None, scale: float, mask: Any, sinks: Any = None
) -> mx.array:
    return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
