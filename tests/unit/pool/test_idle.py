"""Idle models go: by the clock, and when others need their memory."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from mlxinfer.pool import ModelPool
from mlxinfer.pool.shelf import RECHECK_S
from tests.unit.pool.fake import FakeClock, FakeLLM, FakeLoads, states, use
from tests.unit.server.fake import wait_for


def test_idle_models_go_when_their_time_is_over_and_not_before(made: Any, clock: FakeClock) -> None:
    pool, loads = made({"a": 30, "b": 30}, keep_alive=60)
    use(pool, "a")
    clock.now += 59
    use(pool, "b")
    pool.unload_idle()
    assert loads.log == ["+a", "+b"]
    assert pool.status()["a"].idle_s == 59
    clock.now += 1
    pool.unload_idle()
    assert loads.log[2:] == ["-a"]
    with pool.lease("b"):
        clock.now += 1000
        pool.unload_idle()
        assert pool.status()["b"].idle_s is None
    pool.unload_idle()
    assert states(pool)["b"] == "loaded", "its time begins when its last request ends"
    clock.now += 60
    pool.unload_idle()
    assert loads.log[3:] == ["-b"]


def test_a_model_that_is_due_but_still_works_is_looked_at_again_later(made: Any, clock: FakeClock) -> None:
    pool, loads = made({"a": 30}, keep_alive=60)
    use(pool, "a")
    loads.here["a"].running = 1
    clock.now += 60
    pool.unload_idle()
    loads.here["a"].running = 0
    pool.unload_idle()
    assert loads.log == ["+a"]
    clock.now += RECHECK_S
    pool.unload_idle()
    assert loads.log == ["+a", "-a"]


def test_requests_that_need_memory_make_idle_models_go_as_many_as_it_takes(made: Any) -> None:
    pool, loads = made({"a": 20, "b": 20, "c": 20, "d": 20, "e": 20}, pinned=["a"])
    for name in "abcde":
        use(pool, name)
    with pool.lease("b"):
        pool.relieve(21)
        pool.relieve(5)
        pool.unload_idle()
        assert loads.log[5:] == ["-c", "-d"], "not the pinned one, not the one at work, not more than wanted"
        pool.unload_idle()
        assert loads.log[7:] == [], "asked once, done once"
        pool.relieve(1000)
        pool.unload_idle()
    assert loads.log[7:] == ["-e"]
    assert states(pool)["b"] == "loaded"


def test_while_models_are_going_no_others_are_sent_after_them(made: Any) -> None:
    pool, loads = made({"a": 20, "b": 20})
    use(pool, "a")
    use(pool, "b")
    llm: FakeLLM = loads.here["a"]
    before = llm.unload

    def unload() -> None:
        pool.relieve(20)
        before()

    llm.unload = unload
    pool.relieve(20)
    pool.unload_idle()
    pool.unload_idle()
    assert loads.log[2:] == ["-a"]


def test_the_pools_own_thread_makes_room_without_a_keep_alive_too() -> None:
    gone = threading.Event()
    loads = FakeLoads({"a": 30})
    pool = ModelPool({"a": "a"}, loads)
    with pool.lease("a") as llm:
        before = llm.unload
        llm.unload = lambda: (before(), gone.set())[0]
    pool.relieve(1)
    assert gone.wait(10)
    pool.close()
    assert loads.log == ["+a", "-a"]


def test_the_pools_own_thread_unloads_at_once_when_nothing_is_to_be_kept() -> None:
    gone = threading.Event()

    class Loads(FakeLoads):
        def load(self, source: str, cancel: threading.Event) -> Any:
            llm = super().load(source, cancel)
            before = llm.unload
            llm.unload = lambda: (before(), gone.set())
            return llm

    loads = Loads({"a": 30})
    pool = ModelPool({"a": "a"}, loads, keep_alive=0)
    with pool.lease("a"):
        assert not gone.is_set()
    assert gone.wait(10)
    use(pool, "a")
    pool.close()
    assert loads.log == ["+a", "-a", "+a", "-a"]


def test_without_keep_alive_idle_models_stay_and_there_is_no_timer(made: Any, clock: FakeClock) -> None:
    pool, loads = made({"a": 30})
    use(pool, "a")
    clock.now += 10**9
    pool.unload_idle()
    assert loads.log == ["+a"]
    assert not any(thread.name == "mlxinfer-idle" for thread in threading.enumerate())


def test_a_wish_to_keep_one_model_longer_or_shorter_counts_until_it_is_unloaded(made: Any, clock: FakeClock) -> None:
    pool, loads = made({"a": 20, "b": 20, "c": 20, "d": 20}, keep_alive=60, pinned=["d"])
    for name in "abcd":
        use(pool, name)
    pool.keep("a", 0)
    pool.keep("b", 120)
    pool.keep("c", math.inf)
    pool.keep("d", 0)
    assert [s.keep_s for s in pool.status().values()] == [0, 120, None, None]
    with pool.lease("a"):
        pool.unload_idle()
        assert loads.log[4:] == [], "not while it is used"
    pool.unload_idle()
    assert loads.log[4:] == ["-a"]
    clock.now += 119
    pool.unload_idle()
    assert loads.log[5:] == []
    clock.now += 1
    pool.unload_idle()
    assert loads.log[5:] == ["-b"]
    clock.now += 1e9
    pool.unload_idle()
    assert loads.log[6:] == [], "neither what is kept for good nor what its owner pinned"
    use(pool, "b")
    assert pool.status()["b"].keep_s == 60


@pytest.mark.parametrize("seconds", [1e300, math.inf])
def test_a_time_that_no_thread_can_wait_for_is_for_good(seconds: float) -> None:
    loads = FakeLoads({"a": 20})
    pool = ModelPool({"a": "a"}, loads)
    use(pool, "a")
    pool.keep("a", seconds)
    assert pool.status()["a"].keep_s is None
    pool.keep("a", 0)
    assert wait_for(lambda: loads.log == ["+a", "-a"]), "the thread that unloads has not died"
    pool.close()


def test_a_model_that_is_kept_for_good_still_makes_room_for_another(made: Any) -> None:
    pool, loads = made({"a": 60, "b": 60})
    use(pool, "a")
    pool.keep("a", math.inf)
    use(pool, "b")
    assert loads.log == ["+a", "-a", "+b"]
