"""What requests share, and what they lose: prefixes, memory, failures."""

import pytest

from mlxinfer.engine.memory import KVCost
from mlxinfer.engine.scheduler import (
    MIN_SHARED,
    schedule,
)
from mlxinfer.engine.tracked import SchedulerState
from tests.unit.engine.driving import ready, tracked

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
