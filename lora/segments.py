"""Exact isolation of packed segments: attention inside a segment, never across two of one row.

Positions aren't restarted: with rotary embeddings only their differences count. Models for which that isn't so, or
whose layers mix tokens by other means than attention, are found out by a trial (packable.py) and refused.
"""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlxinfer import upstream
from mlxinfer.errors import UnsupportedModelError
from mlxinfer.lora.attention import attention
from mlxinfer.lora.modes import calling

if TYPE_CHECKING:
    from collections.abc import Iterator

    import mlx.nn as nn

BLOCK_TOKENS = 256
"""Neighbouring segments share one masked attention up to this many tokens: fewer, larger products."""


class Block:
    """Some neighbouring segments of a row: tokens [start, stop), `same` [n, n] bool or None where it is one segment."""

    def __init__(self, start: int, numbers: np.ndarray) -> None:
        self.start, self.stop = start, start + len(numbers)
        one = bool((numbers == numbers[0]).all())
        self.same = None if one else mx.array(_same(numbers))

    def mask(self, own: mx.array | str | None, window: int | None) -> mx.array | str | None:
        """The model's own mask for these tokens, without what another segment holds; a causal one with a window."""
        if self.same is None or own is None:
            return self.same if own is None else own
        if isinstance(own, str):
            return self.same & upstream.create_causal_mask(self.stop - self.start, window_size=window)
        if own.dtype == mx.bool_:
            return own & self.same
        return mx.where(self.same, own, mx.finfo(own.dtype).min)


class Layout:
    """How one row is cut, made from its `segments` [width]; padding counts as a segment."""

    def __init__(self, segments: np.ndarray) -> None:
        self._numbers = segments
        self.width = len(segments)
        self.blocks = _blocks(segments)
        self._masks: dict[int | None, mx.array] = {}

    def mask(self, window: int | None) -> mx.array:
        """[width, width] bool: of the same segment, not later and inside the window.

        For models that mask scores themselves. `attend` does without it, and then it is never computed.
        """
        if window not in self._masks:
            causal = upstream.create_causal_mask(self.width, window_size=window)
            self._masks[window] = causal & mx.array(_same(self._numbers))
        return self._masks[window]

    def window_of(self, mask: mx.array | str | None) -> tuple[bool, int | None]:
        """Whether `mask` is one of these, and of which window."""
        return next(((True, window) for window, made in self._masks.items() if made is mask), (False, None))


def _same(numbers: np.ndarray) -> np.ndarray:
    """[n] → [n, n]: both tokens are one segment's."""
    return numbers[:, None] == numbers[None, :]


def _blocks(numbers: np.ndarray) -> list[Block]:
    cuts = [0, *(int(i) + 1 for i in np.flatnonzero(numbers[1:] != numbers[:-1])), len(numbers)]
    starts = [0]
    for begin, end in pairwise(cuts):
        if begin > starts[-1] and end - starts[-1] > BLOCK_TOKENS:
            starts.append(begin)
    return [Block(start, numbers[start:stop]) for start, stop in pairwise([*starts, len(numbers)])]


class SegmentCache:
    """What a layer gets where it expects a cache: it remembers nothing and says which tokens are one segment's."""

    def __init__(self, layout: Layout, window: int | None, offset: int = 0) -> None:
        self.layout, self.window, self.offset = layout, window, offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Both as they are."""
        return keys, values

    def make_mask(self, length: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """As mlx-lm's caches make it, and isolated: [length, length]."""
        assert length == self.layout.width
        return self.layout.mask(window_size or self.window)


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: SegmentCache,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Queries [1, heads, width, head_dim] over the keys of their own segments → [1, heads, width, value_dim].

    Raises UnsupportedModelError where keys or mask aren't those of the same tokens.
    """
    layout = cache.layout
    _check_shapes(queries, keys, mask, layout)
    ours, window = layout.window_of(mask)
    # split's gradient is one concatenation; a slice's would be a padded copy of the whole row each.
    cuts = [block.start for block in layout.blocks[1:]]
    parts = zip(*(mx.split(array, cuts, axis=2) for array in (queries, keys, values)), layout.blocks, strict=True)
    out: list[mx.array] = []
    for q, k, v, block in parts:
        own = "causal" if ours else _part(mask, block)
        if block.same is None:
            out.append(attention(q, k, v, scale=scale, mask=own, sinks=sinks, window=window))
        else:
            out.append(attention(q, k, v, scale=scale, mask=block.mask(own, window), sinks=sinks))
    return mx.concatenate(out, axis=2)


def _check_shapes(queries: mx.array, keys: mx.array, mask: Any, layout: Layout) -> None:
    width = layout.width
    square = not isinstance(mask, mx.array) or mask.shape[-2:] == (width, width)
    if queries.shape[0] != 1 or queries.shape[2] != width or keys.shape[2] != width or not square:
        raise UnsupportedModelError(
            f"attention of {queries.shape[0]} rows, {queries.shape[2]} queries and {keys.shape[2]} keys, where the "
            f"batch has a row of {width} tokens: this model cannot be packed"
        )


def _part(mask: mx.array | str | None, block: Block) -> mx.array | str | None:
    """What the model's own mask says about a block."""
    return mask[..., block.start : block.stop, block.start : block.stop] if isinstance(mask, mx.array) else mask


def is_packed(segments: mx.array) -> bool:
    """Whether any segment of a row stands behind another one, or behind padding."""
    numbers = np.array(segments)
    return bool(((numbers[:, 1:] != numbers[:, :-1]) & (numbers[:, 1:] > 0)).any())


@contextlib.contextmanager
def isolated(model: nn.Module, segments: mx.array) -> Iterator[None]:
    """Inside, `model(inputs)` keeps the segments [rows, width] of its inputs apart; 0 is padding.

    Rows of one segment each, padded at the end, need nothing: a causal model's tokens don't see what follows them.
    Others are run row by row, for a mask per row has no shape that all models broadcast rightly. Whether a model can
    be packed is for packable.py to say. The gradient may be taken after the context has ended.
    """
    if not is_packed(segments):
        yield
        return
    with isolated_by(model, [segment_caches(model, Layout(row)) for row in np.array(segments)]):
        yield


def segment_caches(model: nn.Module, layout: Layout, offset: int = 0) -> list[SegmentCache]:
    """One for each cache that the model makes. Raises UnsupportedModelError for a state that isn't keys and values."""
    made: list[SegmentCache] = []
    for held in upstream.make_cache(model):
        if type(held) not in (upstream.KVCache, upstream.RotatingKVCache):
            raise UnsupportedModelError(
                f"a layer's cache is a {type(held).__name__}: only attention over keys and values can be packed; "
                "train with packing off"
            )
        window = held.max_size if isinstance(held, upstream.RotatingKVCache) else None
        made.append(SegmentCache(layout, window, offset))
    return made


@contextlib.contextmanager
def isolated_by(model: Any, held: list[list[SegmentCache]]) -> Iterator[None]:
    """Inside, `model(inputs)` is each row with its own `held` caches. By instance; the class stays as it is."""
    upstream.route_attention(_takes, attend)

    def call(own: Any, self: Any, inputs: mx.array, **options: Any) -> mx.array:
        rows = zip(mx.split(inputs, inputs.shape[0]), held, strict=True)
        return mx.concatenate([own.__call__(self, row, cache=caches, **options) for row, caches in rows])

    with calling(model, call):
        yield


def _takes(cache: Any) -> bool:
    return type(cache) is SegmentCache
