"""Prefixes that several requests, the disk or another tenant want at the same moment."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxinfer.engine import prefix_disk
from mlxinfer.engine.disk import DiskTier
from mlxinfer.engine.engine import Engine, Event, Request
from mlxinfer.engine.governor import HEADROOM, Governor
from mlxinfer.engine.prefix_disk import PrefixDisk
from mlxinfer.engine.rows import RowSpec
from mlxinfer.engine.runner import Runner
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.engine.scheduler import schedule
from mlxinfer.engine.tracked import SchedulerState, Tracked
from mlxinfer.engine.worker import mlx_thread
from tests import tiny

Events = queue.SimpleQueue[Event]
PROMPT = list(range(3, 103))


def engine_with(*, attached: bool = True, **changes) -> Engine:
    """An engine on the tiny model; one that isn't attached is stepped by its test."""
    thread = mlx_thread()

    def make() -> Engine:
        runner = Runner(tiny.build_model(tiny.config()), 320)
        options = {"max_num_seqs": 8, "max_queue": 200, "prefill_chunk": 64, "memory": Governor(1 << 32)}
        engine = Engine(thread, runner, **(options | changes))
        if attached:
            thread.attach(engine)
        return engine

    return thread.call(make)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """`engine_with`; what it makes is closed at the end."""
    made: list[Engine] = []

    def make(**options) -> Engine:
        made.append(engine_with(**options))
        return made[-1]

    yield make
    for engine in made:
        if not engine.closed:
            engine.thread.call(engine.close)
        engine.wait_written()


def request(name: str, prompt: list[int], max_tokens: int, cache_key: str = "") -> Request:
    spec = RowSpec(name, tuple(prompt), RowSampling(temperature=0.0), 1, cache_key)
    return Request(spec, max_tokens, frozenset())


def submit(engine: Engine, *requests: Request) -> list[Events]:
    """Queue requests that the engine sees all at once."""
    streams: list[Events] = [queue.SimpleQueue() for _ in requests]

    def all_of_them() -> None:
        for asked, events in zip(requests, streams, strict=True):
            engine.submit(asked, events.put)

    engine.thread.call(all_of_them)
    return streams


def collect(events: Events, timeout: float = 30) -> list[Event]:
    got = [events.get(timeout=timeout)]
    while got[-1].finished is None and got[-1].error is None:
        got.append(events.get(timeout=timeout))
    return got


def reply(engine: Engine, asked: Request) -> list[Event]:
    return collect(submit(engine, asked)[0])


def until(engine: Engine, condition: Callable[[], object]) -> None:
    """Wait until `condition` holds between two steps."""
    deadline = time.monotonic() + 20
    while not engine.thread.call(condition):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def rest(engine: Engine) -> None:
    """Wait until the cache has what all requests left."""
    until(engine, lambda: not (engine.state.requests or engine.state.release or engine._pending))


def step_until(engine: Engine, condition: Callable[[], object]) -> None:
    """Step an engine that isn't attached."""

    def run() -> None:
        for _ in range(300):
            if condition():
                return
            engine.step()
        raise AssertionError("it never came")

    engine.thread.call(run)


def limit_memory(engine: Engine, needed: float) -> None:
    """Leave `needed` bytes for weights, sequences and prefixes."""
    engine.thread.call(lambda: engine.memory.set_budget(int(needed / (1 - HEADROOM))))


def cached_tokens(events: list[Event]) -> int:
    assert events[-1].finished == "length"
    assert events[-1].usage is not None
    return events[-1].usage.cached_tokens


def warm_up(engine: Engine) -> None:
    """Let an engine that isn't attached learn how fast it is."""
    submit(engine, request("warm", [7] * 500, 60))
    step_until(engine, lambda: "warm" not in engine.state.requests)


# -- several requests and one prefix -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tails", [([201, 5, 6], [202, 5, 6]), ([250] * 10, [250] * 10)], ids=["fork", "twins"])
def test_two_requests_can_go_on_from_one_leaf_at_once(make_engine, tails):
    engine = make_engine()
    before = [e.token for e in reply(engine, request("before", PROMPT, 20)) if e.token is not None]
    rest(engine)
    # What is held: all but the last token.
    held = PROMPT + before[:-1]
    streams = submit(engine, *(request(f"next{i}", held + tail, 5) for i, tail in enumerate(tails)))
    assert [collect(events)[-1].finished for events in streams] == ["length", "length"]
    assert engine.failed_steps == 0


def test_a_prefix_that_was_promised_survives_the_reservation_of_its_own_request(make_engine):
    engine = make_engine()
    prompt = list(range(3, 253)) * 2
    reply(engine, request("before", prompt, 2))
    rest(engine)
    held = engine.thread.call(engine.cached_bytes)
    assert held
    limit_memory(engine, engine.state.kv.bytes(601) + held / 2)
    assert reply(engine, request("next", prompt[:300] + [7] * 200, 100))[-1].finished == "length"
    assert engine.failed_steps == 0


def test_a_queued_follow_up_finds_what_the_one_before_left(make_engine):
    engine = make_engine(max_num_seqs=1)
    prompt = list(range(3, 203))
    first, second = submit(engine, request("first", prompt, 5), request("second", prompt, 5))
    collect(first)
    assert cached_tokens(collect(second)) >= 190


def test_a_request_whose_prompt_was_cached_meanwhile_can_start_beside_a_short_one(make_engine):
    engine = make_engine(attached=False, max_num_seqs=1)
    warm_up(engine)
    submit(engine, request("first", PROMPT, 6))
    engine.thread.call(engine.step)
    same, short = submit(engine, request("same", PROMPT, 5), request("short", [8] * 10, 5))
    step_until(engine, lambda: "first" not in engine.state.requests)
    engine.state.max_num_seqs = 0
    step_until(engine, lambda: not engine.state.release)
    engine.state.max_num_seqs = 2
    step_until(engine, lambda: not engine.state.requests)
    assert collect(same)[-1].finished == collect(short)[-1].finished == "length"
    assert engine.failed_steps == 0


