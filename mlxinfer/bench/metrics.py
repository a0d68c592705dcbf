"""From recorded moments to figures: TTFT, TPOT, ITL, E2E and rates. Pure; seconds and tokens."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mlxinfer.bench.stats import Spread, spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlxinfer.bench.client import Record

MOSTLY_CACHED = 0.5
"""A prompt of which the server had this share already says nothing about the speed of prefill."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Of one request that was answered with at least one chunk of text."""

    ttft: float
    """From sending to the first chunk with text."""
    e2e: float
    """From sending to the end of the stream."""
    tpot: float | None
    """(E2E - TTFT) / (tokens - 1); None for fewer than two tokens."""
    gaps: tuple[float, ...]
    """Between chunks with text: ITL, of each token where every chunk holds one."""
    tokens: int
    counted: bool
    """True: `tokens` is the number of chunks, because the server sent no usage."""


def measure(start: float, events: Sequence[tuple[float, str]], end: float, tokens: int | None) -> Metrics | None:
    """Metrics of a request sent at `start` whose chunks came as `events` (moment, text) and which ended at `end`.

    `tokens` is what the server's usage says, or None. None comes back when no text came.
    """
    if not events:
        return None
    moments = [moment for moment, _ in events]
    ttft, e2e = moments[0] - start, end - start
    number = len(events) if tokens is None else tokens
    tpot = (e2e - ttft) / (number - 1) if number > 1 else None
    return Metrics(ttft, e2e, tpot, tuple(b - a for a, b in pairwise(moments)), number, tokens is None)


def metrics_of(record: Record) -> Metrics | None:
    """None for a request that failed or got no text."""
    if record.error is not None:
        return None
    return measure(record.start, record.events, record.end, record.completion_tokens)


@dataclass(frozen=True, slots=True)
class Summary:
    """Of many requests that ran together, or of several such rounds pooled. None where nothing was measured.

    Requests that failed are counted in `errors` and are in no other figure, their tokens and time included; what they
    cost the others shows there.
    """

    requests: int
    errors: int
    empty: int
    """Answered without any text."""
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    longest_gap: float | None
    itl_p99_over_p50: float | None
    wall: float
    """From the first request sent to the end of the last one that was answered; of rounds, the median."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """None where the server says nothing of it."""
    cached_share: float | None
    total_tok_s: float | None
    """Output tokens per second of wall."""
    decode_tok_s: float | None
    """Median over requests of 1 / TPOT."""
    prefill_tok_s: float | None
    """Median over requests of computed prompt tokens / TTFT, waiting included; mostly cached prompts left out."""
    tokens_per_chunk: float | None
    tokens_counted_from_chunks: bool
    """The server sends no usage."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


def summarize(rounds: Sequence[Sequence[Record]]) -> Summary:
    """Pool the records of rounds; wall and rates over wall are medians over the rounds."""
    records = [record for one in rounds for record in one]
    good = [record for record in records if record.error is None]
    measured = [(r, m) for r in good if (m := metrics_of(r)) is not None]
    gaps = [gap for _, m in measured for gap in m.gaps]
    itl = spread(gaps)
    tokens = sum(m.tokens for _, m in measured)
    chunks = sum(len(m.gaps) + 1 for _, m in measured)
    prompt = sum(r.prompt_tokens or 0 for r in good)
    cached = [r.cached_tokens for r in good if r.cached_tokens is not None]
    walls = [wall(one) for one in rounds]
    rates = [_tokens(one) / w for one, w in zip(rounds, walls, strict=True) if w]
    return Summary(
        requests=len(records),
        errors=len(records) - len(good),
        empty=len(good) - len(measured),
        ttft=spread(m.ttft for _, m in measured),
        tpot=spread(m.tpot for _, m in measured if m.tpot is not None),
        itl=itl,
        e2e=spread(m.e2e for _, m in measured),
        longest_gap=max(gaps, default=None),
        itl_p99_over_p50=itl.p99 / itl.p50 if itl and itl.p50 else None,
        wall=statistics.median(walls) if walls else 0.0,
        prompt_tokens=prompt,
        output_tokens=tokens,
        cached_tokens=sum(cached) if cached else None,
        cached_share=sum(cached) / prompt if cached and prompt else None,
        total_tok_s=statistics.median(rates) if measured and rates else None,
        decode_tok_s=_median(1 / m.tpot for _, m in measured if m.tpot),
        prefill_tok_s=_median(_prefill(r, m) for r, m in measured),
        tokens_per_chunk=tokens / chunks if chunks else None,
        tokens_counted_from_chunks=any(m.counted for _, m in measured),
    )


def wall(records: Iterable[Record]) -> float:
    """Seconds from the first request sent to the end of the last; of the answered ones, 0 if there is none."""
    good = [record for record in records if record.error is None]
    return max(r.end for r in good) - min(r.start for r in good) if good else 0.0


def _tokens(records: Iterable[Record]) -> int:
    return sum(m.tokens for r in records if (m := metrics_of(r)) is not None)


def _prefill(record: Record, metrics: Metrics) -> float | None:
    if not record.prompt_tokens or metrics.ttft <= 0:
        return None
    computed = record.prompt_tokens - (record.cached_tokens or 0)
    return computed / metrics.ttft if computed > MOSTLY_CACHED * record.prompt_tokens else None


def _median(values: Iterable[float | None]) -> float | None:
    kept = [value for value in values if value is not None]
    return statistics.median(kept) if kept else None
