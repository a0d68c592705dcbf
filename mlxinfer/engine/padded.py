"""Padded views: a ragged batch for models that use their keys, values or mask outside of the attention function.

Latent attention multiplies keys by its own matrices, gemma2 caps its scores by hand, plamo repeats its keys. Such a
model gets real arrays: in each layer and step the rows' keys are put into one array [B, kv_heads, S, dim], ending at
the same slot, with an array mask over the slots before them. That is what mlx-lm's own batch caches look like to a
model. Each sequence still owns its keys without padding; the padded array lives as long as the layer computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxinfer.engine.ragged import Batch, RaggedKV

if TYPE_CHECKING:
    from mlxinfer.engine.kv import SeqKV, Sequence
    from mlxinfer.engine.ragged import RaggedAttention


@dataclass(frozen=True, slots=True)
class PaddedView:
    """How a model is shown the keys of several rows.

    `mask_rank` 4 gives masks [B, 1, N, S]; 5 gives [B, 1, 1, N, S], for models that split their heads into groups
    before they mask. `fill` and `extra` are for the probe: what padding holds, and how many slots more than needed
    there are.
    """

    mask_rank: int = 4
    fill: float = 0.0
    extra: int = 0


class PaddedKV(RaggedKV):
    """The cache of one layer for all rows; with several, keys and values are left-padded to one length."""

    def __init__(self, rows: list[SeqKV], attention: RaggedAttention, view: PaddedView) -> None:
        super().__init__(rows, attention.handles)
        self.view = view

    @property
    def by_handle(self) -> bool:
        return False

    def begin(self, before: int | mx.array, after: int | mx.array) -> None:
        super().begin(before, after)
        # Packed keys are shown unpacked here, a single token's too.
        self.single = len(self.rows) == 1

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        """For several rows always an array, True where a query may look: asked for before the keys are appended."""
        if self.single:
            return super().make_mask(N, return_array, window_size)
        shown = [_visible_after(row, N) for row in self.rows]
        slots = max(shown) + self.view.extra
        window = self.window if window_size is None else min(window_size, self.window or window_size)
        mask = slot_mask(N, slots, shown, window)
        return mask.reshape(len(shown), *[1] * (self.view.mask_rank - 3), N, slots)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append [B, kv_heads, L, head_dim] to the rows; returns what is visible, [B, kv_heads, S, head_dim]."""
        if self.single:
            return super().update_and_fetch(keys, values)
        self.offset = self._after
        count, length = len(self.rows), keys.shape[2]
        for row, k, v in zip(self.rows, mx.split(keys, count), mx.split(values, count), strict=True):
            row.append(k, v)
        views = [row.view(length) for row in self.rows]
        slots = max(k.shape[2] for k, _ in views) + self.view.extra
        self._latest = (
            left_padded([k for k, _ in views], slots, self.view.fill),
            left_padded([v for _, v in views], slots, self.view.fill),
        )
        return self._latest

    def forget(self) -> None:
        """Let go of the step's arrays: kept until the next step, they would double the memory for keys."""
        self._latest = None

    # Models tie what they don't use otherwise to the graph: `cache.keys = mx.depends(cache.keys, other)`.

    @property
    def keys(self) -> mx.array | None:
        """One row: its buffer. Several: what the step's `update_and_fetch` gave."""
        if self.single:
            return self.rows[0].keys
        return None if self._latest is None else self._latest[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        if self.single:
            self.rows[0].keys = keys
            return
        for row in self.rows:
            row.keys = _tied(row.keys, keys)

    @property
    def values(self) -> mx.array | None:
        if self.single:
            return self.rows[0].values
        return None if self._latest is None else self._latest[1]

    @values.setter
    def values(self, values: mx.array) -> None:
        if self.single:
            self.rows[0].values = values
            return
        for row in self.rows:
            row.values = _tied(row.values, values)


def _tied(buffer: mx.array | None, to: mx.array) -> mx.array:
    """`buffer`, computed no sooner than `to`. The rows' own content stays: the model has seen padding only."""
    assert buffer is not None, "a model sets keys before it has given any"
    return mx.depends(buffer, to)  # pyright: ignore[reportReturnType]


def _visible_after(row: SeqKV, length: int) -> int:
    """What `row.visible(length)` will be when `length` tokens have been appended."""
    held = row.end - row.start + length
    return held if row.window is None else min(held, row.window - 1 + length)


def slot_mask(length: int, slots: int, shown: list[int], window: int | None) -> mx.array:
    """[B, length, slots]: row b has shown[b] keys, in the last slots; its queries belong to the last of these."""
    slot = mx.arange(slots)
    first = mx.array([slots - n for n in shown])[:, None, None]
    if length == 1:
        if window is not None:
            first = mx.maximum(first, slots - window)
        return slot >= first
    query = mx.arange(slots - length, slots)[:, None]
    mask = (slot >= first) & (slot <= query)
    return mask if window is None else mask & (slot > query - window)


def left_padded(rows: list[mx.array], slots: int, fill: float = 0.0) -> mx.array:
    """Arrays [1, heads, n, dim] with different n as one [B, heads, slots, dim], each in the last n slots."""
    _, heads, _, dim = rows[0].shape
    blank = mx.array(fill, rows[0].dtype)
    pieces: list[mx.array] = []
    for row in rows:
        if missing := slots - row.shape[2]:
            pieces.append(mx.broadcast_to(blank, (1, heads, missing, dim)))
        pieces.append(row)
    # One copy: the rows one after the other along the tokens, then cut into rows without moving anything.
    joined = mx.concatenate(pieces, axis=2) if len(pieces) > 1 else pieces[0]
    return mx.swapaxes(joined.reshape(heads, len(rows), slots, dim), 0, 1)


class PaddedBatch(Batch):
    """A Batch whose layers show padded views. Chunks can't share a forward with it: L rows would be L copies."""

    def __init__(self, sequences: list[Sequence], attention: RaggedAttention, view: PaddedView) -> None:
        self.view = view
        super().__init__(sequences, attention)

    def _cache_of(self, rows: list[SeqKV]) -> RaggedKV:
        return PaddedKV(rows, self.attention, self.view)

    def end(self) -> None:
        super().end()
        for kv in self._kv:
            if isinstance(kv, PaddedKV) and not kv.single:
                kv.forget()


class SplitBatch:
    """Rows in several padded batches, because their lengths are too different for one (groups.py)."""

    def __init__(self, groups: list[list[int]], parts: list[PaddedBatch]) -> None:
        self.parts = [(mx.array(rows), part) for rows, part in zip(groups, parts, strict=True)]
        places = {row: place for place, row in enumerate(row for rows in groups for row in rows)}
        self._places = mx.array([places[row] for row in range(len(places))])

    def joined(self, outputs: list[mx.array]) -> mx.array:
        """The parts' outputs [rows, …] as one, in the order of the batch."""
        return mx.concatenate(outputs)[self._places]

    def release(self) -> None:
        for _, part in self.parts:
            part.release()
