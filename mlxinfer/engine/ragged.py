"""A ragged batch under mlx-lm's unmodified models (docs/adr/0003-ragged-attention.md).

A model sees one `RaggedKV` per layer in the place of mlx-lm's cache. Linear layers, norms and experts run on the
whole batch; attention runs for each row over exactly that row's keys. With one row `RaggedKV` behaves like mlx-lm's
own cache: real keys, real masks. With several, `update_and_fetch` gives the new keys back as a *handle*, and the
attention function, put in place of mlx-lm's, recognises the handle and looks the rows' keys up.

A prompt chunk of L tokens can go along in a batch of single tokens, as L rows that share one sequence: the weights
are read once for the chunk and for every row that decodes. `lengths` says how many rows each sequence has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.engine.attend import append_and_attend, attend, by_sequence, one_kernel_serves
from mlxinfer.engine.kv import SeqKV, Sequence, UnbatchableError
from mlxinfer.engine.quantized import QuantizedKV
from mlxinfer.upstream import ArraysCache, CacheList, create_causal_mask, install_attention, mlx_lm_attention

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from mlxinfer.engine.attend import Lengths


class RowWindow:
    """The mask of a batched step: each row sees its own last `window` keys. Opaque to the model."""

    __slots__ = ("window",)

    def __init__(self, window: int) -> None:
        self.window = window


class Handles:
    """The handles given out in the step that is being built: id(keys) → the cache they stand for.

    Holding the arrays keeps their ids from being used again. Used on the MLX thread only.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[mx.array, mx.array, RaggedKV]] = {}
        self.consumed: set[int] = set()
        """Ids of the handles that attention has looked up."""
        self.tied = False
        """Models may reach for a batch's buffers: the stages of a pipeline tie what they send to them."""

    def give(self, keys: mx.array, values: mx.array, cache: RaggedKV) -> None:
        self._held[id(keys)] = (keys, values, cache)

    def find(self, keys: mx.array) -> tuple[mx.array, mx.array, RaggedKV] | None:
        return self._held.get(id(keys)) if self._held else None

    def clear(self) -> None:
        self._held.clear()
        self.consumed.clear()

    def unused(self) -> int:
        """Handles that attention never asked for: the model used the keys in another way."""
        return len(self._held) - len(self.consumed)


