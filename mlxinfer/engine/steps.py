"""What the scheduler tells the runner: plain data, so that a log of steps replayed elsewhere gives the same state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Release:
    """Take a row's memory away and offer it to the prefix cache; `output` are its tokens that were read."""

    request_id: str
    output: tuple[int, ...] = ()
    final: bool = True
    """False: the request waits for another start."""


@dataclass(frozen=True, slots=True)
class Start:
    """Give a request its row. Its first `cached` tokens come from the prefix cache, or from the running `source`.

    `output` are tokens that it had made before it lost its row; they are computed again like a prompt.
    """

    request_id: str
    cached: int = 0
    source: str | None = None
    output: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute tokens [start, end) of a request. With `checkpoint`, remember the state at `end` for others."""

    request_id: str
    start: int
    end: int
    checkpoint: bool = False


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Compute one token of a request. `position` counts its output tokens from 0."""

    request_id: str
    position: int


@dataclass(frozen=True, slots=True)
class Step:
    """What the runner does next, in this order: release rows, start rows, prompt chunks, one token per decode row.

    A request whose last chunk is in a step may decode in the same step. All that it computes goes through one adapter.
    """

    number: int
    release: tuple[Release, ...] = ()
    start: tuple[Start, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    adapter: str = ""
    """Its name; empty: the model as it is."""

    @property
    def empty(self) -> bool:
        return not (self.release or self.start or self.prefill or self.decode)

    @property
    def request_ids(self) -> set[str]:
        """Every request that the step computes something for."""
        return {part.request_id for part in (*self.start, *self.prefill, *self.decode)}
