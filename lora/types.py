"""What the rooms of the trainer hand to each other: rows as tokens, batches as arrays, a loss as a sum and a count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation or text as tokens."""

    token_ids: tuple[int, ...]
    supervised: tuple[bool, ...]
    """Of each token: it is learnt. The first never is, for nothing comes before it."""
    where: str
    """"file:line", for messages."""
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt with the answer that is wanted and one that is not; both begin with the same prompt tokens."""

    chosen: Example
    rejected: Example


@dataclass(frozen=True, slots=True)
class Judged:
    """One answer and whether it is wanted."""

    example: Example
    wanted: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one or several segments each, which know nothing of each other. All arrays are [rows, width]."""

    inputs: mx.array
    """int32 token ids; what is in no segment is padding."""
    targets: mx.array
    """int32: the next token of the same segment."""
    weights: mx.array
    """float32: 1 where the target is supervised, else 0; 0 at the end of a segment and in padding."""
    segments: mx.array
    """int32: 0 is padding, segments count from 1 in each row, each is one run."""
    num_examples: int
    num_tokens: int
    """Tokens that are no padding."""
    num_targets: int
    """Supervised ones: the sum of `weights`."""
    wanted: mx.array | None = None
    """bool [num_examples], for losses over judged answers: segments counted row by row."""
    mismatched: Batch | None = None
    """For KTO: prompts of this batch with each other's answers."""


class Loss(Protocol):
    """What is made small. Sums are added up over batches and ranks, and divided by the count once an update."""

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[mx.array, mx.array]:
        """(sum, count) of a batch, scalars in float32."""
        ...
