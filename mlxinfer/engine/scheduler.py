"""Which work comes next: pure Python, no arrays. One function, `schedule`, from the state to a Step.

The runner works one step ahead of what the scheduler knows: a step may hold rows whose last token isn't read yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.engine.pace import Load
from mlxinfer.engine.steps import DecodeRow, PrefillChunk, Start, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.engine.tracked import SchedulerState, Tracked

AGING = 4
"""For each this many tokens computed for others, a waiting prompt counts as one token shorter, for good."""
PRIORITY_AGING = 1 << 17
"""For each this many tokens computed for others, a waiting prompt counts as one priority higher."""
STALL = 1.7
"""Beside running streams, a step takes at most this many times a step without prompts …"""
STALL_PER_STREAM = 2.2
STALL_MOST = 4.0
"""… and this much more for each prompt that waits per stream, up to so many times: the more wait, and the fewer have to
go on more slowly for it, the more of the time is theirs …"""
STALL_FLOOR_S = 0.05
"""… or this long: twenty tokens a second look smooth."""
ALONE_S = 0.2
"""A step with prompts only takes about this long, so that a newcomer isn't kept waiting …"""
ALONE_FORWARDS = 4
"""… or this many times what any forward costs, so that a slow machine doesn't read its weights for a few tokens."""
MIN_CHUNK = 16
"""Prompt tokens that a step computes at least, whatever is predicted."""
MIN_SHARED = 32
"""A request waits for another to compute their common prefix when it spares at least this many tokens."""


def schedule(state: SchedulerState, lookup: Callable[[str, int], int] | None = None) -> Step:
    """The next step, and the state's counters moved on. Empty when there is nothing to do.

    A step has rows of one adapter, and adapters take turns. Every running row of the adapter decodes in its steps.
    Beside them a step takes as many prompt tokens as its predicted time
    allows. The prompt with the least left comes first; waiting makes a prompt count as shorter and more urgent, and
    it keeps what it has earned, so that none starves. `lookup(request_id, limit)` says how many of a request's first
    tokens, at most `limit`, the prefix cache holds.
    """
    state.short_of = 0
    lost = _make_room(state)
    release = tuple(state.release)
    state.release.clear()
    step = Step(state.step_number, release)
    for adapter in state.turns.order(r.adapter for name, r in state.requests.items() if name not in lost) or [""]:
        plan = _Plan(state, lookup, lost, adapter)
        plan.fill()
        step = Step(state.step_number, release, tuple(plan.starts), tuple(plan.chunks), plan.decode(), adapter)
        if step.start or step.prefill or step.decode:
            state.turns.took(adapter, state.step_number)
            break
    if not step.empty:
        state.step_number += 1
    return step


def release_only(state: SchedulerState) -> Step:
    """A step that only lets rows go, so that what they computed can be found by those who start in the next one."""
    step = Step(state.step_number, tuple(state.release))
    state.release.clear()
    state.step_number += 1
    return step


