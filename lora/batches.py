"""Which rows make which update, and rows as padded batches of one segment each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import numpy as np

from mlxinfer.lora.types import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.lora.types import Example

WIDTH_STEP = 32
"""Widths are this times a power of two: a 2048-token limit has seven shapes."""


class Batches(Protocol):
    """Items as updates; the trainer keeps nothing but the place in the epoch."""

    def plan(self, epoch: int, rank: int, size: int) -> Sequence[Sequence[tuple[int, ...]]]:
        """This rank's part of each update of an epoch: micro-batches of item numbers, some of them perhaps none.

        The same for the same arguments. Over the ranks, every item is there once.
        """
        ...

    def batch(self, items: tuple[int, ...]) -> Batch:
        """The arrays of a micro-batch."""
        ...

    def where(self, items: tuple[int, ...]) -> list[str]:
        """The file:line of each."""
        ...


class PaddedBatches:
    """One example a row. Rows of near length stand together inside an update, so no update depends on the split."""

    def __init__(
        self, examples: Sequence[Example], *, micro_batch_size: int, steps: int, seed: int, max_tokens: int
    ) -> None:
        self._examples = examples
        self._size, self._steps, self._seed, self._limit = micro_batch_size, steps, seed, max_tokens

    def plan(self, epoch: int, rank: int, size: int) -> list[list[tuple[int, ...]]]:
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._examples))
        whole = self._size * self._steps * size
        updates: list[list[tuple[int, ...]]] = []
        for start in range(0, len(order), whole):
            rows = sorted((int(i) for i in order[start : start + whole]), key=self._length)
            micro = [tuple(rows[at : at + self._size]) for at in range(0, len(rows), self._size)]
            updates.append(micro[rank::size])
        return updates

    def batch(self, items: tuple[int, ...]) -> Batch:
        rows = [self._examples[i] for i in items]
        width = WIDTH_STEP
        while width < max(len(row.token_ids) for row in rows):
            width *= 2
        return padded(rows, min(width, max(self._limit, 2)))

    def where(self, items: tuple[int, ...]) -> list[str]:
        return [self._examples[i].where for i in items]

    def _length(self, item: int) -> tuple[int, int]:
        return len(self._examples[item].token_ids), item


def padded(rows: Sequence[Example], width: int) -> Batch:
    """[len(rows), width]; each row is one segment. Rows are at most `width` tokens long."""
    shape = len(rows), width
    inputs, targets, segments = (np.zeros(shape, np.int32) for _ in range(3))
    weights = np.zeros(shape, np.float32)
    for number, row in enumerate(rows):
        length = len(row.token_ids)
        inputs[number, :length] = row.token_ids
        targets[number, : length - 1] = row.token_ids[1:]
        weights[number, : length - 1] = row.supervised[1:]
        segments[number, :length] = 1
    return Batch(
        inputs=mx.array(inputs),
        targets=mx.array(targets),
        weights=mx.array(weights),
        segments=mx.array(segments),
        num_examples=len(rows),
        num_tokens=sum(len(row.token_ids) for row in rows),
        num_targets=int(weights.sum()),
    )