def test_a_preempted_request_can_restart_from_the_cache_beside_a_chunk_that_completes(make_engine):
    engine = make_engine(attached=False)
    warm_up(engine)
    (long,) = submit(engine, request("long", PROMPT, 30))
    step_until(engine, lambda: "long" in engine.state.requests and len(engine.state.requests["long"].output) >= 4)
    engine.state.preempt("long")
    engine.state.max_num_seqs = 0
    engine.thread.call(engine.step)
    engine.state.max_num_seqs = 8
    (short,) = submit(engine, request("short", [8] * 10, 5))
    step_until(engine, lambda: not engine.state.requests)
    assert collect(long)[-1].finished == collect(short)[-1].finished == "length"
    assert engine.failed_steps == 0


def test_rows_that_join_by_a_chunk_decode_behind_those_that_need_none():
    state = SchedulerState(8, 64)
    held = {}
    state.add(Tracked("long", 60, 50, frozenset(), hint=0))
    state.add(Tracked("short", 10, 50, frozenset()))
    # Another request with the same prompt has ended since it came.
    held["long"] = 59
    step = schedule(state, lambda name, limit: min(held.get(name, 0), limit))
    completing = {chunk.request_id for chunk in step.prefill}
    running = [i for i, row in enumerate(step.decode) if row.request_id not in completing]
    assert len(step.decode) == 2
    assert running == list(range(len(running)))


def test_the_same_prompt_of_another_tenant_is_never_shared_neither_from_a_row_nor_from_the_cache(make_engine):
    engine = make_engine()
    (running,) = submit(engine, request("mine", PROMPT, 400, "one"))
    running.get(timeout=20)
    beside = [request("theirs", PROMPT, 2, "two"), request("mine too", PROMPT, 2, "one")]
    theirs, mine = (collect(events) for events in submit(engine, *beside))
    assert "mine" in engine.state.requests, "it was to run all the while"
    assert cached_tokens(theirs) == 0
    assert cached_tokens(mine) > 0
    engine.cancel("mine")
    collect(running)
    rest(engine)
    assert cached_tokens(reply(engine, request("a third's", PROMPT, 2, "three"))) == 0
    assert cached_tokens(reply(engine, request("mine again", PROMPT, 2, "one"))) > 0


# -- beside the disk ---------------------------------------------------------------------------------------------------


def disk_at(folder: Path) -> PrefixDisk:
    tier = DiskTier(folder, "model", 1 << 30)
    tier.load_index()
    return PrefixDisk(tier)


def fill(engine: Engine, count: int) -> None:
    for i in range(count):
        reply(engine, request(f"fill{i}", [10 + i] * 300, 2))
    rest(engine)


def test_a_prefix_that_cannot_be_packed_for_the_disk_fails_no_request(make_engine, tmp_path, monkeypatch):
    engine = make_engine(disk=disk_at(tmp_path))
    fill(engine, 3)
    asked = []

    def fails(arrays: object) -> None:
        asked.append(arrays)
        raise MemoryError("planted")

    monkeypatch.setattr(prefix_disk, "stored", fails)
    held = engine.thread.call(engine.cached_bytes)
    limit_memory(engine, engine.state.kv.bytes(410) + held * 0.3)
    assert reply(engine, request("next", [99] * 300, 10))[-1].error is None
    assert asked, "nothing was evicted"
    assert engine.failed_steps == 0


def test_closing_an_engine_does_not_wait_for_a_slow_disk(make_engine, tmp_path, monkeypatch):
    engine = make_engine(disk=disk_at(tmp_path))
    fill(engine, 4)
    released = threading.Event()
    monkeypatch.setattr(DiskTier, "write", lambda *_, **__: released.wait(5))
    began = time.monotonic()
    engine.thread.call(engine.close)
    took = time.monotonic() - began
    released.set()
    assert took < 0.5, "the MLX thread stood still"
    assert engine.wait_written()


def test_idle_prefixes_are_written_no_further_when_work_arrives(make_engine, tmp_path):
    disk = disk_at(tmp_path)
    engine = make_engine(disk=disk)
    fill(engine, 12)
    beside_work = []
    offer = disk.offer

    def watched(entry, done=None, **options) -> bool:
        beside_work.append(bool(engine.state.requests))
        return offer(entry, done, **options)

    disk.offer = watched  # type: ignore[method-assign]
    (events,) = submit(engine, request("run", [77] * 3, 500))
    events.get(timeout=20)
    engine.thread.call(lambda: engine.runner.prefixes.write_idle(engine.thread.post, engine._idle._may_go_on))
    collect(events)
    assert beside_work.count(True) == 1, "the one that was asked for here, and none after it"


def test_a_long_file_is_not_read_for_a_short_prefix(make_engine, tmp_path):
    tokens = [3 + i % 300 for i in range(1800)]
    first = make_engine(disk=disk_at(tmp_path))
    reply(first, request("long", tokens, 2))
    rest(first)
    first.thread.call(first.close)
    assert first.wait_written()
    disk = disk_at(tmp_path)
    second = make_engine(disk=disk)
    assert disk.lookup(second.runner.prefixes, "", tokens, 1799) > 1700
    reply(second, request("short", [*tokens[:70], 1, 1, 1, 1, 1], 2))
    assert disk.tier.counters.bytes_read < 500_000
