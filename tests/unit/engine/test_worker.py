"""The MLX thread survives what is posted to it, and says clearly when it can't be used."""

import gc
import os
import subprocess
import sys
import threading

import pytest

from mlxinfer.engine.worker import MlxThread, mlx_thread
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
