"""Examples as the arrays of a Batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.types import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.lora.types import Example


def collate(rows: Sequence[Sequence[Example]], width: int, *, num_rows: int | None = None, pad_id: int = 0) -> Batch:
    """A Batch of [rows, width]; each row's examples stand one after the other as segments 1, 2, ….

    An example of n tokens takes n positions; the last has no target, for what follows is another example or padding.
    With `num_rows`, empty rows are added up to it, so that a last, smaller batch keeps its shape. `pad_id` only fills:
    its weight is 0.

    Raises InvalidRequestError for a row longer than `width`, and for more rows than `num_rows`.
    """
    height = len(rows) if num_rows is None else num_rows
    if height < len(rows) or height < 1:
        raise InvalidRequestError(f"{len(rows)} rows do not fit a batch of {height}")
    inputs = np.full((height, width), pad_id, np.int32)
    targets = np.full((height, width), pad_id, np.int32)
    weights = np.zeros((height, width), np.float32)
    segments = np.zeros((height, width), np.int32)
    num_tokens = 0
    for r, row in enumerate(rows):
        at = 0
        for number, example in enumerate(row, 1):
            end = at + len(example.token_ids)
            if end > width:
                raise InvalidRequestError(
                    f"{example.where}: up to here the row has {end:,} tokens; the width is {width:,}"
                )
            inputs[r, at:end] = example.token_ids
            targets[r, at : end - 1] = inputs[r, at + 1 : end]
            weights[r, at : end - 1] = example.supervised[1:]
            segments[r, at:end] = number
            at = end
        num_tokens += at
    return Batch(
        inputs=mx.array(inputs),
        targets=mx.array(targets),
        weights=mx.array(weights),
        segments=mx.array(segments),
        num_examples=sum(len(row) for row in rows),
        num_tokens=num_tokens,
        num_targets=int(np.count_nonzero(weights)),
    )
