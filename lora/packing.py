"""Which examples share a row: best fit within shuffled windows, so that rows are full and the order stays random."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.data.order import epoch_order

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = 4096
"""Examples that are packed together: more fill rows better, fewer keep the order closer to a random one."""


def pack(lengths: Sequence[int], width: int, *, seed: int = 0, epoch: int = 0, window: int = WINDOW) -> list[list[int]]:
    """Rows of indices into `lengths`, each row's lengths adding up to `width` at most; every index once.

    Examples are shuffled, and each window of them is packed best-fit decreasing; what a window leaves half empty is
    filled by the next one. The rows, and the examples in each, are shuffled again. The result depends on nothing but
    the arguments, so a run that resumes packs again and skips the rows it has done.

    Raises InvalidRequestError for an example longer than `width`.
    """
    if width < 1 or window < 1:
        raise InvalidRequestError(f"width {width} and window {window} must be at least 1")
    if (longest := max(lengths, default=0)) > width:
        raise InvalidRequestError(f"an example has {longest:,} tokens and a row {width:,}; cut it, or widen the rows")
    order = epoch_order(len(lengths), seed, epoch)
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room, row), sorted
    for begin in range(0, len(order), window):
        chosen = order[begin : begin + window].tolist()
        chosen.sort(key=lambda i: -lengths[i])
        for index in chosen:
            at = bisect_left(open_rows, (lengths[index], -1))
            if at < len(open_rows):
                room, row = open_rows.pop(at)
                rows[row].append(index)
            else:
                room, row = width, len(rows)
                rows.append([index])
            if room > lengths[index]:
                insort(open_rows, (room - lengths[index], row))
    return _shuffled(rows, seed, epoch, max(1, window * len(rows) // max(1, len(order))))


def _shuffled(rows: list[list[int]], seed: int, epoch: int, nearby: int) -> list[list[int]]:
    """Rows among those of their window, and the examples of each: long ones would come first otherwise."""
    random = np.random.Generator(np.random.PCG64([seed, epoch, 1]))
    shuffled: list[list[int]] = []
    for begin in range(0, len(rows), nearby):
        part = rows[begin : begin + nearby]
        shuffled.extend(part[i] for i in random.permutation(len(part)))
    return [[row[i] for i in random.permutation(len(row))] for row in shuffled]


def waste(lengths: Sequence[int], rows: Sequence[Sequence[int]], width: int) -> float:
    """The part of the rows' width that is padding, 0 to 1."""
    return 1 - sum(lengths[i] for row in rows for i in row) / (width * len(rows)) if rows else 0.0


def bucket(
    lengths: Sequence[int], rows_per_batch: int, *, seed: int = 0, epoch: int = 0, window: int = 128
) -> list[list[int]]:
    """Batches of `rows_per_batch` examples of similar length, one a row, for models whose state cannot be packed.

    Each stretch of `window` batches of the shuffled order is sorted by length and cut; the batches are shuffled. Every
    index once; only the last batch of all may be smaller.
    """
    if rows_per_batch < 1 or window < 1:
        raise InvalidRequestError(f"rows_per_batch {rows_per_batch} and window {window} must be at least 1")
    order = epoch_order(len(lengths), seed, epoch)
    random = np.random.Generator(np.random.PCG64([seed, epoch, 1]))
    batches: list[list[int]] = []
    for begin in range(0, len(order), window * rows_per_batch):
        chosen = order[begin : begin + window * rows_per_batch].tolist()
        chosen.sort(key=lambda i: lengths[i])
        part = [chosen[i : i + rows_per_batch] for i in range(0, len(chosen), rows_per_batch)]
        # The short batch, if any, stays the last.
        full = len(part) - (len(part[-1]) < rows_per_batch)
        batches.extend(part[i] for i in random.permutation(full))
        batches.extend(part[full:])
    return batches
