"""Which work comes next: pure Python, no arrays. One function, `schedule`, from the state to a Step.

A Step is plain data and the runner's only input, so that a log of steps replayed elsewhere gives the same state.
The runner works one step ahead of what the scheduler knows: a step may hold rows whose last token isn't read yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mlxinfer.types import FinishReason

AGING_CHUNKS = 4
"""Each this many prefill chunks given to others, a waiting prompt counts as one chunk shorter, for good."""
PRIORITY_AGING = 256
"""Each this many prefill chunks given to others, a waiting prompt counts as one priority higher."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute prompt tokens [start, end) of a request."""

    request_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """Compute one token of a request. `position` counts its output tokens from 0."""

    request_id: str
    position: int


@dataclass(frozen=True, slots=True)
class Step:
    """What the runner does next: release rows, then a prefill chunk, then one token for each decode row."""

    number: int
    release: tuple[str, ...] = ()
    prefill: PrefillChunk | None = None
    decode: tuple[DecodeRow, ...] = ()
    started: tuple[str, ...] = ()
    """Requests that get their place in the batch with this step."""

    @property
    def empty(self) -> bool:
        return not (self.release or self.prefill or self.decode)


@dataclass(slots=True)
class Tracked:
    """What the scheduler knows of one request."""

    request_id: str
    prompt_length: int
    max_tokens: int
    eos_token_ids: frozenset[int]
    priority: int = 0
    """Higher comes first."""
    arrival: int = 0
    num_computed_tokens: int = 0
    """Prompt tokens whose keys are in the cache, or scheduled to be."""
    num_scheduled: int = 0
    """Output tokens asked of the runner, read or not."""
    output: list[int] = field(default_factory=list[int])
    finished: FinishReason | None = None
    waited: int = 0
    """Prefill chunks that went to others while this one waited for its next."""

    @property
    def prefilled(self) -> bool:
        # The last prompt token is the input of the first decode step.
        return self.num_computed_tokens >= self.prompt_length - 1

    @property
    def remaining_prefill(self) -> int:
        return max(0, self.prompt_length - 1 - self.num_computed_tokens)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step meant for one request: its new token, or its end."""

    request_id: str
    token: int | None
    finished: FinishReason | None


@dataclass(slots=True)
class SchedulerState:
    """All requests that are waiting or running, in order of arrival."""

    max_num_seqs: int
    prefill_chunk: int
    requests: dict[str, Tracked] = field(default_factory=dict[str, Tracked])
    started: set[str] = field(default_factory=set[str])
    """Requests that hold a place in the batch."""
    release: list[str] = field(default_factory=list[str])
    """Ended requests whose rows the runner still holds."""
    step_number: int = 0
    arrivals: int = 0

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.started)

    def add(self, request: Tracked) -> None:
        """Queue a request. Ids must be new."""
        assert request.request_id not in self.requests
        assert request.prompt_length >= 1
        request.arrival = self.arrivals
        self.arrivals += 1
        self.requests[request.request_id] = request

    def end(self, request_id: str, reason: FinishReason) -> bool:
        """End a request from outside; False when it has ended already."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        request.finished = reason
        if request_id in self.started:
            self.started.discard(request_id)
            self.release.append(request_id)
        return True

    def update(self, step: Step, tokens: Iterable[int]) -> list[Outcome]:
        """Take in the tokens that a step's decode rows gave; tokens of requests that ended meanwhile are dropped."""
        outcomes: list[Outcome] = []
        for row, token in zip(step.decode, tokens, strict=True):
            request = self.requests.get(row.request_id)
            if request is None:
                continue
            request.output.append(token)
            reason: Literal["stop", "length"] | None = None
            if token in request.eos_token_ids:
                reason = "stop"
            elif len(request.output) >= request.max_tokens:
                reason = "length"
            outcomes.append(Outcome(row.request_id, token, reason))
            if reason is not None:
                self.end(row.request_id, reason)
        return outcomes


def schedule(state: SchedulerState) -> Step:
    """The next step, and the state's counters moved on. Empty when there is nothing to do.

    Every running row decodes in every step. Beside them one prompt is prefilled by one chunk, a shorter one while
    rows decode, so that their streams keep moving. The prompt with the least left comes first; waiting makes a
    prompt count as shorter and more urgent, and it keeps what it has earned, so that none starves.
    """
    release = tuple(state.release)
    state.release.clear()
    before = frozenset(state.started)
    _start_one_token_prompts(state)
    chunk = _next_chunk(state)
    started = tuple(r for r in state.requests if r in state.started and r not in before)
    decode = tuple(
        DecodeRow(r.request_id, r.num_scheduled)
        for r in state.requests.values()
        if r.request_id in state.started and r.prefilled and r.num_scheduled < r.max_tokens
    )
    for row in decode:
        state.requests[row.request_id].num_scheduled += 1
    if release or chunk or decode:
        state.step_number += 1
    return Step(state.step_number, release, chunk, decode, started)


def _start_one_token_prompts(state: SchedulerState) -> None:
    """They need no prefill: they decode in this very step and take nobody's turn."""
    waiting = [r for r in state.requests.values() if r.prefilled and r.request_id not in state.started]
    for request in sorted(waiting, key=_order(state)):
        if len(state.started) >= state.max_num_seqs:
            return
        state.started.add(request.request_id)


def _order(state: SchedulerState) -> Callable[[Tracked], tuple[int, int, int]]:
    """The sort key of requests that want a turn: the smallest goes first."""

    def key(r: Tracked) -> tuple[int, int, int]:
        urgency = r.priority + r.waited // PRIORITY_AGING
        return (-urgency, r.remaining_prefill - r.waited * state.prefill_chunk // AGING_CHUNKS, r.arrival)

    return key


def _next_chunk(state: SchedulerState) -> PrefillChunk | None:
    candidates = [r for r in state.requests.values() if r.request_id in state.started and not r.prefilled]
    if len(state.started) < state.max_num_seqs:
        candidates += [r for r in state.requests.values() if r.request_id not in state.started and not r.prefilled]
    if not candidates:
        return None
    chosen = min(candidates, key=_order(state))
    for r in candidates:
        r.waited += r is not chosen
    state.started.add(chosen.request_id)
    decoding = any(r.prefilled and r.request_id in state.started for r in state.requests.values())
    size = max(1, state.prefill_chunk // 4) if decoding else state.prefill_chunk
    start = chosen.num_computed_tokens
    end = min(chosen.prompt_length - 1, start + size)
    chosen.num_computed_tokens = end
    return PrefillChunk(chosen.request_id, start, end)
