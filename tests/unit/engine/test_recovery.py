"""What an engine gives back, retries and waits for when steps fail or memory is short."""

import pytest

from mlxinfer.engine.engine import Engine
from mlxinfer.engine.governor import Governor
from mlxinfer.errors import WontFitError
from tests.unit.engine.test_prefix_races import (
    PROMPT,
    cached_tokens,
    collect,
    limit_memory,
    make_engine,
    reply,
    request,
    rest,
    step_until,
    submit,
    until,
)

__all__ = ["make_engine"]


class AlwaysFails:
    """A model whose every call raises."""

    def __init__(self, model) -> None:
        self.layers = model.layers

    def __call__(self, *_, **__) -> None:
        raise RuntimeError("planted")


# -- steps that fail ---------------------------------------------------------------------------------------------------


def test_nothing_is_reserved_after_the_guilty_request_has_failed(make_engine):
    engine = make_engine()
    engine.thread.call(lambda: setattr(engine.runner, "model", AlwaysFails(engine.runner.model)))
    assert reply(engine, request("guilty", [5] * 50, 10))[-1].error
    rest(engine)
    assert engine.thread.call(engine.reserved_bytes) == 0


def test_requests_end_although_planning_a_step_always_raises(make_engine):
    engine = make_engine()

    def fails(_: object) -> int:
        raise RuntimeError("planted")

    engine.memory.kv_limit = fails
    streams = submit(engine, *(request(f"r{i}", [5] * 50, 10) for i in range(2)))
    assert all(collect(events, timeout=3)[-1].error for events in streams)


def fail_launches(engine: Engine, fails) -> None:
    """Let `engine.runner.launch` raise where `fails(number, step)` says so; numbers begin at 1."""
    launch = engine.runner.launch
    count = 0

    def flaky(step):
        nonlocal count
        count += 1
        if fails(count, step):
            raise RuntimeError("planted")
        return launch(step)

    engine.runner.launch = flaky


def test_two_failures_in_a_row_the_second_of_them_alone_cost_nobody_anything(make_engine):
    engine = make_engine()
    fail_launches(engine, lambda number, _: number in (6, 7))
    streams = submit(engine, *(request(f"r{i}", [5 + i] * 10, 60) for i in range(2)))
    assert [collect(events)[-1].error for events in streams] == [None, None]
    assert engine.failed_steps == 2


def test_a_request_that_failed_once_takes_nothing_from_the_prefix_cache_when_it_is_retried(make_engine):
    engine = make_engine()
    for i in range(2):
        # Two that go on in different ways, so that what they share stays in the cache when it is lent.
        reply(engine, request(f"before{i}", [*PROMPT, 200 + i, 5, 6], 2))
    rest(engine)
    found = []

    def at_its_first_start(_: int, step) -> bool:
        starts = [start.cached for start in step.start if start.request_id == "next"]
        if starts:
            held = engine.runner.prefixes.peek("", PROMPT, len(PROMPT))
            found.append((starts[0], held))
        return bool(starts) and len(found) == 1

    fail_launches(engine, at_its_first_start)
    assert cached_tokens(reply(engine, request("next", [*PROMPT, 250, 5, 6], 4))) == 0
    assert engine.failed_steps == 1
    assert found == [(len(PROMPT), len(PROMPT)), (0, len(PROMPT))]


# -- a row that is lost while its last token is on its way -------------------------------------------------------------


def step_until_the_last_token_is_on_its_way(engine: Engine, name: str) -> None:
    def pending() -> bool:
        tracked = engine.state.requests.get(name)
        return tracked is not None and tracked.num_scheduled == 4 and len(tracked.output) == 3

    step_until(engine, pending)


@pytest.mark.parametrize("for_memory", [False, True], ids=["alone", "for memory"])
def test_a_request_that_is_preempted_while_its_last_token_is_on_its_way_leaves_no_row(make_engine, for_memory):
    engine = make_engine(attached=False)
    if for_memory:
        submit(engine, request("other", [9] * 5, 60))
    (events,) = submit(engine, request("last", [5, 6, 7], 4))
    step_until_the_last_token_is_on_its_way(engine, "last")
    if for_memory:
        limit_memory(engine, engine.state.kv.bytes(10) * 1.5)
    else:
        engine.state.preempt("last")
    step_until(engine, lambda: not (engine.state.requests or engine.state.release or engine._pending))
    assert collect(events)[-1].finished == "length"
    assert engine.failed_steps == 0
    assert engine.runner._rows == {}, "the row of an ended request would stay for good"


# -- memory ------------------------------------------------------------------------------------------------------------


def two_models(make_engine) -> tuple[Engine, Engine]:
    """Two engines that share one budget, both known to its governor."""
    shared = Governor(1 << 32)
    engines = make_engine(memory=shared), make_engine(memory=shared)
    for engine in engines:
        reply(engine, request("first", [5] * 4, 1))
        rest(engine)
    return engines


@pytest.mark.parametrize("length", [300, 1000])
def test_a_request_waits_while_another_model_is_busy_and_does_not_fail(make_engine, length):
    busy, other = two_models(make_engine)
    limit_memory(busy, busy.state.kv.bytes(2000) * 1.05)
    (running,) = submit(busy, request("running", [5] * 40, 1900))
    running.get(timeout=20)
    (waiting,) = submit(other, request("waiting", [5] * length, 10))
    until(other, lambda: other.state.short_of)
    assert waiting.empty()
    busy.cancel("running")
    collect(running)
    assert collect(waiting)[-1].error is None


def test_idle_models_go_before_a_request_fails(make_engine):
    engine, idle = two_models(make_engine)
    governor = engine.memory
    need = engine.state.kv.bytes(1000)
    idle._model_bytes = need * 2
    limit_memory(engine, need * 2.3)
    asked = []

    def relieve(wanted: int) -> bool:
        asked.append(wanted)
        if idle not in governor._members:
            return False
        engine.thread.post(lambda: governor.leave(idle))
        return True

    governor.on_pressure = relieve
    assert reply(engine, request("large", [5] * 900, 50))[-1].error is None
    assert asked


def test_a_request_that_outgrows_the_memory_while_it_starts_fails_alone_and_no_step_does(make_engine):
    engine = make_engine()
    reply(engine, request("first", [5] * 4, 1))
    engine.memory.kv_limit = lambda _: 1000
    error = reply(engine, request("large", [5] * 300, 10))[-1].error
    assert isinstance(error, WontFitError)
    assert "outgrown" in str(error)
    assert engine.failed_steps == 0


def test_a_closed_engine_takes_its_weights_out_of_the_budget(make_engine):
    shared = Governor(1 << 32)
    closed, stays = make_engine(memory=shared, weight_bytes=12345), make_engine(memory=shared, weight_bytes=678)
    for engine in (closed, stays):
        reply(engine, request("first", [5] * 4, 1))
    assert shared.figures().weights == 12345 + 678
    closed.thread.call(closed.close)
    assert shared.figures().weights == 678
    assert shared._members == [stays]
