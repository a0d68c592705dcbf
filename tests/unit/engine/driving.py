"""A scheduler without a model: a runner that invents tokens, a pace that is known, and what drives both."""

import random
from dataclasses import dataclass, field

from mlxinfer.engine.memory import KVCost
from mlxinfer.engine.pace import Load, Pace
from mlxinfer.engine.scheduler import (
    schedule,
)
from mlxinfer.engine.steps import Step
from mlxinfer.engine.tracked import SchedulerState, Tracked

EOS = 0


def truth(load: Load) -> float:
    """What steps take on the simulated machine, in seconds."""
    return 0.046 * load.forwards + 0.002 * load.tokens + 0.0065 * load.rows + 2e-8 * load.pairs


def ready(max_num_seqs: int = 4, prefill_chunk: int = 512, **kwargs) -> SchedulerState:
    """A state that knows the simulated machine."""
    state = SchedulerState(max_num_seqs, prefill_chunk, **kwargs)
    rng = random.Random(0)
    for _ in range(80):
        tokens = rng.choice([0, 20, 64, 128])
        load = Load(1, tokens, rng.choice([0, 1, 4]), 300 * tokens)
        state.pace.observe(load, truth(load))
    return state


class Slow(Pace):
    """Nothing fits into any time."""

    def tokens_within(self, seconds: float, beside: Load, context: int) -> int:
        return 0


def tracked(name: str, prompt: int, limit: int = 5, **kwargs) -> Tracked:
    return Tracked(name, prompt, limit, frozenset(), **kwargs)


@dataclass
class FakeRunner:
    """Checks every step against what a real runner would need, and gives random tokens."""

    rng: random.Random
    max_num_seqs: int
    fused: bool
    prompts: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    decoded: dict[str, int] = field(default_factory=dict)

    def run(self, step: Step) -> list[int]:
        for release in step.release:
            # One that was preempted, or lost its row, and ends while it waits has nothing any more.
            self.computed.pop(release.request_id, None)
        held_before = dict(self.computed)
        for start in step.start:
            assert start.request_id not in self.computed
            self.total[start.request_id] = self.prompts[start.request_id] + len(start.output)
            assert start.cached <= self.total[start.request_id] - 1
            if start.source is not None:
                assert held_before[start.source] >= start.cached, "a follower takes what its leader has computed"
            self.computed[start.request_id] = start.cached
            self.decoded[start.request_id] = len(start.output)
        assert len(step.prefill) <= 1 or self.fused
        for p in step.prefill:
            assert p.start == self.computed[p.request_id], "chunks follow each other without a gap"
            assert p.start < p.end <= self.total[p.request_id] - 1, "the last token is left for decode"
            self.computed[p.request_id] = p.end
        ending = [row.request_id in {c.request_id for c in step.prefill} for row in step.decode]
        assert ending == sorted(ending), "rows whose prompt ends in this step come last"
        for row in step.decode:
            expected = self.total[row.request_id] - 1
            assert self.computed[row.request_id] >= expected, "decode after prefill"
            assert row.position == self.decoded[row.request_id], "positions count up"
            self.decoded[row.request_id] += 1
        assert len(self.computed) <= self.max_num_seqs
        return [self.rng.randrange(12) for _ in step.decode]


@dataclass
class Drive:
    """A whole life of an engine: random arrivals, ends, cancels, preemptions and failed steps."""

    seed: int
    mischief: bool
    ends: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        rng = random.Random(self.seed)
        kv = KVCost(per_token=1, step=1)
        state = SchedulerState(
            max_num_seqs=rng.choice([1, 2, 5]),
            prefill_chunk=rng.choice([1, 3, 16]),
            fused=rng.random() < 0.6,
            needs_checkpoints=rng.random() < 0.3,
            kv=kv,
            kv_limit=rng.choice([None, 60, 120]),
        )
        runner = FakeRunner(rng, state.max_num_seqs, state.fused)
        lengths = [1, 2, 7, 40, 45]
        to_come = [(rng.randrange(60), f"r{i}", rng.choice(lengths), rng.choice([1, 3, 9])) for i in range(25)]
        pending: tuple[Step, list[int]] | None = None
        for clock in range(20_000):
            for _, name, prompt, limit in [r for r in to_come if r[0] == clock]:
                runner.prompts[name] = prompt
                request = Tracked(name, prompt, limit, frozenset({EOS}), priority=rng.choice([0, 0, 1]))
                if prompt >= 40 and state.requests:
                    request.leader, request.shared = rng.choice(list(state.requests)), 0
                    request.shared = min(35, state.requests[request.leader].prompt_length - 1, prompt - 1)
                state.add(request)
            if self.mischief and state.requests and rng.random() < 0.05:
                self._end(state, rng.choice(list(state.requests)), "cancelled")
            if self.mischief and state.kv_limit and rng.random() < 0.1:
                state.kv_limit = rng.choice([60, 90, 200])
            step = schedule(state, lambda name, limit: rng.choice([0, 0, limit // 2, limit]))
            if self.mischief and rng.random() < 0.03:
                pending = self._fail(state, runner, step, pending)
                continue
            tokens = runner.run(step)
            reserved = state.reserved_bytes()
            assert state.kv_limit is None or len(state.started) <= 1 or reserved <= state.kv_limit
            if pending is not None:
                self._take(state, *pending)
            pending = None if step.empty else (step, tokens)
            if clock > 60 and not state.requests and pending is None:
                return
        raise AssertionError(f"not finished: {list(state.requests)}")

    def _take(self, state: SchedulerState, step: Step, tokens: list[int]) -> None:
        for outcome in state.update(step, tokens):
            if outcome.finished is not None:
                assert outcome.request_id not in self.ends, "exactly one end"
                self.ends[outcome.request_id] = outcome.finished

    def _end(self, state: SchedulerState, name: str, reason) -> None:
        assert state.end(name, reason)
        assert name not in self.ends
        self.ends[name] = reason

    def _fail(self, state: SchedulerState, runner: FakeRunner, step: Step, pending) -> None:
        """What the engine does after a failed step."""
        state.release.clear()
        runner.computed.clear()
        involved = step.request_ids | (pending[0].request_ids if pending else set())
        for name in list(state.started):
            state.rewind(name)
        for name in [n for n in state.requests if n in involved]:
            state.suspect(name)
