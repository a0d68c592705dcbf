"""The engine on a tiny real model: every request ends once, whatever happens around it."""

import pkgutil
import queue
import time

import mlx.core as mx
import pytest

from mlxinfer import kernels, runtime
from mlxinfer.engine.engine import Engine, Event, Request
from mlxinfer.engine.rows import RowSpec
from mlxinfer.engine.runner import Runner
from mlxinfer.engine.sampling import RowSampling
from mlxinfer.engine.worker import mlx_thread
from mlxinfer.errors import EngineClosedError, EngineError, QueueFullError
from mlxinfer.upstream import make_cache
from tests import tiny
from tests.unit.engine.planted import FailsAt


@pytest.fixture
def engine():
    thread = mlx_thread()

    def make() -> Engine:
        runner = Runner(tiny.build_model(tiny.config()), 320)
        engine = Engine(thread, runner, max_num_seqs=4, max_queue=4, prefill_chunk=8)
        thread.attach(engine)
        return engine

    engine = thread.call(make)
    yield engine
    thread.call(engine.close)


def request(name: str, prompt=(5, 6, 7), max_tokens: int = 5, **sampling) -> Request:
    row = RowSampling(**({"temperature": 0.0} | sampling))
    return Request(RowSpec(name, tuple(prompt), row, seed=1), max_tokens, frozenset())


def submit(engine: Engine, req: Request) -> "queue.SimpleQueue[Event]":
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(req, events.put)
    return events


def collect(events: "queue.SimpleQueue[Event]", timeout: float = 20) -> list[Event]:
    """All events up to the terminal one, and a check that nothing follows."""
    got = [events.get(timeout=timeout)]
    while got[-1].finished is None and got[-1].error is None:
        got.append(events.get(timeout=timeout))
    time.sleep(0.02)
    assert events.empty(), "an event after the terminal one"
    return got


def tokens(events: list[Event]) -> list[int]:
    return [e.token for e in events if e.token is not None]


def reference(engine: Engine, prompt, n: int) -> list[int]:
    def run() -> list[int]:
        model = engine.runner.model
        cache = make_cache(model)
        logits = model(mx.array([list(prompt)]), cache=cache)
        out: list[int] = []
        for _ in range(n):
            out.append(mx.argmax(logits[0, -1]).item())
            logits = model(mx.array([[out[-1]]]), cache=cache)
        return out

    return engine.thread.call(run)


def test_greedy_tokens_equal_mlx_lms_own_loop_for_requests_that_overlap(engine):
    prompts = [[i + 3 for i in range(n)] for n in (1, 2, 9, 30, 17, 64)]
    streams = [submit(engine, request(f"r{i}", p, max_tokens=12)) for i, p in enumerate(prompts)]
    for prompt, events in zip(prompts, streams, strict=True):
        got = collect(events)
        assert tokens(got) == reference(engine, prompt, 12)
        assert got[-1].finished == "length"
        assert got[-1].usage.prompt_tokens == len(prompt)
        assert got[-1].usage.completion_tokens == 12


def test_the_end_token_stops_the_request_and_is_its_last_token(engine):
    free = tokens(collect(submit(engine, request("free", max_tokens=8))))
    ending = Request(RowSpec("eos", (5, 6, 7), RowSampling(temperature=0.0), 1), 8, frozenset({free[3]}))
    got = collect(submit(engine, ending))
    assert got[-1].finished == "stop"
    assert tokens(got) == free[: free.index(free[3]) + 1]


def test_a_seed_gives_the_same_tokens_alone_and_beside_others(engine):
    hot = {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 0.3}
    alone = tokens(collect(submit(engine, request("a", max_tokens=15, **hot))))
    others = [submit(engine, request(f"o{i}", [9] * (i + 2), max_tokens=20, temperature=0.9)) for i in range(3)]
    beside = tokens(collect(submit(engine, request("b", max_tokens=15, **hot))))
    assert alone == beside
    for events in others:
        collect(events)


