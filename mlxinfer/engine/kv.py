"""Keys and values of one sequence, and what a whole sequence remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.upstream import ArraysCache, CacheList, KVCache, RotatingKVCache

if TYPE_CHECKING:
    from collections.abc import Iterator

STEP = 256
"""Buffers grow by this many tokens."""
SLACK = 16
"""Tokens a sliding window keeps beyond itself, so that this many can be taken back."""


class SeqKV:
    """Keys and values of one sequence in one layer.

    `keys` [1, kv_heads, capacity, head_dim] and `values` [1, kv_heads, capacity, value_dim] hold the positions
    `start` to `end`; with a `window`, older ones are dropped whenever the buffer is full.
    """

    __slots__ = ("end", "keys", "start", "values", "window")

    def __init__(self, window: int | None = None) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.start = 0
        self.end = 0
        self.window = window

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add keys [1, kv_heads, L, head_dim] and values [1, kv_heads, L, value_dim] at the end."""
        length = keys.shape[2]
        held = self.end - self.start
        if self.keys is None or held + length > self.keys.shape[2]:
            held = self._grow(keys, values)
        self.keys[..., held : held + length, :] = keys  # pyright: ignore[reportOptionalSubscript]
        self.values[..., held : held + length, :] = values  # pyright: ignore[reportOptionalSubscript]
        self.end += length

    def _grow(self, keys: mx.array, values: mx.array) -> int:
        """Move what must be kept into larger buffers; returns how many tokens that is."""
        held = self.end - self.start
        keep = held if self.window is None else min(held, self.window - 1 + SLACK)
        # A window moves its tokens each time the buffer is full: room for STEP more keeps that rare.
        spare = 0 if self.window is None else STEP - 1
        capacity = -(-(keep + keys.shape[2] + spare) // STEP) * STEP
        grown = [
            mx.zeros((1, new.shape[1], capacity - keep, new.shape[3]), new.dtype)
            if old is None or keep == 0
            else mx.concatenate(
                [
                    old[..., held - keep : held, :],
                    mx.zeros((1, new.shape[1], capacity - keep, new.shape[3]), new.dtype),
                ],
                axis=2,
            )
            for old, new in ((self.keys, keys), (self.values, values))
        ]
        self.keys, self.values = grown
        self.start = self.end - keep
        return keep

    def visible(self, length: int) -> int:
        """How many of the held tokens the last `length` queries can see, those included."""
        held = self.end - self.start
        return held if self.window is None else min(held, self.window - 1 + length)

    def view(self, length: int) -> tuple[mx.array, mx.array]:
        """Keys and values that the last `length` queries can see."""
        held = self.end - self.start
        first = held - self.visible(length)
        assert self.keys is not None
        assert self.values is not None
        if first == 0 and held == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[..., first:held, :], self.values[..., first:held, :]

    def trim(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if count > self.end - self.start:
            raise ValueError(f"{count} tokens to take back, {self.end - self.start} held")
        self.end -= count

    @property
    def nbytes(self) -> int:
        if self.keys is None or self.values is None:
            return 0
        return self.keys.nbytes + self.values.nbytes


class Sequence:
    """What the model remembers of one sequence: per layer a SeqKV, an ArraysCache or a tuple of these.

    In the sequential tier `own` holds mlx-lm's caches instead and `layers` is empty.
    """

    __slots__ = ("layers", "length", "own")

    def __init__(self, layers: list[Any], own: list[Any] | None = None) -> None:
        self.layers = layers
        self.own = own
        self.length = 0
        """Tokens processed so far."""

    def leaves(self) -> Iterator[Any]:
        """Every SeqKV and ArraysCache (or mlx-lm cache) in layer order."""
        for layer in self.own if self.own is not None else self.layers:
            if isinstance(layer, tuple):
                yield from layer
            else:
                yield layer

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves())

    def arrays(self) -> list[mx.array]:
        """The live arrays, to evaluate together."""
        found: list[mx.array] = []
        for leaf in self.leaves():
            if isinstance(leaf, SeqKV):
                if leaf.keys is not None and leaf.values is not None:
                    found += [leaf.keys, leaf.values]
            else:
                found += _arrays_in(leaf.state)
        return found


def _arrays_in(state: Any) -> list[mx.array]:
    if isinstance(state, mx.array):
        return [state]
    if isinstance(state, list | tuple):
        return [a for part in state for a in _arrays_in(part)]
    return []


class UnbatchableError(Exception):
    """This model's caches or masks cannot be driven as a ragged batch; it runs in the sequential tier."""


def sequence_like(caches: list[Any]) -> Sequence:
    """An empty Sequence with the shape of mlx-lm's `caches`. Raises UnbatchableError for a kind we don't own."""
    return Sequence([_own_layer(cache) for cache in caches])


def _own_layer(cache: Any) -> Any:
    if type(cache) is CacheList:
        return tuple(_own_layer(part) for part in cache.caches)
    if type(cache) is KVCache:
        return SeqKV()
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return SeqKV(window=cache.max_size)
    if type(cache) is ArraysCache:
        return ArraysCache(len(cache.cache))
    keep = f" with keep={cache.keep}" if isinstance(cache, RotatingKVCache) else ""
    raise UnbatchableError(f"{type(cache).__name__}{keep}")
