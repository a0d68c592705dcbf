"""What the runner keeps of each request, and of the batch that is under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxinfer.engine.sampling import BatchSampler, RowSampling, RowState, uniform

if TYPE_CHECKING:
    from mlxinfer.engine.kv import Sequence
    from mlxinfer.engine.padded import SplitBatch
    from mlxinfer.engine.ragged import Batch
    from mlxinfer.engine.steps import DecodeRow, Step


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What the runner needs to know of a request before its first step; plain data like Step."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: RowSampling
    seed: int
    cache_key: str = ""
    """Requests share prefixes with others of the same key only: adapter and tenant."""


@dataclass(slots=True)
class Row:
    spec: RowSpec
    state: RowState
    tokens: tuple[int, ...]
    """The prompt, and after a rebuild what had been generated."""
    sequence: Sequence | None = None
    token: mx.array | None = None
    """The token to feed next, [1], not yet read; None means the last of `tokens`."""

    @property
    def held(self) -> Sequence:
        assert self.sequence is not None, f"{self.spec.request_id} has not started"
        return self.sequence


@dataclass(slots=True)
class Launched:
    """A step whose graph is built. `tokens` [rows] may still be computing; `marker` is ready when a chunk is."""

    step: Step
    tokens: mx.array | None = None
    marker: mx.array | None = None
    unsubmitted: list[list[mx.array]] = field(default_factory=list)
    """What the step has to compute, in the order in which it is of use, until that is submitted."""

    def submit(self) -> None:
        """Let it compute."""
        groups, self.unsubmitted = self.unsubmitted, []
        for arrays in groups:
            mx.async_eval(arrays)

    def wait(self) -> None:
        """Until it has been computed. A prompt's last chunk too: submitted whole, no cancel or arrival could come
        between."""
        self.submit()
        ready = self.marker if self.tokens is None else self.tokens
        if ready is not None:
            mx.eval(ready)

    def read(self) -> list[int]:
        """Wait for the step; one token per decode row."""
        self.wait()
        return [] if self.tokens is None else self.tokens.tolist()  # pyright: ignore[reportReturnType]


@dataclass(slots=True)
class Decoding:
    """The batch of the last decode step, kept while the same rows decode."""

    ids: tuple[str, ...]
    rows: list[Row]
    sampler: BatchSampler
    batch: Batch | SplitBatch | None = None
    tokens: mx.array | None = field(default=None)


def uniforms(rows: list[Row], decode: tuple[DecodeRow, ...]) -> list[float]:
    """One random number per row; greedy rows need none."""
    return [
        0.0 if row.state.sampling.greedy else uniform(row.spec.seed, r.position)
        for row, r in zip(rows, decode, strict=True)
    ]