class RaggedKV:
    """The cache of one layer for all rows of a batch, as mlx-lm's models expect one."""

    def __init__(self, rows: list[SeqKV], handles: Handles, lengths: Lengths = None) -> None:
        self.rows = rows
        self.handles = handles
        self.lengths = lengths
        self.single = len(rows) == 1 and lengths is None
        """One row, driven as mlx-lm's own cache would be."""
        self.window = rows[0].window
        self.offset: int | mx.array = 0
        """Position of the next token: an int for one row, [B] for several."""
        self._after: int | mx.array = 0
        self._latest: tuple[mx.array, mx.array] | None = None
        self._waiting: tuple[mx.array, mx.array] | None = None
        """New keys and values that the attention kernel will append in the same go."""
        self.poison: int | None = None
        """For the probe: give handles of NaN, longer than the step by this many positions."""

    @property
    def by_handle(self) -> bool:
        """`update_and_fetch` gives handles, which only our attention can read."""
        return not self.single

    def begin(self, before: int | mx.array, after: int | mx.array) -> None:
        """Start a step: the positions before and after it, shared by all layers."""
        self.offset = before
        self._after = after
        if len(self.rows) == 1 and self.lengths is None:
            # A single token goes by handle, like a row of a batch, where its keys are packed or one kernel does it all.
            by_handle = isinstance(self.rows[0], QuantizedKV) or one_kernel_serves(self.rows)
            self.single = not by_handle or after - before > 1  # pyright: ignore[reportAttributeAccessIssue]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        """The mask of a step of N tokens per row, asked for before the keys are appended."""
        window = self.window if window_size is None else min(window_size, self.window or window_size)
        if not self.single:
            if return_array:
                raise UnbatchableError("the model asks for a mask as an array")
            return None if window is None or window == self.window else RowWindow(window)
        row = self.rows[0]
        seen = row.end - row.start if self.window is None else min(row.end - row.start, self.window - 1)
        if N == 1:
            if window is None or seen + 1 <= window:
                return None
            return mx.arange(seen + 1) > seen - window
        if return_array or (window is not None and seen + N > window):
            return create_causal_mask(N, seen, window_size=window)
        return "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [B, kv_heads, L, head_dim] to the rows. One row: all visible keys; several: a handle."""
        self.offset = self._after
        if self.single:
            self.rows[0].append(keys, values)
            self._latest = self.rows[0].view(keys.shape[2])
            return self._latest
        if keys.shape[2] == 1 and keys.dtype == mx.float32 and one_kernel_serves(self.rows):
            self._waiting = (keys, values)
        else:
            self._append(keys, values)
        if self.poison is not None:
            keys, values = (_poisoned(x, self.poison) for x in (keys, values))
        self.handles.give(keys, values, self)
        self._latest = (keys, values)
        return self._latest

    def _append(self, keys: mx.array, values: mx.array) -> None:
        parts = by_sequence(keys, self.rows, self.lengths), by_sequence(values, self.rows, self.lengths)
        for row, k, v in zip(self.rows, *parts, strict=True):
            row.append(k, v)

    def attend(self, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None) -> mx.array:
        """Attention of a step by handle, [R, heads, L, head_dim] → [R, heads, L, value_dim]."""
        new, self._waiting = self._waiting, None
        if new is not None:
            return append_and_attend(
                queries, *new, self.rows, scale=scale, window=window, sinks=sinks, lengths=self.lengths
            )
        return attend(queries, self.rows, scale=scale, window=window, sinks=sinks, lengths=self.lengths)

    def settle(self) -> None:
        """Append what no attention came for."""
        new, self._waiting = self._waiting, None
        if new is not None:
            self._append(*new)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last `update_and_fetch` of this step gave; layers that share this layer's keys ask here."""
        assert self._latest is not None
        return self._latest

    @property
    def max_size(self) -> int:
        if self.window is None:
            raise AttributeError("max_size")
        return self.window

    def size(self) -> int:
        return max(row.end for row in self.rows)

    def empty(self) -> bool:
        return all(row.keys is None for row in self.rows)

    @property
    def keys(self) -> mx.array | list[mx.array] | None:
        """The row's buffer, or one for each row where `handles.tied`."""
        return self.rows[0].keys if self.single else self._tied(0)

    @keys.setter
    def keys(self, keys: Any) -> None:
        for row, held in zip(self.rows, [keys] if self.single else keys, strict=True):
            row.keys = held

    @property
    def values(self) -> mx.array | list[mx.array] | None:
        """As `keys`."""
        return self.rows[0].values if self.single else self._tied(1)

    @values.setter
    def values(self, values: Any) -> None:
        for row, held in zip(self.rows, [values] if self.single else values, strict=True):
            row.values = held

    def _tied(self, which: int) -> list[mx.array]:
        if not self.handles.tied:
            raise UnbatchableError("the model reaches into the cache's buffers")
        return [row.buffers()[which] for row in self.rows]


def _poisoned(like: mx.array, extra: int) -> mx.array:
    rows, heads, length, dim = like.shape
    return mx.full((rows, heads, length + extra, dim), mx.nan, like.dtype)


