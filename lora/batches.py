"""Which rows make which update, and a micro-batch of them as arrays."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.collate import collate
from mlxinfer.lora.data.order import epoch_order
from mlxinfer.lora.losses.examples import mismatched
from mlxinfer.lora.packing import bucket, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.lora.types import Batch, Example, Judged

Unit = tuple["Example", ...]
"""What stays together: one example, or the two of a pair."""
Micro = tuple[tuple[int, ...], ...]
"""A micro-batch: rows of unit numbers."""
WIDTH_STEP = 32
"""Widths are multiples of this; of a larger number where that would be more than MAX_SHAPES."""
MAX_SHAPES = 64


class Batches(Protocol):
    """Rows as updates; the trainer keeps nothing but the place in the epoch."""

    def plan(self, epoch: int, rank: int, size: int) -> Sequence[Sequence[Micro]]:
        """This rank's part of each update of an epoch, some of them perhaps empty.

        The same for the same arguments. Over the ranks, every unit is there once.
        """
        ...

    def batch(self, micro: Micro) -> Batch:
        """The arrays of a micro-batch."""
        ...

    def where(self, micro: Micro) -> list[str]:
        """The file:line of each unit."""
        ...


class UnitBatches:
    """An update is `micro_batch_size * steps * ranks` units. How it is computed changes its speed and nothing else.

    Packed, its units share rows as wide as the longest allowed, computed one at a time; otherwise each example has a
    row, and updates are of similar length.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        micro_batch_size: int,
        steps: int,
        seed: int,
        max_tokens: int,
        packed: bool,
    ) -> None:
        self._units = units
        self._size, self._steps, self._seed, self.packed = micro_batch_size, steps, seed, packed
        for unit in units:
            for example in unit:
                if (length := len(example.token_ids)) > max_tokens:
                    raise InvalidRequestError(
                        f"{example.where}: the row has {length:,} tokens and max_tokens is {max_tokens:,}: cut it, or "
                        "raise the limit",
                        param="max_tokens",
                    )
        self._lengths = [sum(len(example.token_ids) for example in unit) for unit in units]
        self._width = max([max_tokens, *self._lengths]) if packed else max_tokens
        # The widest row that there can be: a limit far above the rows must not make them wider.
        longest = min(self._width, sum(self._lengths)) if packed else max(map(self._longest, units), default=1)
        self._step = _step_of(longest)

    @staticmethod
    def _longest(unit: Unit) -> int:
        return max(len(example.token_ids) for example in unit)

    def plan(self, epoch: int, rank: int, size: int) -> list[list[Micro]]:
        whole = self._size * self._steps * size
        if not self.packed:
            updates = bucket(self._lengths, whole, seed=self._seed, epoch=epoch)
            return [self._padded(update)[rank::size] for update in updates]
        order = epoch_order(len(self._units), self._seed, epoch).tolist()
        updates = [order[start : start + whole] for start in range(0, len(order), whole)]
        return [self._packed(update, epoch, size)[rank::size] for update in updates]

    def _padded(self, update: Sequence[int]) -> list[Micro]:
        near = sorted(update, key=lambda unit: (self._lengths[unit], unit))
        return [tuple((unit,) for unit in near[at : at + self._size]) for at in range(0, len(near), self._size)]

    def _packed(self, update: Sequence[int], epoch: int, size: int) -> list[Micro]:
        lengths = [self._lengths[unit] for unit in update]
        # Every rank gets as much to do.
        share = -(-sum(lengths) // size)
        width = min(self._width, max(*lengths, share)) if size > 1 else self._width
        rows = pack(lengths, width, seed=self._seed, epoch=epoch)
        rows.sort(key=lambda row: -sum(lengths[at] for at in row))
        return [(tuple(update[at] for at in row),) for row in rows]

    def batch(self, micro: Micro) -> Batch:
        if self.packed:
            rows = [[example for unit in row for example in self._units[unit]] for row in micro]
        else:
            rows = [[example] for row in micro for unit in row for example in self._units[unit]]
        return self._collated(rows)

    def _collated(self, rows: Sequence[Sequence[Example]]) -> Batch:
        longest = max(sum(len(example.token_ids) for example in row) for row in rows)
        return collate(rows, -(-longest // self._step) * self._step)

    def where(self, micro: Micro) -> list[str]:
        return [self._units[unit][0].where for row in micro for unit in row]


def _step_of(longest: int) -> int:
    """What widths are multiples of, where no row is longer than `longest`."""
    return WIDTH_STEP * -(-longest // (MAX_SHAPES * WIDTH_STEP))


class JudgedBatches(UnitBatches):
    """Single answers with a verdict, and each prompt with another row's answer beside: what KTO reads."""

    def __init__(self, rows: Sequence[Judged], *, max_tokens: int, **options: int) -> None:
        super().__init__([(row.example,) for row in rows], packed=False, max_tokens=max_tokens, **options)
        self._rows, self._max_tokens = rows, max_tokens
        # A prompt with another's answer.
        self._step = _step_of(min(max_tokens, 2 * max(self._lengths, default=1)))
        if len(rows) < 2:
            raise InvalidRequestError("kto needs at least two rows: each prompt is tried with another row's answer")

    def batch(self, micro: Micro) -> Batch:
        numbers = [unit for row in micro for unit in row]
        own = [self._rows[number] for number in numbers]
        # A row that is alone borrows the next one's answer.
        both = own if len(own) > 1 else [*own, self._rows[(numbers[0] + 1) % len(self._rows)]]
        others = mismatched(both, self._max_tokens)
        return dataclasses.replace(
            super().batch(micro),
            wanted=mx.array([row.wanted for row in own]),
            mismatched=self._collated([[example] for example in others[: len(own)]]),
        )
