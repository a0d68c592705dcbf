"""What the scheduler knows: every request that waits or runs, and what has become of it. Pure Python, no arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mlxinfer.engine.memory import RESERVE_TOKENS, KVCost
from mlxinfer.engine.pace import Pace
from mlxinfer.engine.steps import Release, Step

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from mlxinfer.types import FinishReason

TURN = 4
"""Steps of one adapter before another that has work gets its turn: each change builds the batch anew."""
TRIAL = 4
"""Tokens that a request makes alone after its first failed step; the power of that after the next ones."""


@dataclass(slots=True)
class Tracked:
    """What the scheduler knows of one request."""

    request_id: str
    prompt_length: int
    max_tokens: int
    eos_token_ids: frozenset[int]
    priority: int = 0
    """Higher comes first."""
    boundaries: tuple[int, ...] = ()
    """Positions where a chunk ends and the state is remembered; rising."""
    whole: bool = False
    """All of the prompt is computed, whatever is known of it."""
    leader: str | None = None
    """A request with the same first `shared` tokens; while it is there and hasn't computed them, this one waits."""
    shared: int = 0
    hint: int = 0
    """Tokens that the prefix cache seemed to hold on arrival."""
    arrival: int = 0
    num_computed_tokens: int = 0
    """Tokens whose keys are in the cache, or scheduled to be."""
    num_scheduled: int = 0
    """Output tokens asked of the runner, read or not."""
    rebuilt: int = 0
    """Output tokens that are computed again like a prompt, after the row was lost."""
    output: list[int] = field(default_factory=list[int])
    finished: FinishReason | None = None
    waited: int = 0
    """Tokens that were computed for others while this one waited for its next turn."""
    strikes: int = 0
    """Failed steps that this request had a part in."""
    failed_alone: int = 0
    """Those of them in which it was alone, since it last made its tokens."""
    rowless: bool = False
    """It had a row and lost it; the runner still knows the request."""
    adapter: str = ""
    """What it is computed with: a step has rows of one adapter only."""
    trial: int = 0
    """Tokens to make alone before it may join the others again."""

    @property
    def prefilled(self) -> bool:
        # The last token is the input of the first decode step.
        return self.remaining_prefill == 0

    @property
    def remaining_prefill(self) -> int:
        return max(0, self.prompt_length + self.rebuilt - 1 - self.num_computed_tokens)

    def reserved_tokens(self) -> int:
        """Tokens to keep memory for."""
        made = max(self.num_scheduled, len(self.output))
        return self.prompt_length + max(min(self.max_tokens, RESERVE_TOKENS), min(self.max_tokens, made + 1))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step meant for one request: its new token, or its end."""

    request_id: str
    token: int | None
    finished: FinishReason | None


@dataclass(slots=True)
class Turns:
    """Adapters take turns of a few steps; the one whose last turn is longest ago is next."""

    current: str = ""
    left: int = 0
    """Steps that the current one may go on for."""
    last: dict[str, int] = field(default_factory=dict[str, int])
    """The number of each adapter's last step; of those only that have requests."""

    def order(self, present: Iterable[str]) -> list[str]:
        """Who may have the next step, the first choice first. `present` are those with requests, oldest first."""
        names = list(dict.fromkeys(present))
        self.last = {name: self.last[name] for name in names if name in self.last}
        names.sort(key=lambda name: self.last.get(name, -1))
        if self.left > 0 and self.current in names:
            names.remove(self.current)
            names.insert(0, self.current)
        return names

    def took(self, adapter: str, number: int) -> None:
        """Note whose a step was."""
        self.left = self.left - 1 if adapter == self.current and self.left > 0 else TURN - 1
        self.current = adapter
        self.last[adapter] = number


@dataclass(slots=True)
class SchedulerState:
    """All requests that are waiting or running, in order of arrival."""

    max_num_seqs: int
    prefill_chunk: int
    """Prompt tokens per step at most."""
    fused: bool = True
    """Prompt chunks and decode rows share one forward; else each step has one chunk, in a forward of its own."""
    needs_checkpoints: bool = False
    """A prefix can be taken over at boundaries only, from the prefix cache; else anywhere, from a running row too."""
    kv: KVCost = field(default_factory=KVCost)
    kv_limit: int | None = None
    """Bytes that all running sequences may take."""
    patient: bool = False
    """Memory will become free elsewhere: nothing is started beyond the limit, not even alone."""
    short_of: int = 0
    """Bytes that the first in line lacked in the last step."""
    pace: Pace = field(default_factory=Pace)
    requests: dict[str, Tracked] = field(default_factory=dict[str, Tracked])
    started: dict[str, None] = field(default_factory=dict[str, None])
    """Requests that hold a place in the batch, in the order of their start."""
    release: list[Release] = field(default_factory=list[Release])
    """Rows that the runner still holds and nobody needs."""
    probation: list[str] = field(default_factory=list[str])
    """Requests that had a part in a failed step; while there are any, only the first one runs."""
    turns: Turns = field(default_factory=Turns)
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
        if request_id in self.probation:
            self.probation.remove(request_id)
        if request_id in self.started or request.rowless:
            self.started.pop(request_id, None)
            self.release.append(Release(request_id, tuple(request.output)))
        return True

    def rewind(self, request_id: str) -> None:
        """Take a running request's place away; it waits again and will be rebuilt from its tokens."""
        request = self.requests[request_id]
        self.started.pop(request_id, None)
        request.num_computed_tokens = 0
        request.rebuilt = 0
        request.rowless = True

    def preempt(self, request_id: str) -> None:
        """`rewind` a request whose row is sound: what it computed is left to the prefix cache."""
        self.release.append(Release(request_id, tuple(self.requests[request_id].output), final=False))
        self.rewind(request_id)

    def update(self, step: Step, tokens: Iterable[int], complete: Container[str] = ()) -> list[Outcome]:
        """Take in the tokens that a step's decode rows gave; tokens of requests that ended meanwhile are dropped.

        Requests in `complete` end with their token.
        """
        outcomes: list[Outcome] = []
        for row, token in zip(step.decode, tokens, strict=True):
            request = self.requests.get(row.request_id)
            if request is None or row.position != len(request.output):
                continue
            request.output.append(token)
            self._acquit(request)
            reason: Literal["stop", "length"] | None = None
            if token in request.eos_token_ids or row.request_id in complete:
                reason = "stop"
            elif len(request.output) >= request.max_tokens:
                reason = "length"
            outcomes.append(Outcome(row.request_id, token, reason))
            if reason is not None:
                self.end(row.request_id, reason)
        return outcomes

    def suspect(self, request_id: str, *, alone: bool = False) -> None:
        """Let a request run alone for a while: a step that it had a part in has failed. Longer each time."""
        request = self.requests[request_id]
        request.strikes += 1
        request.failed_alone += alone
        request.trial = TRIAL**request.strikes
        if request_id not in self.probation:
            self.probation.append(request_id)

    def _acquit(self, request: Tracked) -> None:
        if self.probation and self.probation[0] == request.request_id:
            request.trial -= 1
            if request.trial <= 0:
                request.failed_alone = 0
                self.probation.pop(0)

    def reserved_bytes(self) -> int:
        """Bytes that the running sequences take, or will."""
        return sum(self.kv.bytes(self.requests[r].reserved_tokens()) for r in self.started)
