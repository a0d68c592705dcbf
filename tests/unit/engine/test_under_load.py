"""Many requests that come and go: nothing of them stays."""

import queue
import random
import threading

import mlx.core as mx
import pytest

from mlxinfer.engine.engine import Engine, Event, Request
from mlxinfer.engine.events import Open
from mlxinfer.engine.governor import Governor
from mlxinfer.engine.rows import RowSpec
from mlxinfer.engine.runner import Runner
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.engine.worker import mlx_thread
from mlxinfer.errors import WontFitError
from tests import tiny


def engine_with(budget: int = 1 << 32, **changes) -> Engine:
    thread = mlx_thread()

    def make() -> Engine:
        runner = Runner(tiny.build_model(tiny.config()), 320)
        options = {"max_num_seqs": 8, "max_queue": 2000, "prefill_chunk": 64, "memory": Governor(budget)}
        engine = Engine(thread, runner, **(options | changes))
        thread.attach(engine)
        return engine

    return thread.call(make)


def request(name: str, prompt: list[int], max_tokens: int, **kwargs) -> Request:
    return Request(RowSpec(name, tuple(prompt), RowSampling(temperature=0.0), 1), max_tokens, frozenset(), **kwargs)


class Client:
    """Takes some tokens of a reply, then leaves."""

    def __init__(self, engine: Engine, name: str, stay: int) -> None:
        self.engine = engine
        self.name = name
        self.stay = stay
        self.done = threading.Event()
        self.ends = 0

    def sink(self, event: Event) -> None:
        self.stay -= 1
        if event.finished is not None or event.error is not None:
            self.ends += 1
            self.done.set()
        elif self.stay == 0:
            self.engine.cancel(self.name)


def test_a_thousand_clients_that_leave_at_random_leave_nothing_behind():
    rng = random.Random(3)
    engine = engine_with()
    thread = engine.thread
    threads = threading.active_count()
    try:
        idle = thread.call(mx.get_active_memory)
        clients: list[Client] = []
        for i in range(1000):
            client = Client(engine, f"c{i}", rng.choice([1, 2, 5, 500]))
            clients.append(client)
            prompt = [rng.randrange(3, 300) for _ in range(rng.choice([1, 5, 40, 130]))]
            engine.submit(request(client.name, prompt, rng.choice([1, 4, 12])), client.sink)
            if rng.random() < 0.3:
                engine.cancel(client.name)
        for client in clients:
            assert client.done.wait(120)
        thread.call(lambda: None)
        thread.call(lambda: None)
        assert all(client.ends == 1 for client in clients)
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0
        assert engine.runner._rows == {}
        assert engine._open == engine.state.requests == engine.state.started == {}
        assert engine.reserved_bytes() == 0
        assert threading.active_count() <= threads
        thread.call(engine.runner.prefixes.tree.check)

        def held() -> int:
            engine.runner.prefixes.tree.clear()
            engine.runner._decoding = None
            mx.synchronize()
            return mx.get_active_memory()

        assert thread.call(held) <= idle + (1 << 16)
    finally:
        thread.call(engine.close)


def test_a_cancelled_request_frees_its_place_within_one_step():
    engine = engine_with(max_num_seqs=1)
    thread = engine.thread
    try:
        first: queue.SimpleQueue[Event] = queue.SimpleQueue()
        second: queue.SimpleQueue[Event] = queue.SimpleQueue()
        engine.submit(request("first", [5, 6], 1900), first.put)
        first.get(timeout=20)
        engine.submit(request("second", [7], 3), second.put)

        def cancel() -> int:
            step = engine.state.step_number
            engine._end("first", "cancelled")
            return step

        before = thread.call(cancel)
        second.get(timeout=20)
        # The step under way, the one that lets the row go, the one in which the other starts, and one until it is read.
        assert engine.state.step_number - before <= 4
    finally:
        thread.call(engine.close)


def test_more_than_the_memory_holds_at_once_is_served_in_turns_and_correctly():
    free = engine_with()
    prompts = [[(7 * i + j) % 300 + 3 for j in range(200)] for i in range(6)]

    def replies(engine: Engine) -> list[list[int]]:
        streams = []
        for i, prompt in enumerate(prompts):
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            engine.submit(request(f"r{i}", prompt, 30), events.put)
            streams.append(events)
        found = []
        for events in streams:
            tokens = []
            while True:
                event = events.get(timeout=60)
                assert event.error is None, event.error
                tokens += [event.token] if event.token is not None else []
                if event.finished:
                    break
            found.append(tokens)
        return found

    expected = replies(free)
    free.thread.call(free.close)
    one = free.state.kv.bytes(230)
    tight = engine_with(budget=int(2.5 * one / 0.92))
    seen = []
    balance = tight.memory.balance
    tight.memory.balance = lambda member: (balance(member), seen.append(len(tight.state.started)))  # type: ignore
    try:
        assert replies(tight) == expected
        assert max(seen) == 2, "two sequences fit"
        assert tight.cached_bytes() <= 2.5 * one
    finally:
        tight.thread.call(tight.close)


def test_a_request_that_can_never_fit_is_refused_at_once_with_what_is_there():
    engine = engine_with(budget=1 << 20)
    try:
        with pytest.raises(WontFitError, match="beside the model"):
            engine.submit(request("big", [5] * 1000, 900), lambda _: None)
        assert engine.stats()["waiting"] == 0
    finally:
        engine.thread.call(engine.close)


def test_idle_prefixes_give_way_to_running_sequences():
    engine = engine_with()
    thread = engine.thread
    try:
        done = threading.Event()
        engine.submit(request("a", [5] * 500, 2), lambda e: done.set() if e.finished else None)
        assert done.wait(20)
        thread.call(lambda: None)
        thread.call(lambda: None)
        held = thread.call(engine.cached_bytes)
        assert held > 0
        thread.call(lambda: engine.memory.set_budget(int(held * 1.2)))
        done.clear()
        engine.submit(request("b", [9] * 200, 2), lambda e: done.set() if e.finished else None)
        assert done.wait(20)
        assert thread.call(engine.cached_bytes) < held
    finally:
        thread.call(engine.close)


def test_eight_sequences_of_very_different_lengths_hold_at_most_a_tenth_more_than_they_need():
    lengths = [100 + 3900 * i // 7 for i in range(8)]
    runner = Runner(tiny.build_model(tiny.config(max_position_embeddings=8192)), 320)
    thread = mlx_thread()

    def held() -> int:
        engine = Engine(thread, runner, max_num_seqs=8, max_queue=8, prefill_chunk=512, prefix_bytes=0,
                        memory=Governor(1 << 32))  # fmt: skip
        for i, length in enumerate(lengths):
            engine._admit(Open(request(str(i), [5 + i] * length, 64), lambda _: None, 0.0))
        while any(tracked.num_scheduled < 2 for tracked in engine.state.requests.values()):
            engine.step()
        taken, rows = runner.kv_bytes(), [row.held.length for row in runner._rows.values()]
        engine.close()
        assert all(row >= length for row, length in zip(rows, lengths, strict=True))
        return taken

    token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
    assert sum(lengths) * token <= thread.call(held) <= 1.1 * sum(lengths) * token
