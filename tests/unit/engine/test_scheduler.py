"""The scheduler by simulation, without mlx."""

import random

from mlxinfer.engine.scheduler import SchedulerState, Step, Tracked, schedule

EOS = 0


class FakeRunner:
    """Checks every step against what a real runner would need, and gives random tokens."""

    def __init__(self, rng: random.Random, max_num_seqs: int) -> None:
        self.rng = rng
        self.max_num_seqs = max_num_seqs
        self.computed: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        self.decoded: dict[str, int] = {}

    def run(self, step: Step) -> list[int]:
        for request_id in step.release:
            self.computed.pop(request_id, None)
            self.decoded.pop(request_id, None)
        if step.prefill is not None:
            p = step.prefill
            assert p.start == self.computed.get(p.request_id, 0), "chunks follow each other without a gap"
            assert p.start < p.end <= self.lengths[p.request_id] - 1, "the last prompt token is left for decode"
            self.computed[p.request_id] = p.end
        for row in step.decode:
            assert self.computed.get(row.request_id, 0) == self.lengths[row.request_id] - 1, "decode after prefill"
            assert row.position == self.decoded.get(row.request_id, 0), "positions count up"
            self.decoded[row.request_id] = row.position + 1
        assert len(step.decode) <= self.max_num_seqs
        return [self.rng.randrange(12) for _ in step.decode]


def drive(seed: int, *, cancels: bool) -> tuple[dict[str, str], int]:
    rng = random.Random(seed)
    state = SchedulerState(max_num_seqs=rng.choice([1, 2, 5]), prefill_chunk=rng.choice([1, 3, 16]))
    runner = FakeRunner(rng, state.max_num_seqs)
    ends: dict[str, str] = {}
    to_come = [(rng.randrange(60), f"r{i}", rng.choice([1, 2, 7, 40]), rng.choice([1, 3, 9])) for i in range(25)]
    pending: tuple[Step, list[int]] | None = None
    for clock in range(5000):
        for _, request_id, prompt, limit in [r for r in to_come if r[0] == clock]:
            runner.lengths[request_id] = prompt
            state.add(Tracked(request_id, prompt, limit, frozenset({EOS}), priority=rng.choice([0, 0, 1])))
        if cancels and state.requests and rng.random() < 0.05:
            victim = rng.choice(list(state.requests))
            assert state.end(victim, "cancelled")
            assert victim not in ends
            ends[victim] = "cancelled"
        step = schedule(state)
        tokens = runner.run(step)
        if pending is not None:
            for outcome in state.update(*pending):
                if outcome.finished is not None:
                    assert outcome.request_id not in ends, "exactly one end"
                    ends[outcome.request_id] = outcome.finished
        pending = None if step.empty else (step, tokens)
        if clock > 60 and not state.requests and pending is None:
            return ends, clock
    raise AssertionError(f"not finished: {list(state.requests)}")


def test_every_request_ends_exactly_once_over_hundreds_of_random_arrivals():
    for seed in range(200):
        ends, _ = drive(seed, cancels=seed % 2 == 0)
        assert len(ends) == 25


def test_a_row_that_ended_is_released_in_the_next_step_and_only_once():
    state = SchedulerState(max_num_seqs=2, prefill_chunk=8)
    state.add(Tracked("a", 4, 10, frozenset()))
    assert schedule(state).prefill is not None
    state.end("a", "cancelled")
    assert schedule(state).release == ("a",)
    assert schedule(state).empty


def test_a_request_that_never_started_leaves_nothing_to_release():
    state = SchedulerState(max_num_seqs=1, prefill_chunk=8)
    state.add(Tracked("a", 4, 10, frozenset()))
    state.end("a", "cancelled")
    assert schedule(state).empty


def test_max_tokens_is_never_exceeded_although_the_runner_is_a_step_ahead():
    state = SchedulerState(max_num_seqs=1, prefill_chunk=8)
    state.add(Tracked("a", 1, 2, frozenset()))
    rows = [schedule(state).decode for _ in range(4)]
    assert [len(r) for r in rows] == [1, 1, 0, 0]


def test_a_short_prompt_overtakes_a_long_one_that_is_being_prefilled():
    state = SchedulerState(max_num_seqs=4, prefill_chunk=10)
    state.add(Tracked("long", 1000, 5, frozenset()))
    schedule(state)
    state.add(Tracked("short", 5, 5, frozenset()))
    step = schedule(state)
    assert step.prefill is not None
    assert step.prefill.request_id == "short"
    assert [r.request_id for r in step.decode] == ["short"], "it decodes in the step that ends its prefill"


def steps_until_done(state: SchedulerState, name: str, *, short: int, priority: int = 0) -> int:
    """Steps until `name` is done while a new prompt of `short` tokens arrives in each; 3000 when it never is."""
    for i in range(3000):
        state.add(Tracked(f"s{i}", short, 1, frozenset(), priority=priority))
        for row in schedule(state).decode:
            state.end(row.request_id, "length")
        if name not in state.requests:
            return i
    return 3000


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones():
    state = SchedulerState(max_num_seqs=64, prefill_chunk=16)
    state.add(Tracked("long", 200, 1, frozenset()))
    assert steps_until_done(state, "long", short=12) < 2000


def test_a_higher_priority_goes_first():
    state = SchedulerState(max_num_seqs=1, prefill_chunk=8)
    state.add(Tracked("low", 4, 1, frozenset(), priority=0))
    state.add(Tracked("high", 8, 1, frozenset(), priority=5))
    step = schedule(state)
    assert step.prefill is not None
    assert step.prefill.request_id == "high"


def test_chunks_are_smaller_while_rows_decode():
    state = SchedulerState(max_num_seqs=4, prefill_chunk=40)
    state.add(Tracked("a", 1, 50, frozenset()))
    schedule(state)
    state.add(Tracked("b", 500, 5, frozenset()))
    step = schedule(state)
    assert step.prefill is not None
    assert step.prefill.end - step.prefill.start == 10
    assert [r.request_id for r in step.decode] == ["a"]


def test_what_a_long_prompt_earned_by_waiting_is_kept_when_it_gets_a_turn():
    # 63 chunks of work took 3,066 steps when waiting was forgotten at each turn.
    state = SchedulerState(max_num_seqs=64, prefill_chunk=128)
    state.add(Tracked("long", 8000, 1, frozenset()))
    assert steps_until_done(state, "long", short=100) < 1000


def test_a_low_priority_is_late_but_not_starved_by_a_stream_of_higher_ones():
    state = SchedulerState(max_num_seqs=64, prefill_chunk=16)
    state.add(Tracked("low", 10, 1, frozenset(), priority=0))
    assert 50 < steps_until_done(state, "low", short=10, priority=1) < 2000


def test_one_token_prompts_decode_at_once_and_take_nobodys_turn():
    state = SchedulerState(max_num_seqs=4, prefill_chunk=8)
    state.add(Tracked("long", 40, 1, frozenset()))
    for i in range(5):
        state.add(Tracked(f"one{i}", 1, 3, frozenset()))
    step = schedule(state)
    assert [r.request_id for r in step.decode] == ["one0", "one1", "one2", "one3"]
    assert step.started == ("one0", "one1", "one2", "one3")
    assert step.prefill is None, "there is no room for a fifth row"
    state = SchedulerState(max_num_seqs=6, prefill_chunk=8)
    state.add(Tracked("long", 40, 1, frozenset()))
    state.add(Tracked("one", 1, 3, frozenset()))
    step = schedule(state)
    assert step.prefill is not None
    assert [r.request_id for r in step.decode] == ["one"]
