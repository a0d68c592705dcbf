"""Which texts share a forward: of about the same length, and no more tokens than a slice of time allows. No arrays."""

from __future__ import annotations

import bisect
import math
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

SLICE_S = 0.04
"""How long the MLX thread is kept from the tokens of other models at a time, about."""
FIRST_TOKENS = 256
"""Of the first forward, when nothing is known yet."""
MAX_TOKENS = 16_384
"""Of a forward that isn't one text alone, padding counted: bounds the memory that it takes."""
PADDING = 0.2
"""Share of a row that may be padding; short rows, of SHORT tokens, may differ by more."""
SHORT = 8


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A text as the model reads it."""

    ids: Sequence[int]
    types: Sequence[int] | None = None
    """Of a pair: 0 for the first part's tokens, 1 for the second's."""


@dataclass(slots=True, eq=False)
class Job:
    """Texts that were handed in together; the future gets one result for each, in their order."""

    rows: Sequence[TokenRow]
    future: Future[list[Any]] = field(default_factory=Future)
    results: list[Any] = field(default_factory=list[Any])
    missing: int = 0
    waiting: list[Waiting] = field(default_factory=list["Waiting"])
    """Those of its rows that no batch has taken, the longest last, and some that were taken."""
    left: int = 0
    """How many no batch has taken."""


@dataclass(slots=True, eq=False)
class Waiting:
    """One row of a job."""

    job: Job
    index: int
    length: int
    taken: bool = False

    @property
    def row(self) -> TokenRow:
        return self.job.rows[self.index]


def _length(waiting: Waiting) -> int:
    return waiting.length


class Line:
    """The rows that wait, of all jobs."""

    def __init__(self) -> None:
        self._by_length: list[Waiting] = []
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._by_length)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Those of which a row waits, the oldest first."""
        return tuple(self._jobs)

    def add(self, job: Job) -> None:
        self._jobs.append(job)
        job.waiting = sorted((Waiting(job, i, len(row.ids)) for i, row in enumerate(job.rows)), key=_length)
        job.left = len(job.waiting)
        self._by_length += job.waiting
        self._by_length.sort(key=_length)

    def remove(self, job: Job) -> None:
        """Forget a job: it was cancelled, or failed."""
        if job in self._jobs:
            self._jobs.remove(job)
            self._by_length = [w for w in self._by_length if w.job is not job]

    def take(self, budget: int) -> list[Waiting]:
        """The next batch: the longest row of the oldest job, and the longest of those that are little shorter.

        At most `budget` tokens when each is padded to the first; one row at least. [] when none waits.
        """
        if not self._jobs:
            return []
        oldest = self._jobs[0].waiting
        while oldest[-1].taken:
            oldest.pop()
        length = oldest[-1].length
        # Rows of the same length lie in the order in which they came.
        first = last = self._by_length.index(oldest[-1], bisect.bisect_left(self._by_length, length, key=_length))
        shortest = min(length - SHORT, math.floor(length * (1 - PADDING)))
        count = max(1, min(budget, MAX_TOKENS) // max(1, length))
        while last + 1 < min(len(self._by_length), first + count) and self._by_length[last + 1].length == length:
            last += 1
        while first > 0 and last - first + 1 < count and self._by_length[first - 1].length >= shortest:
            first -= 1
        batch = self._by_length[first : last + 1]
        del self._by_length[first : last + 1]
        for waiting in batch:
            waiting.taken = True
            waiting.job.left -= 1
        self._jobs = [job for job in self._jobs if job.left]
        return batch


class Speed:
    """How many tokens fit into a slice, from how long slices took.

    A step at a time: what a forward costs beside its tokens would make few tokens look slow, and ever fewer.
    """

    def __init__(self) -> None:
        self.budget = FIRST_TOKENS
        """Tokens of a slice."""

    def observe(self, tokens: float, seconds: float) -> None:
        """A slice of `tokens` took `seconds`."""
        fitting = tokens * SLICE_S / max(seconds, 1e-9)
        if seconds > SLICE_S:
            self.budget = max(1, int(max(fitting, self.budget / 2)))
        elif tokens >= self.budget / 2:
            self.budget = min(MAX_TOKENS, math.ceil(max(self.budget, min(fitting, 2 * self.budget))))

    def pieces(self, tokens: int) -> int:
        """How many slices a forward of `tokens` is cut into."""
        # A forward a little over its slice isn't cut: each piece waits for the device.
        return max(1, round(tokens / self.budget))