class RaggedAttention:
    """Attention over handles; everything else goes to mlx-lm's function."""

    def __init__(self) -> None:
        self.handles = Handles()

    def __call__(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Queries [B, heads, L, head_dim] → [B, heads, L, value_dim]."""
        held = self.handles.find(keys) if isinstance(keys, mx.array) else None
        if held is None:
            if isinstance(cache, RaggedKV) and cache.by_handle:
                raise UnbatchableError("the model transforms the keys between the cache and attention")
            return mlx_lm_attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        _, handle_values, source = held
        if values is not handle_values:
            raise UnbatchableError("the model transforms the values between the cache and attention")
        if mask is not None and not isinstance(mask, RowWindow):
            raise UnbatchableError(f"the model brings its own mask ({type(mask).__name__})")
        self.handles.consumed.add(id(keys))
        window = mask.window if mask else None
        return source.attend(queries, scale, window, sinks)


class Batch:
    """Some sequences as the model sees them: `caches` is what goes into `model(tokens, cache=…)`.

    Recurrent states are stacked by row while the batch lasts; `release` gives them back to their sequences. With
    `lengths`, sequence i has lengths[i] rows of one token each, one after the other.
    """

    def __init__(self, sequences: list[Sequence], attention: RaggedAttention, lengths: Lengths = None) -> None:
        assert sequences
        self.sequences = sequences
        self.attention = attention
        self.lengths = lengths
        self._kv: list[RaggedKV] = []
        self._stacked: list[tuple[Any, list[Any]]] = []
        layers = zip(*(s.layers for s in sequences), strict=True)
        self.caches = [self._layer(list(row_layers)) for row_layers in layers]

    def _layer(self, parts: list[Any]) -> Any:
        if isinstance(parts[0], tuple):
            return CacheList(*(self._layer(list(sub)) for sub in zip(*parts, strict=True)))
        if isinstance(parts[0], SeqKV):
            kv = self._cache_of(parts)
            self._kv.append(kv)
            return kv
        if len(parts) == 1:
            return parts[0]
        merged = stack_states(parts)
        self._stacked.append((merged, parts))
        return merged

    def _cache_of(self, rows: list[SeqKV]) -> RaggedKV:
        return RaggedKV(rows, self.attention.handles, self.lengths)

    def begin(self, length: int) -> None:
        """Start a step of `length` tokens per row."""
        counts = self.lengths or [length] * len(self.sequences)
        if self.lengths is not None:
            places = [s.length + i for s, n in zip(self.sequences, counts, strict=True) for i in range(n)]
            before: Any = mx.array(places)
        elif len(self.sequences) == 1:
            before = self.sequences[0].length
        else:
            before = mx.array([s.length for s in self.sequences])
        after = before + length
        for kv in self._kv:
            kv.begin(before, after)
        for sequence, count in zip(self.sequences, counts, strict=True):
            sequence.length += count

    def end(self) -> None:
        """Drop the step's handles."""
        for kv in self._kv:
            kv.settle()
        self.attention.handles.clear()

    def release(self) -> None:
        """Hand stacked recurrent states back to the sequences they belong to."""
        for merged, parts in self._stacked:
            for index, part in enumerate(parts):
                part.cache = [None if c is None else c[index : index + 1] for c in merged.cache]
        self._stacked.clear()

    def poison(self, extra: int) -> None:
        """Make every handle NaN and `extra` positions longer than it should be: nobody may look at it."""
        for kv in self._kv:
            kv.poison = extra


def stackable(sequences: Seq[Sequence]) -> bool:
    """Whether the recurrent states have one shape in all rows; a state that holds the last tokens starts shorter."""
    for leaves in zip(*(s.leaves() for s in sequences), strict=True):
        if isinstance(leaves[0], ArraysCache):
            for states in zip(*(leaf.cache for leaf in leaves), strict=True):
                if len({s.shape for s in states if s is not None}) > 1:
                    return False
    return True


def stack_states(parts: list[Any]) -> Any:
    """One ArraysCache over the rows of several. A state that only some rows have set is zeros for the others.

    ArraysCache.merge would mark a batch of empty states as left-padded, which costs a mask in every layer, and fails
    where a model leaves one of its states unset.
    """
    merged = ArraysCache(len(parts[0].cache))
    for index in range(len(merged.cache)):
        states = [part.cache[index] for part in parts]
        known = next((s for s in states if s is not None), None)
        if known is not None:
            merged.cache[index] = mx.concatenate([mx.zeros_like(known) if s is None else s for s in states], axis=0)
    return merged


_attention = RaggedAttention()


def ragged_attention() -> RaggedAttention:
    """The attention of this process, put into every mlx-lm model module that is loaded by now."""
    install_attention(_attention)
    return _attention