def load_of(state: SchedulerState, step: Step) -> Load:
    """What a step computes, for Pace. Right after `schedule` gave it."""
    decoding = [state.requests[row.request_id] for row in step.decode if row.request_id in state.requests]
    pairs = sum((c.end - c.start) * (c.start + c.end) // 2 for c in step.prefill)
    pairs += sum(r.prompt_length + r.num_scheduled for r in decoding)
    forwards = int(bool(step.prefill or step.decode)) if state.fused else len(step.prefill) + bool(step.decode)
    return Load(forwards, sum(c.end - c.start for c in step.prefill), len(step.decode), pairs)


def _make_room(state: SchedulerState) -> set[str]:
    """Take places away while the running sequences outgrow their memory: the least urgent, latest come goes first."""
    lost: set[str] = set()
    if state.kv_limit is None:
        return lost
    while len(state.started) > 1 and state.reserved_bytes() > state.kv_limit:
        victim = min((state.requests[r] for r in state.started), key=lambda r: (r.priority, -r.arrival))
        state.preempt(victim.request_id)
        lost.add(victim.request_id)
    return lost


class _Plan:
    """One step in the making."""

    def __init__(
        self, state: SchedulerState, lookup: Callable[[str, int], int] | None, excluded: set[str], adapter: str
    ) -> None:
        self.state = state
        self.lookup = lookup
        alone = state.probation[0] if state.probation else None
        self.adapter = adapter
        self.requests = [
            r for name, r in state.requests.items() if name not in excluded and (alone is None or name == alone)
        ]
        """Those of other adapters too: they can't have this step, but places and memory are given in one order."""
        self.starts: list[Start] = []
        self.chunks: list[PrefillChunk] = []
        running = [r for r in self.requests if r.request_id in state.started and r.prefilled]
        self.live = [r for r in running if r.adapter == adapter]
        self.streams_elsewhere = len(running) - len(self.live)
        """Rows of other adapters, which wait for this step."""
        self.computed = {r.request_id: r.num_computed_tokens for r in self.requests}
        """Before this step: what a follower may take from its leader."""
        self.reserved = 0 if state.kv_limit is None else state.reserved_bytes()

    def decode(self) -> tuple[DecodeRow, ...]:
        """One token for every row that has more to make."""
        # Those whose prompt ends in this step come last: the runner puts their tokens behind the running rows'.
        ending = {c.request_id for c in self.chunks}
        live = sorted(self.live, key=lambda r: r.request_id in ending)
        rows = [r for r in live if r.num_scheduled < r.max_tokens]
        made = tuple(DecodeRow(r.request_id, r.num_scheduled) for r in rows)
        for r in rows:
            r.num_scheduled += 1
        return made

    def fill(self) -> None:
        """Start requests and give them prompt chunks while places, memory and time last."""
        order = self._order()
        waiting = [r for r in self.requests if not (r.request_id in self.state.started and r.prefilled)]
        ready = self._with_places(sorted((r for r in waiting if not self._blocked(r)), key=order))
        # What needs no prefill decodes in this very step and takes nobody's turn.
        ready.sort(key=lambda r: self._expected(r) > 0)
        given: set[str] = set()
        full = False
        for request in ready:
            mine = request.adapter == self.adapter
            if mine and not request.prefilled and self._room_for(request) < 1:
                break
            if not mine:
                # It starts in a step of its adapter; what it needs is kept for it.
                full = full or not (request.request_id in self.state.started or self._reserve(request))
                continue
            if request.request_id not in self.state.started:
                # Memory goes to the first in line, so that many small ones don't keep a large one out for good.
                full = full or not self._start(request)
                if full:
                    continue
            if not request.prefilled:
                given.add(request.request_id)
                self._add_chunk(request, max(1, self._room_for(request)))
            if request.prefilled:
                self.live.append(request)
            if self.chunks and not self.state.fused:
                break
        total = sum(c.end - c.start for c in self.chunks) + len(self.live)
        for request in waiting:
            if request.request_id not in given:
                request.waited += total

    def _with_places(self, ready: list[Tracked]) -> list[Tracked]:
        """Those that have a place or get one of those that are free, the first in line: not the first to be ready, or
        newcomers whose prompts are cached would keep the others out."""
        free = self.state.max_num_seqs - len(self.state.started)
        chosen: list[Tracked] = []
        for request in ready:
            if request.request_id not in self.state.started:
                if free < 1:
                    continue
                free -= 1
            chosen.append(request)
        return chosen

    def _expected(self, request: Tracked) -> int:
        """Prompt tokens left to compute, as far as is known before it starts."""
        if request.num_computed_tokens:
            return request.remaining_prefill
        given = request.hint if self._leader(request) is None else max(request.hint, request.shared)
        return max(0, request.remaining_prefill - given)

    def _blocked(self, request: Tracked) -> bool:
        """Another is about to compute what this one needs."""
        leader = self._leader(request)
        return leader is not None and self.computed[leader.request_id] < request.shared

    def _leader(self, request: Tracked) -> Tracked | None:
        if request.leader is None or request.request_id in self.state.started:
            return None
        leader = self.state.requests.get(request.leader)
        if leader is None or request.leader not in self.computed:
            return None
        return leader

    def _order(self) -> Callable[[Tracked], tuple[int, int, int]]:
        """The sort key of requests that want a turn, the smallest first. A leader is as urgent as its followers."""
        urgency: dict[str, int] = {}
        left: dict[str, int] = {}
        for r in self.requests:
            if self._blocked(r) and r.leader is not None:
                urgency[r.leader] = max(urgency.get(r.leader, r.priority), r.priority)
                needed = r.shared - self.computed[r.leader]
                left[r.leader] = min(left.get(r.leader, needed), needed)

        def key(r: Tracked) -> tuple[int, int, int]:
            priority = max(r.priority, urgency.get(r.request_id, r.priority)) + r.waited // PRIORITY_AGING
            remaining = min(self._expected(r), left.get(r.request_id, 1 << 62))
            return (-priority, remaining - r.waited // AGING, r.arrival)

        return key

    def _start(self, request: Tracked) -> bool:
        """Give the request a place, with what is computed of it already. False when there is no place or memory."""
        state = self.state
        if len(state.started) >= state.max_num_seqs or not self._reserve(request):
            return False
        request.rowless = False
        output = tuple(request.output)
        request.rebuilt = len(output)
        request.num_scheduled = len(output)
        limit = request.prompt_length + request.rebuilt - 1
        leader, shared = self._leader(request), min(request.shared, limit)
        # From the cache nothing may be claimed that is not used.
        if leader is not None and not state.needs_checkpoints and shared >= request.hint + MIN_SHARED:
            cached, source = shared, leader.request_id
        else:
            cached, source = self.lookup(request.request_id, limit) if self.lookup else 0, None
        request.num_computed_tokens = cached
        state.started[request.request_id] = None
        self.starts.append(Start(request.request_id, cached, source, output))
        return True

    def _reserve(self, request: Tracked) -> bool:
        """Put its memory aside; False when there isn't enough."""
        state = self.state
        if state.kv_limit is None:
            return True
        need = state.kv.bytes(request.reserved_tokens())
        # One sequence may always run, when no memory becomes free elsewhere: whether it fits was checked on arrival.
        if (self.reserved or state.patient) and self.reserved + need > state.kv_limit:
            state.short_of = self.reserved + need - state.kv_limit
            return False
        self.reserved += need
        return True

    def _room_for(self, request: Tracked) -> int:
        """Prompt tokens of this request that the step has time for; 0 when it isn't worth a start."""
        state = self.state
        tokens = sum(c.end - c.start for c in self.chunks)
        rows = len(self.live)
        contexts = sum(r.prompt_length + r.num_scheduled for r in self.live)
        pairs = contexts + sum((c.end - c.start) * (c.start + c.end) // 2 for c in self.chunks)
        quiet = state.pace.seconds(Load(1, 0, rows, contexts))
        streams = rows + self.streams_elsewhere
        if streams:
            # Without those whose prompt ends in this step: what is put beside them delays their first token.
            crowd = sum(not r.prefilled and not self._blocked(r) for r in self.requests)
            stall = min(STALL_MOST, STALL + STALL_PER_STREAM * max(1, crowd) / streams)
            seconds = max(stall * quiet, STALL_FLOOR_S)
        else:
            seconds = max(ALONE_FORWARDS * quiet, ALONE_S)
        beside = Load(1 if state.fused else 1 + bool(rows), tokens, rows, pairs)
        size = state.pace.tokens_within(seconds, beside, request.num_computed_tokens)
        if not self.chunks:
            size = max(size, MIN_CHUNK)
        elif size < min(MIN_CHUNK, request.remaining_prefill):
            return 0
        return min(size, state.prefill_chunk - tokens)

    def _add_chunk(self, request: Tracked, size: int) -> None:
        start = request.num_computed_tokens
        end = min(start + size, start + request.remaining_prefill)
        cut = next((b for b in request.boundaries if start < b <= end), None)
        end = end if cut is None else cut
        request.num_computed_tokens = end
        self.chunks.append(PrefillChunk(request.request_id, start, end, checkpoint=cut is not None))
