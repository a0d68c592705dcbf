"""The MLX thread survives what is posted to it, and says clearly when it can't be used."""

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import mlx.core as mx
import pytest

from mlxinfer.engine.worker import SLICE_S, MlxThread, mlx_thread
from mlxinfer.errors import EngineClosedError


@pytest.fixture
def thread():
    made = MlxThread()
    yield made
    made.stop()


def test_call_returns_and_raises_what_the_function_does(thread):
    assert thread.call(lambda: threading.current_thread().name) == "mlx"
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    assert thread.call(lambda: thread.call(lambda: 5)) == 5, "a call from the thread itself runs in place"


def test_a_posted_function_that_raises_takes_nothing_with_it(thread, caplog):
    thread.post(lambda: 1 // 0)
    assert thread.call(lambda: "alive") == "alive"
    assert "failed" in caplog.text


class Failing:
    """An engine whose step always raises."""

    steps = 0
    closed = False

    def step(self) -> bool:
        self.steps += 1
        raise RuntimeError("planted")

    def close(self) -> None:
        self.closed = True


def test_an_engine_that_raises_does_not_stop_the_thread_or_spin(thread, caplog):
    engine = Failing()
    thread.call(lambda: thread.attach(engine))
    assert thread.call(lambda: "alive") == "alive"
    assert engine.steps < 10
    thread.stop()
    assert engine.closed


def test_a_call_after_the_stop_is_an_error_and_never_hangs(thread):
    thread.stop()
    assert not thread.alive
    with pytest.raises(EngineClosedError):
        thread.call(lambda: None)


def test_a_post_from_inside_a_garbage_collection_inside_a_post_does_not_deadlock(thread):
    class Posts:
        def __del__(self) -> None:
            thread.post(lambda: None)

    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(300):
            cycle = [Posts()]
            cycle.append(cycle)
            del cycle
            thread.post(list)
    finally:
        gc.set_threshold(*before)
    assert thread.call(lambda: "alive") == "alive"


def test_a_forked_child_is_told_why_it_cannot_use_the_model():
    assert mlx_thread().alive
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
from mlxinfer.engine.worker import mlx_thread
from mlxinfer.errors import EngineClosedError
mlx_thread()
child = os.fork()
if child == 0:
    try:
        mlx_thread()
    except EngineClosedError as error:
        os.write(1, str(error).encode())
    os._exit(0)
os.waitpid(child, 0)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "spawn" in out.stdout
    assert os.getpid()


class Counting:
    """An engine that always has work, and a job's log of when it got its turns."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def step(self) -> bool:
        self.log.append("step")
        return True

    def close(self) -> None:
        pass


def slow(log, pieces=4, seconds=SLICE_S):
    """Each piece takes a whole slice."""
    for _ in range(pieces):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        log.append("piece")
        yield
    return "done"


def test_a_sliced_job_and_the_engines_take_turns(thread):
    engine = Counting()
    thread.call(lambda: thread.attach(engine))
    job = thread.run_sliced(slow(engine.log))
    assert job.result() == "done"
    thread.call(lambda: thread.detach(engine))
    log = engine.log
    first, last = log.index("piece"), len(log) - log[::-1].index("piece")
    assert log[first:last] == ["piece", "step"] * 3 + ["piece"], "one slice per round, and never a round without one"


def test_short_pieces_share_a_slice(thread):
    engine = Counting()
    thread.call(lambda: thread.attach(engine))
    assert thread.run_sliced(slow(engine.log, 100, 0.0)).result() == "done"
    thread.call(lambda: thread.detach(engine))
    pieces = [i for i, what in enumerate(engine.log) if what == "piece"]
    assert pieces[-1] - pieces[0] < 110, "a hundred pieces of no length take a few rounds, not a hundred"


def test_a_job_goes_on_when_nothing_arrives_and_no_engine_works(thread):
    assert thread.run_sliced(slow([], 3)).result() == "done"


def test_what_is_posted_runs_between_two_slices(thread):
    log = []
    job = thread.run_sliced(slow(log, 10))
    assert thread.call(lambda: len(log)) < 10
    assert job.result() == "done"


def test_jobs_run_one_after_another_in_their_order(thread):
    log = []

    def pieces(name):
        for _ in range(3):
            end = time.perf_counter() + SLICE_S
            while time.perf_counter() < end:
                pass
            log.append(name)
            yield

    jobs = [thread.run_sliced(pieces(name)) for name in "ab"]
    for job in jobs:
        job.result()
    assert log == ["a"] * 3 + ["b"] * 3


def test_a_job_that_raises_tells_who_waits_and_the_next_one_runs(thread):
    def bad():
        yield
        raise ZeroDivisionError("planted")

    first, second = thread.run_sliced(bad()), thread.run_sliced(slow([], 1))
    with pytest.raises(ZeroDivisionError, match="planted"):
        first.result()
    assert second.result() == "done"


def endless(closed, entered):
    try:
        while True:
            entered.set()
            yield
    finally:
        closed.set()


def test_a_cancelled_job_is_closed_on_the_thread_and_frees_what_it_held(thread):
    closed, entered = threading.Event(), threading.Event()
    held = []

    def pieces():
        big = mx.ones((1 << 20,))
        mx.eval(big)
        held.append(mx.get_active_memory())
        cycle: list[object] = [big]
        cycle.append(cycle)
        yield from endless(closed, entered)

    job = thread.run_sliced(pieces())
    assert entered.wait(10)
    assert job.cancel()
    assert closed.wait(10)
    assert thread.call(mx.get_active_memory) <= held[0] - (4 << 20)
    with pytest.raises(CancelledError):
        job.result()
    assert thread.run_sliced(slow([], 1)).result() == "done"


def test_a_job_that_is_cancelled_in_its_last_piece_leaves_no_result(thread):
    started, go_on = threading.Event(), threading.Event()
    gone = threading.Event()

    class Result:
        def __del__(self) -> None:
            gone.set()

    def pieces():
        started.set()
        assert go_on.wait(10)
        return Result()
        yield

    job = thread.run_sliced(pieces())
    assert started.wait(10)
    assert job.cancel()
    go_on.set()
    assert gone.wait(10)
    assert thread.call(lambda: "alive") == "alive"


def test_a_job_that_waits_behind_another_can_be_cancelled(thread):
    closed, entered = threading.Event(), threading.Event()
    first = thread.run_sliced(endless(closed, entered))
    begun = []
    second = thread.run_sliced(slow(begun, 1))
    assert second.cancel()
    assert entered.wait(10)
    first.cancel()
    assert closed.wait(10)
    for _ in range(3):  # rounds of the thread's loop
        thread.call(lambda: None)
    assert not begun


def test_stopping_ends_the_job_under_way_and_those_behind_it(thread):
    closed, entered = threading.Event(), threading.Event()
    jobs = [thread.run_sliced(endless(closed, entered)), thread.run_sliced(slow([], 1))]
    assert entered.wait(10)
    thread.stop()
    assert closed.is_set()
    for job in jobs:
        with pytest.raises(EngineClosedError):
            job.result()
    with pytest.raises(EngineClosedError):
        thread.run_sliced(slow([]))


def test_on_the_thread_itself_a_job_runs_in_place(thread):
    assert thread.call(lambda: thread.run_sliced(slow([], 2)).result()) == "done"
