"""Keys and values of one sequence, and what a whole sequence remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.engine.memory import KVCost
from mlxinfer.upstream import ArraysCache, CacheList, KVCache, RotatingKVCache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Seq

STEP = 256
"""Buffers grow by this many tokens."""
SLACK = 16
"""Tokens a sliding window keeps beyond itself, so that this many can be taken back."""


class SeqKV:
    """Keys and values of one sequence in one layer.

    `keys` [1, kv_heads, capacity, head_dim] and `values` [1, kv_heads, capacity, value_dim] hold the positions
    `start` to `end`; with a `window`, older ones are dropped whenever the buffer is full.
    """

    __slots__ = ("end", "expected", "keys", "start", "values", "window")

    def __init__(self, window: int | None = None) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.start = 0
        self.end = 0
        self.window = window
        self.expected = 0
        """Tokens that will come for certain: without a window, buffers are made for as many at once."""

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add keys [1, kv_heads, L, head_dim] and values [1, kv_heads, L, value_dim] at the end."""
        # For each row, layer and token: `_add` without its lists, and indices without an ellipsis, which cost half.
        held = self.end - self.start
        end = held + keys.shape[2]
        if self.keys is None or end > self.keys.shape[2]:
            held = self._grow(keys.shape[2], (keys, values))
            end = held + keys.shape[2]
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, held:end] = keys
        self.values[:, :, held:end] = values
        self.end += keys.shape[2]

    def _add(self, new: list[mx.array]) -> None:
        """Write L tokens at the end of each buffer."""
        length = new[0].shape[2]
        held = self.reserve(length, new)
        for buffer, part in zip(self.buffers(), new, strict=True):
            buffer[:, :, held : held + length] = part
        self.end += length

    def reserve(self, length: int, like: Seq[mx.array]) -> int:
        """Make room for `length` more tokens with the heads, dims and dtypes of `like`, one [_, heads, _, dim] for each
        buffer; returns how many tokens the buffers hold before them."""
        held = self.end - self.start
        if self.keys is None or held + length > self.keys.shape[2]:
            held = self._grow(length, like)
        return held

    def _grow(self, length: int, like: Seq[mx.array]) -> int:
        """Move what must be kept into larger buffers; returns how many tokens that is."""
        held = self.end - self.start
        keep = held if self.window is None else min(held, self.window - 1 + SLACK)
        # A window moves its tokens each time the buffer is full: room for STEP more keeps that rare.
        spare = 0 if self.window is None else STEP - 1
        capacity = -(-max(keep + length + spare, 0 if self.window else self.expected) // STEP) * STEP
        room = [mx.zeros((1, part.shape[1], capacity - keep, part.shape[3]), part.dtype) for part in like]
        if keep:
            kept = [buffer[..., held - keep : held, :] for buffer in self.buffers()]
            room = [mx.concatenate(list(pair), axis=2) for pair in zip(kept, room, strict=True)]
        self.load(room, self.end - keep, self.end)
        return keep

    def visible(self, length: int) -> int:
        """How many of the held tokens the last `length` queries can see, those included."""
        held = self.end - self.start
        return held if self.window is None else min(held, self.window - 1 + length)

    def view(self, length: int) -> tuple[mx.array, mx.array]:
        """Keys and values that the last `length` queries can see."""
        held = self.end - self.start
        first = 0 if self.window is None else held - self.visible(length)
        assert self.keys is not None
        assert self.values is not None
        if first == 0 and held == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[:, :, first:held], self.values[:, :, first:held]

    def trim(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if count > self.end - self.start:
            raise ValueError(f"{count} tokens to take back, {self.end - self.start} held")
        self.end -= count

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())

    def buffers(self) -> list[mx.array]:
        """What it holds, tokens along axis 2; empty before the first append."""
        return [] if self.keys is None or self.values is None else [self.keys, self.values]

    def shared(self) -> list[mx.array]:
        """The buffers for someone else to keep. Without a copy: mlx makes one when either side is written to.

        New array objects, because an assignment to a slice changes the object it is made to.
        """
        return [buffer[...] for buffer in self.buffers()]

    def load(self, buffers: list[mx.array], start: int, end: int) -> None:
        """Take over `buffers` that hold the positions `start` to `end`. They may be shared: see `shared`."""
        self.keys, self.values = [buffer[...] for buffer in buffers]
        self.start, self.end = start, end


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

    def plain(self) -> list[SeqKV]:
        """The leaves that keep every key: any prefix of theirs can be used again."""
        return [leaf for leaf in self.leaves() if isinstance(leaf, SeqKV) and leaf.window is None]

    def stateful(self) -> list[Any]:
        """The other leaves: sliding windows, recurrent states and mlx-lm's own caches."""
        return [leaf for leaf in self.leaves() if not isinstance(leaf, SeqKV) or leaf.window is not None]

    def expect(self, length: int) -> None:
        """Make room for `length` tokens when the first of them comes, instead of moving them again and again."""
        for leaf in self.plain():
            leaf.expected = length

    def share(self, source: Sequence, length: int) -> None:
        """Start from the first `length` tokens of `source`, which goes on unharmed. Plain leaves only."""
        for mine, theirs in zip(self.plain(), source.plain(), strict=True):
            mine.load([buffer[..., :length, :] for buffer in theirs.buffers()], 0, length)
        self.length = length

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves())

    def arrays(self) -> list[mx.array]:
        """The live arrays, to evaluate together."""
        found: list[mx.array] = []
        for leaf in self.leaves():
            if isinstance(leaf, SeqKV):
                found += leaf.buffers()
            else:
                found += arrays_in(leaf.state)
        return found


def arrays_in(state: Any) -> list[mx.array]:
    """Every array in nested lists and tuples."""
    if isinstance(state, mx.array):
        return [state]
    if isinstance(state, list | tuple):
        return [a for part in state for a in arrays_in(part)]
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


def kv_cost(sequence: Sequence) -> KVCost:
    """What a sequence of this kind takes in memory, judged by one that holds a token or a few."""
    per_token = fixed = 0
    windowed: list[tuple[int, int]] = []
    for leaf in sequence.leaves():
        # mlx-lm's own caches of keys grow in steps of 256 as well; for the others a fixed size is a fair guess.
        keys = getattr(leaf, "keys", None)
        if not isinstance(keys, mx.array) or keys.ndim != 4:
            fixed += sum(a.nbytes for a in arrays_in(leaf.state)) if not isinstance(leaf, SeqKV) else 0
            continue
        size = leaf.nbytes // keys.shape[2]
        window = leaf.window if isinstance(leaf, SeqKV) else None
        if window is None:
            per_token += size
        else:
            windowed.append((window + SLACK + STEP, size))
    return KVCost(per_token, tuple(windowed), fixed, STEP)