def test_a_cancelled_request_ends_once_and_leaves_no_row(engine):
    events = submit(engine, request("long", max_tokens=1900))
    events.get(timeout=20)
    engine.cancel("long")
    engine.cancel("long")
    assert collect(events)[-1].finished == "cancelled"
    engine.thread.call(lambda: None)
    deadline = time.monotonic() + 5
    while engine.thread.call(engine.runner.kv_bytes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.thread.call(engine.runner.kv_bytes) == 0
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_cancelling_a_waiting_request_leaves_the_running_ones_alone(engine):
    running = [submit(engine, request(f"r{i}", [i + 1, 2], max_tokens=60)) for i in range(4)]
    waiting = submit(engine, request("w", max_tokens=5))
    engine.cancel("w")
    assert collect(waiting)[-1].finished == "cancelled"
    for i, events in enumerate(running):
        assert tokens(collect(events)) == reference(engine, [i + 1, 2], 60)


def test_a_full_queue_refuses_at_once_and_takes_requests_again_later(engine):
    streams = [submit(engine, request(f"r{i}", max_tokens=200)) for i in range(8)]
    engine._mean_s = 20.0
    with pytest.raises(QueueFullError, match="limit is 8") as refused:
        engine.submit(request("one too many"), lambda _: None)
    assert refused.value.retry_after in (20.0, 10.0, 20 / 3, 5.0), "when one of those that run is likely to end"
    for i in range(8):
        engine.cancel(f"r{i}")
    for events in streams:
        collect(events)
    assert collect(submit(engine, request("next")))[-1].finished == "length"


def test_a_step_that_fails_once_costs_nobody_anything(engine, caplog):
    expected = [reference(engine, (5, 6, 7 + i), 30) for i in range(3)]
    model = engine.runner.model
    engine.runner.model = FailsAt(9, model)
    streams = [submit(engine, request(f"r{i}", (5, 6, 7 + i), max_tokens=30)) for i in range(3)]
    for events, wanted in zip(streams, expected, strict=True):
        got = collect(events)
        assert got[-1].finished == "length"
        assert tokens(got) == wanted
    assert "planted" in caplog.text
    assert engine.stats()["failed_steps"] == 1


class Poisoned:
    """A model that fails whenever the row of a certain request is in the batch."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.model = engine.runner.model
        self.layers = self.model.layers

    def __call__(self, tokens, cache=None):
        row = self.engine.runner._rows.get(self.name)
        held = row.sequence.layers[0] if row is not None and row.sequence is not None else None
        if any(held in layer.rows for layer in cache[:1]):
            raise RuntimeError("planted")
        return self.model(tokens, cache=cache)


def test_only_the_request_that_makes_steps_fail_fails(engine, caplog):
    expected = [reference(engine, (5, 6, 7 + i), 40) for i in range(3)]
    engine.runner.model = Poisoned(engine, "bad")
    streams = [submit(engine, request(f"r{i}", (5, 6, 7 + i), max_tokens=40)) for i in range(2)]
    bad = submit(engine, request("bad", (9, 9), max_tokens=40))
    last = submit(engine, request("r2", (5, 6, 9), max_tokens=40))
    error = collect(bad)[-1].error
    assert isinstance(error, EngineError)
    assert "planted" in str(error)
    for events, wanted in zip([*streams, last], expected, strict=True):
        assert tokens(collect(events)) == wanted
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_an_engine_whose_every_step_fails_gives_each_request_an_error_and_recovers(engine, caplog):
    model = engine.runner.model

    def broken(*args, **kwargs):
        raise RuntimeError("planted")

    engine.runner.model = broken
    streams = [submit(engine, request(f"r{i}", max_tokens=50)) for i in range(3)]
    for events in streams:
        assert isinstance(collect(events)[-1].error, EngineError)
    engine.runner.model = model
    assert tokens(collect(submit(engine, request("after", max_tokens=6)))) == reference(engine, (5, 6, 7), 6)
    assert engine.thread.alive


CALL_SITES = [
    ("mlxinfer.engine.engine.schedule", None),
    ("mlxinfer.engine.engine.load_of", None),
    ("mlxinfer.engine.runner.Runner.launch", None),
    ("mlxinfer.engine.runner.Runner._start", None),
    ("mlxinfer.engine.runner.Runner._release", None),
    ("mlxinfer.engine.runner.Runner._mixed", None),
    ("mlxinfer.engine.runner.Runner._decode", None),
    ("mlxinfer.engine.runner.Runner._settle", None),
    ("mlxinfer.engine.rows.Launched.read", None),
    ("mlxinfer.engine.rows.Launched.wait", None),
    ("mlxinfer.engine.rows.Launched.submit", None),
    ("mlxinfer.engine.runner.uniforms", None),
    ("mlxinfer.engine.ragged.Batch.begin", None),
    ("mlxinfer.engine.sampling.BatchSampler.__call__", None),
    ("mlxinfer.engine.tracked.SchedulerState.update", None),
    ("mlxinfer.engine.pace.Pace.observe", None),
    ("mlxinfer.engine.governor.Governor.kv_limit", None),
    ("mlxinfer.engine.governor.Governor.balance", None),
    ("mlxinfer.engine.prefix_store.PrefixStore.claim", None),
    ("mlxinfer.engine.prefix_store.PrefixStore.restore", None),
    ("mlxinfer.engine.prefix_store.PrefixStore.save", None),
]


KERNEL_SITES = ["mlxinfer.engine.ragged.append_and_attend", "mlxinfer.engine.kv.SeqKV.reserve"]
NO_KERNEL_SITES = ["mlxinfer.engine.ragged.attend", "mlxinfer.engine.kv.SeqKV.append"]


@pytest.mark.parametrize("site", [site for site, _ in CALL_SITES] + KERNEL_SITES)
@pytest.mark.parametrize("nth", [1, 2, 7])
def test_an_exception_at_any_call_of_the_engine_costs_no_request_its_text(engine, caplog, monkeypatch, site, nth):
    if site in KERNEL_SITES and kernels.kernel("ragged_attention") is None:
        pytest.skip("the kernels are not in use here")
    fail_once(engine, monkeypatch, site, nth)


@pytest.mark.parametrize("site", NO_KERNEL_SITES)
@pytest.mark.parametrize("nth", [1, 2, 7])
def test_the_same_where_rows_attend_one_by_one(without_kernels, engine, caplog, monkeypatch, site, nth):
    fail_once(engine, monkeypatch, site, nth)


def fail_once(engine, monkeypatch, site, nth):
    """Let the nth call of `site` raise, among requests whose texts are known."""
    prompts = [[i + 3 for i in range(n)] for n in (2, 9, 30, 17)]
    expected = [reference(engine, p, 12) for p in prompts]
    owner_path, _, name = site.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    original = getattr(owner, name)
    left = [nth]

    def sometimes(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("planted")
        return original(*args, **kwargs)

    collect(submit(engine, request("before", prompts[0], max_tokens=3)))
    monkeypatch.setattr(owner, name, sometimes)
    streams = [submit(engine, request(f"r{i}", p, max_tokens=12)) for i, p in enumerate(prompts)]
    for events, wanted in zip(streams, expected, strict=True):
        got = collect(events)
        assert got[-1].finished == "length", got[-1].error
        assert tokens(got) == wanted
    again = [submit(engine, request(f"a{i}", p, max_tokens=12)) for i, p in enumerate(prompts)]
    for events, wanted in zip(again, expected, strict=True):
        assert tokens(collect(events)) == wanted
    # How often a call is made depends on what falls into one step; the first ones are.
    assert left[0] <= 0 or nth > 2, "the call was made"
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_a_request_that_cannot_be_admitted_fails_alone(engine, caplog):
    # The API refuses such an id before; mlx wouldn't, and writes out of bounds.
    bad = request("bad", logit_bias=((320, 1.0),))
    assert isinstance(collect(submit(engine, bad))[-1].error, EngineError)
    assert collect(submit(engine, request("good")))[-1].finished == "length"


def test_closing_ends_open_requests_with_an_error_and_refuses_new_ones(engine):
    events = submit(engine, request("r", max_tokens=1000))
    events.get(timeout=20)
    engine.thread.call(engine.close)
    assert isinstance(collect(events)[-1].error, EngineClosedError)
    with pytest.raises(EngineClosedError):
        engine.submit(request("late"), lambda _: None)


def test_the_thread_sleeps_when_there_is_nothing_to_do(engine):
    collect(submit(engine, request("r")))
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1, "an idle engine must not poll"


def test_a_consumer_that_fails_loses_its_own_request_only(engine, caplog):
    calls = []

    def broken(event: Event) -> None:
        calls.append(event)
        raise ValueError("planted")

    others = submit(engine, request("other", max_tokens=40))
    engine.submit(request("broken", max_tokens=500), broken)
    assert tokens(collect(others)) == reference(engine, (5, 6, 7), 40)
    assert tokens(collect(submit(engine, request("next", max_tokens=4)))) == reference(engine, (5, 6, 7), 4)
    assert len(calls) == 2, "its first token and its end"
    assert calls[-1].finished == "cancelled"
    assert engine.thread.alive
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_the_figures_of_a_request_add_up(engine):
    before = engine.stats()
    got = collect(submit(engine, request("timed", list(range(3, 60)), max_tokens=10)))
    t = got[-1].timings
    assert 0 <= t.queue_s < t.ttft_s < t.total_s
    assert t.prefill_tok_s == pytest.approx(57 / (t.ttft_s - t.queue_s))
    assert t.decode_tok_s == pytest.approx(9 / (t.total_s - t.ttft_s), rel=0.05)
    after = engine.stats()
    assert after["prompt_tokens"] - before["prompt_tokens"] == 57
    assert after["generated_tokens"] - before["generated_tokens"] == 10
    assert after["steps"] > before["steps"]


def test_a_cancelled_waiting_request_leaves_no_row_with_the_runner(engine):
    running = [submit(engine, request(f"r{i}", max_tokens=30)) for i in range(4)]
    waiting = submit(engine, request("w"))
    engine.cancel("w")
    collect(waiting)
    for events in running:
        collect(events)
    collect(submit(engine, request("last", max_tokens=1)))
    engine.thread.call(lambda: None)
    assert set(engine.runner._rows) <= {"last"}


def test_a_closed_engine_is_stepped_no_more_and_lets_go_of_its_model(engine):
    engine.thread.call(engine.close)
    assert engine.runner.model is None
    assert engine.thread.call(lambda: engine in engine.thread._engines) is False


@pytest.mark.parametrize("early", [False, True])
def test_a_step_is_built_while_the_last_one_runs_and_nothing_waits_for_the_one_after_it(engine, monkeypatch, early):
    assert engine.runner.submits_early is not runtime.on_cpu()
    seen: list[tuple[str, int]] = []
    launched = pkgutil.resolve_name("mlxinfer.engine.rows:Launched")
    for name in ("wait", "submit"):
        original = getattr(launched, name)

        def noted(self, name=name, original=original):
            if name == "wait" or self.unsubmitted:
                seen.append((name, self.step.number))
            return original(self)

        monkeypatch.setattr(launched, name, noted)
    build, deliver = engine.runner.launch, engine._deliver

    def launch(step):
        seen.append(("build", step.number))
        return build(step)

    def hand_out(*args):
        seen.append(("deliver", 0))
        return deliver(*args)

    monkeypatch.setattr(engine.runner, "launch", launch)
    monkeypatch.setattr(engine, "_deliver", hand_out)
    engine.thread.call(lambda: setattr(engine.runner, "submits_early", early))
    collect(submit(engine, request("a", max_tokens=12)))
    start = seen.index(("build", 5))
    order = seen[start : seen.index(("build", 6))]
    # On a CPU step 5 may not be submitted before step 4 has run: mlx would copy the buffers that both write to. And to
    # submit it takes as long as it computes, so the tokens of step 4 go out first.
    early_order = [("submit", 5), ("wait", 4), ("deliver", 0)]
    expected = early_order if early else [("wait", 4), ("deliver", 0), ("submit", 5)]
    assert list(dict.fromkeys(order)) == [("build", 5), *expected]
