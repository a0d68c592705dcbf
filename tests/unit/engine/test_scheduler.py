"""The scheduler by simulation, without mlx."""

import pytest

from mlxinfer.engine.pace import Load
from mlxinfer.engine.scheduler import (
    MIN_CHUNK,
    STALL_FLOOR_S,
    load_of,
    schedule,
)
from mlxinfer.engine.steps import Step
from mlxinfer.engine.tracked import SchedulerState
from tests.unit.engine.driving import Drive, Slow, ready, tracked, truth


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
