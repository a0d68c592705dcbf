"""The scheduler by simulation, without mlx."""

import random
from dataclasses import dataclass, field

import pytest

from mlxinfer.engine.memory import KVCost
from mlxinfer.engine.pace import Load, Pace
from mlxinfer.engine.scheduler import (
    MIN_CHUNK,
    MIN_SHARED,
    STALL_FLOOR_S,
    load_of,
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


def test_every_request_ends_exactly_once_over_hundreds_of_random_lives():
    for seed in range(120):
        drive = Drive(seed, mischief=seed % 3 > 0)
        drive.run()
        assert len(drive.ends) == 25, seed


def test_a_row_that_ended_is_released_in_the_next_step_and_only_once():
    state = SchedulerState(max_num_seqs=2, prefill_chunk=8)
    state.add(tracked("a", 4, 10))
    assert schedule(state).prefill
    state.end("a", "cancelled")
    assert [r.request_id for r in schedule(state).release] == ["a"]
    assert schedule(state).empty


def test_a_request_that_never_started_leaves_nothing_to_release():
    state = SchedulerState(max_num_seqs=1, prefill_chunk=8)
    state.add(tracked("a", 4, 10))
    state.end("a", "cancelled")
    assert schedule(state).empty


def test_max_tokens_is_never_exceeded_although_the_runner_is_a_step_ahead():
    state = SchedulerState(max_num_seqs=1, prefill_chunk=8)
    state.add(tracked("a", 1, 2))
    rows = [schedule(state).decode for _ in range(4)]
    assert [len(r) for r in rows] == [1, 1, 0, 0]


def test_the_first_token_comes_with_the_last_chunk():
    state = SchedulerState(max_num_seqs=2, prefill_chunk=8)
    state.add(tracked("a", 12))
    first, second = schedule(state), schedule(state)
    assert [(c.start, c.end) for c in first.prefill] == [(0, 8)]
    assert [(c.start, c.end) for c in second.prefill] == [(8, 11)]
    assert not first.decode
    assert [r.request_id for r in second.decode] == ["a"]


def test_a_short_prompt_overtakes_a_long_one_that_is_being_prefilled():
    state = SchedulerState(max_num_seqs=4, prefill_chunk=10)
    state.add(tracked("long", 1000))
    schedule(state)
    state.add(tracked("short", 5))
    step = schedule(state)
    assert step.prefill[0].request_id == "short"
    assert [r.request_id for r in step.decode] == ["short"], "it decodes in the step that ends its prefill"


def test_several_short_prompts_share_a_step_and_one_forward():
    state = ready(max_num_seqs=8)
    for i in range(3):
        state.add(tracked(f"s{i}", 8))
    step = schedule(state)
    assert [c.end - c.start for c in step.prefill] == [7, 7, 7]
    assert len(step.decode) == 3
    assert load_of(state, step).forwards == 1


def test_a_model_that_is_not_fused_has_one_chunk_per_step():
    state = ready(max_num_seqs=8, fused=False)
    for i in range(3):
        state.add(tracked(f"s{i}", 17))
    step = schedule(state)
    assert len(step.prefill) == 1
    assert load_of(state, step).forwards == 2


def steps_until_done(state: SchedulerState, name: str, *, short: int, priority: int = 0) -> int:
    """Steps until `name` is done while a new prompt of `short` tokens arrives in each; 3000 when it never is."""
    for i in range(3000):
        state.add(tracked(f"s{i}", short, 1, priority=priority))
        for row in schedule(state).decode:
            state.end(row.request_id, "length")
        if name not in state.requests:
            return i
    return 3000


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones():
    state = SchedulerState(max_num_seqs=64, prefill_chunk=16)
    state.add(tracked("long", 200, 1))
    assert steps_until_done(state, "long", short=18) < 2000


def test_what_a_long_prompt_earned_by_waiting_is_kept_when_it_gets_a_turn():
    # 63 chunks of work took 3,066 steps when waiting was forgotten at each turn.
    state = ready(max_num_seqs=64, prefill_chunk=128)
    state.add(tracked("long", 8000, 1))
    assert steps_until_done(state, "long", short=130) < 1500


def test_a_low_priority_is_late_but_not_starved_by_a_stream_of_higher_ones():
    state = ready(max_num_seqs=64)
    state.add(tracked("low", 10, 1))
    assert 50 < steps_until_done(state, "low", short=600, priority=1) < 2500


def test_newcomers_whose_prompts_are_cached_do_not_keep_another_out():
    state = ready(max_num_seqs=2)
    state.add(tracked("long", 400, 1))
    for i in range(2000):
        while sum(name != "long" for name in state.requests) < 4:
            newcomer = tracked(f"cached{i}-{len(state.requests)}", 400, 3)
            newcomer.hint = 399
            state.add(newcomer)
        step = schedule(state, lambda name, limit: limit if name != "long" else 0)
        state.update(step, [7] * len(step.decode))
        if "long" not in state.requests:
            break
    assert i < 1500


def test_a_higher_priority_goes_first():
    state = SchedulerState(max_num_seqs=1, prefill_chunk=8)
    state.add(tracked("low", 4, 1))
    state.add(tracked("high", 8, 1, priority=5))
    assert schedule(state).prefill[0].request_id == "high"


def beside(streams: int) -> tuple[SchedulerState, Step]:
    """The first step in which a long prompt is read beside so many running streams."""
    state = ready(max_num_seqs=16)
    for i in range(streams):
        state.add(tracked(f"stream{i}", 1, 500))
    schedule(state)
    state.add(tracked("long", 5000))
    step = schedule(state)
    assert len(step.decode) == streams
    return state, step


@pytest.mark.parametrize(("streams", "stall"), [(1, 3.9), (4, 2.25), (9, 1.94)])
def test_a_chunk_beside_running_streams_keeps_to_their_share_of_time(streams: int, stall: float):
    state, step = beside(streams)
    quiet = truth(Load(1, 0, streams, streams))
    taken = truth(load_of(state, step))
    assert 0.85 * stall * quiet < taken <= 1.1 * max(stall * quiet, STALL_FLOOR_S)


def test_a_chunk_is_larger_alone_than_beside_running_streams():
    alone = ready(max_num_seqs=8)
    alone.add(tracked("long", 5000))
    assert schedule(alone).prefill[0].end > beside(4)[1].prefill[0].end


def test_a_prompt_goes_on_by_at_least_a_few_tokens_however_slow_the_machine_seems():
    state = ready(max_num_seqs=8)
    state.add(tracked("stream", 1, 500))
    schedule(state)
    state.pace = Slow()
    state.add(tracked("long", 5000))
    assert schedule(state).prefill[0].end == MIN_CHUNK


def test_one_token_prompts_decode_at_once_and_take_nobodys_turn():
    state = SchedulerState(max_num_seqs=4, prefill_chunk=8)
    state.add(tracked("long", 40, 1))
    for i in range(5):
        state.add(tracked(f"one{i}", 1, 3))
    step = schedule(state)
    assert [r.request_id for r in step.decode] == ["one0", "one1", "one2", "one3"]
    assert [s.request_id for s in step.start] == ["one0", "one1", "one2", "one3"]
    assert not step.prefill, "there is no room for a fifth row"
    state = SchedulerState(max_num_seqs=6, prefill_chunk=8)
    state.add(tracked("long", 40, 1))
    state.add(tracked("one", 1, 3))
    step = schedule(state)
    assert step.prefill
    assert [r.request_id for r in step.decode] == ["one"]


def test_a_started_prompt_goes_on_although_there_is_no_place_for_a_shorter_one():
    state = SchedulerState(max_num_seqs=1, prefill_chunk=8)
    state.add(tracked("long", 100))
    schedule(state)
    state.add(tracked("short", 4))
    assert [c.request_id for c in schedule(state).prefill] == ["long"]


# -- prefixes ----------------------------------------------------------------------------------------------------------


def test_what_the_prefix_cache_holds_is_not_computed_again():
    state = SchedulerState(max_num_seqs=2, prefill_chunk=16)
    state.add(tracked("a", 100))
    step = schedule(state, lambda name, limit: 90 if name == "a" else 0)
    assert [(s.request_id, s.cached) for s in step.start] == [("a", 90)]
    assert [(c.start, c.end) for c in step.prefill] == [(90, 99)]
    assert step.decode


def test_followers_wait_for_their_leader_and_start_from_what_it_computed():
    state = ready(max_num_seqs=8, prefill_chunk=64)
    state.add(tracked("leader", 200))
    for i in range(3):
        state.add(tracked(f"f{i}", 110, leader="leader", shared=100))
    seen = [schedule(state) for _ in range(3)]
    assert [{c.request_id for c in step.prefill} for step in seen[:2]] == [{"leader"}, {"leader"}]
    assert [(s.request_id, s.cached, s.source) for s in seen[2].start] == [(f"f{i}", 100, "leader") for i in range(3)]


def test_followers_of_a_leader_that_is_gone_compute_for_themselves():
    state = ready(max_num_seqs=8, prefill_chunk=64)
    state.add(tracked("leader", 200))
    state.add(tracked("f", 110, leader="leader", shared=100))
    schedule(state)
    state.end("leader", "cancelled")
    step = schedule(state)
    assert [(s.request_id, s.cached) for s in step.start] == [("f", 0)]


def test_a_leader_is_as_urgent_as_its_followers():
    state = SchedulerState(max_num_seqs=8, prefill_chunk=64)
    state.add(tracked("leader", 5000))
    state.add(tracked("other", 400))
    state.add(tracked("f", 110, leader="leader", shared=100, priority=3))
    assert [c.request_id for c in schedule(state).prefill] == ["leader"]


def test_where_states_are_needed_a_follower_takes_them_from_the_cache_not_from_the_row():
    state = ready(max_num_seqs=8, needs_checkpoints=True)
    state.add(tracked("leader", 200, boundaries=(60,)))
    state.add(tracked("f", 150, leader="leader", shared=60))
    first = schedule(state, lambda *_: 0)
    assert [(c.end, c.checkpoint) for c in first.prefill] == [(60, True)], "the chunk ends at the boundary"
    second = schedule(state, lambda name, limit: 60 if name == "f" else 0)
    assert [(s.cached, s.source) for s in second.start] == [(60, None)]


def test_a_short_common_prefix_is_not_worth_waiting_for():
    assert MIN_SHARED > 1


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_request_waits_for_memory_and_the_first_in_line_is_not_passed_by():
    state = SchedulerState(8, 64, kv=KVCost(per_token=1, step=1), kv_limit=300)
    state.add(tracked("a", 100, 50))
    schedule(state)
    state.add(tracked("big", 150, 50))
    state.add(tracked("small", 160, 1))
    schedule(state)
    assert list(state.started) == ["a"], "a takes 150 of 300; big is first in line and needs 200"
    state.end("a", "length")
    schedule(state)
    assert list(state.started) == ["big"]


def test_one_sequence_may_always_run():
    state = SchedulerState(8, 64, kv=KVCost(per_token=1, step=1), kv_limit=10)
    state.add(tracked("a", 100, 50))
    assert schedule(state).start


def test_when_memory_shrinks_the_latest_of_the_least_urgent_loses_its_place_and_is_rebuilt_from_its_tokens():
    state = SchedulerState(8, 64, kv=KVCost(per_token=1, step=1), kv_limit=1000)
    for name, priority in (("a", 0), ("b", 0), ("vip", 1)):
        state.add(tracked(name, 1, 50, priority=priority))
    step = schedule(state)
    state.update(step, [7, 8, 9])
    state.kv_limit = 120
    step = schedule(state)
    assert [(r.request_id, r.final) for r in step.release] == [("b", False)]
    assert {r.request_id for r in step.decode} == {"a", "vip"}
    state.kv_limit = 1000
    step = schedule(state)
    assert [(s.request_id, s.output) for s in step.start] == [("b", (state.requests["b"].output[0],))]
    assert [(c.start, c.end) for c in step.prefill] == [(0, 1)]
    assert next(r.position for r in step.decode if r.request_id == "b") == 1


# -- failures ----------------------------------------------------------------------------------------------------------


def test_suspects_run_alone_one_after_the_other_until_each_has_made_some_tokens():
    state = SchedulerState(max_num_seqs=8, prefill_chunk=64)
    for name in ("a", "b", "c"):
        state.add(tracked(name, 3, 50))
    schedule(state)
    for name in ("a", "b"):
        state.rewind(name)
        state.suspect(name)
    state.rewind("c")
    seen: list[set[str]] = []
    for _ in range(12):
        step = schedule(state)
        seen.append(step.request_ids)
        state.update(step, [5] * len(step.decode))
    assert seen[:8] == [{"a"}] * 4 + [{"b"}] * 4
    assert seen[8] == {"a", "b", "c"}


def test_a_token_that_was_on_its_way_when_the_row_was_lost_is_not_counted_twice():
    state = SchedulerState(max_num_seqs=8, prefill_chunk=64)
    state.add(tracked("a", 1, 50))
    first = schedule(state)
    second = schedule(state)
    state.update(first, [5])
    state.rewind("a")
    third = schedule(state)
    assert [o.token for o in state.update(second, [6])] == [6], "it is still the token at its position"
    assert state.update(third, [6]) == [], "the rebuilt row made it once more"
    with pytest.raises(ValueError, match="zip"):
        state.update(third, [])
