"""What is loaded, when and at whose cost: never twice, never over the budget, never what is at work."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    ModelFileError,
    ModelNotFoundError,
    ModelsBusyError,
    WontFitError,
)
from mlxinfer.pool import ModelPool
from mlxinfer.pool.workers import BACKOFF_S
from tests.unit.pool.fake import FakeClock, FakeLLM, FakeLoads, make, states, use

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_model_is_loaded_when_it_is_asked_for_and_stays(made: Any) -> None:
    pool, loads = made({"a": 40, "b": 40})
    assert states(pool) == {"a": "registered", "b": "registered"}
    with pool.lease("a") as llm:
        assert llm is loads.here["a"]
    use(pool, "a")
    assert loads.log == ["+a"]
    assert states(pool) == {"a": "loaded", "b": "registered"}


def test_requests_at_the_same_time_share_one_load(made: Any) -> None:
    pool, loads = made({"a": 40})
    gate = loads.gates["a"] = threading.Event()
    futures = [pool.request("a") for _ in range(20)]
    assert pool.status()["a"].waiting == 20
    gate.set()
    leases = [future.result(10) for future in futures]
    assert {id(lease.llm) for lease in leases} == {id(loads.here["a"])}
    assert loads.log == ["+a"]


def test_an_unknown_name_asks_nobody_and_evicts_nothing(made: Any) -> None:
    pool, loads = made({"a": 90})
    use(pool, "a")
    loads.asked.clear()
    with pytest.raises(ModelNotFoundError, match="registered are: a"):
        pool.request("../../etc/passwd")
    assert loads.asked == []
    assert states(pool) == {"a": "loaded"}


def test_the_least_recently_used_makes_room_and_only_as_many_as_needed(made: Any) -> None:
    pool, loads = made({"a": 30, "b": 30, "c": 30, "d": 40})
    for name in "abca":
        use(pool, name)
    use(pool, "d")
    assert loads.log == ["+a", "+b", "+c", "-b", "+d"]
    use(pool, "b")
    assert loads.log[-2:] == ["-c", "+b"]


def test_a_newcomer_that_is_not_there_or_too_large_evicts_nothing(made: Any) -> None:
    pool, loads = made({"a": 60, "gone": 60, "huge": 101})
    use(pool, "a")
    del loads.sizes["gone"]
    with pytest.raises(ModelNotFoundError):
        use(pool, "gone")
    with pytest.raises(WontFitError, match="huge needs") as error:
        use(pool, "huge")
    assert not isinstance(error.value, ModelsBusyError)
    assert loads.log == ["+a"]


def test_leased_models_stay_and_who_is_busy_is_named(made: Any) -> None:
    pool, loads = made({"a": 60, "b": 60, "c": 30})
    use(pool, "c")
    with pool.lease("a"), pytest.raises(ModelsBusyError, match="a is at work") as error:
        use(pool, "b")
    assert error.value.status == 503
    assert error.value.retry_after > 0
    assert loads.log == ["+c", "+a"], "c isn't evicted for nothing"
    use(pool, "b")
    assert loads.log[2:] == ["-c", "-a", "+b"], "a busy pool is no failure that is remembered"


def test_a_model_with_running_requests_but_no_lease_stays_too(made: Any) -> None:
    pool, loads = made({"a": 60, "b": 60})
    use(pool, "a")
    loads.here["a"].running = 1
    with pytest.raises(ModelsBusyError):
        use(pool, "b")
    with pytest.raises(ModelsBusyError, match="at work"):
        pool.unload("a")
    loads.here["a"].running = 0
    use(pool, "b")
    assert loads.log == ["+a", "-a", "+b"]


def test_a_pinned_model_stays_whatever_comes(made: Any, clock: FakeClock) -> None:
    pool, loads = made({"a": 60, "b": 60}, pinned=["a"], keep_alive=10)
    use(pool, "a")
    with pytest.raises(WontFitError, match=r"a \(pinned\)") as error:
        use(pool, "b")
    assert not isinstance(error.value, ModelsBusyError)
    clock.now += 1000
    pool.unload_idle()
    assert loads.log == ["+a"]
    pool.pin("a", False)
    pool.unload_idle()
    assert loads.log == ["+a", "-a"]


def test_an_explicit_unload_takes_a_pinned_one_too_and_it_can_come_back(made: Any) -> None:
    pool, loads = made({"a": 60}, pinned=["a"])
    pool.unload("a")
    use(pool, "a")
    pool.unload("a")
    pool.unload("a")
    use(pool, "a")
    assert loads.log == ["+a", "-a", "+a"]


def test_a_failed_load_is_told_to_all_who_wait_and_again_without_a_new_try(made: Any, clock: FakeClock) -> None:
    pool, loads = made({"a": 30, "b": 30})
    use(pool, "b")
    gate = loads.gates["a"] = threading.Event()
    loads.errors["a"] = ModelFileError("it is broken")
    futures = [pool.request("a") for _ in range(3)]
    gate.set()
    errors = [future.exception(10) for future in futures]
    assert [str(e) for e in errors] == ["it is broken"] * 3
    assert len({id(e) for e in errors}) == 3, "each has one of its own"
    status = pool.status()["a"]
    assert (status.state, status.error) == ("failed", "it is broken")
    asked = len(loads.asked)
    for wait_s in BACKOFF_S:
        clock.now += wait_s - 0.1
        with pytest.raises(ModelFileError, match="it is broken"):
            pool.request("a")
        assert len(loads.asked) == asked, "not tried again so soon"
        clock.now += 0.1
        with pytest.raises(ModelFileError, match="it is broken"):
            pool.acquire("a")
        asked += 1
        assert len(loads.asked) == asked, "tried once more"
    clock.now += BACKOFF_S[-1]
    loads.errors.clear()
    use(pool, "a")
    assert pool.status()["a"].error is None
    assert loads.log == ["+b", "+a"], "the other one never noticed"
    pool.unload("a")
    loads.errors["a"] = ModelFileError("broken again")
    with pytest.raises(ModelFileError):
        pool.acquire("a")
    clock.now += BACKOFF_S[0]
    with pytest.raises(ModelFileError):
        pool.acquire("a")
    assert len(loads.asked) == asked + 3, "after a success the first pause is a short one again"


def test_a_failed_load_keeps_nothing_of_what_it_had_read(made: Any) -> None:
    pool, loads = made({"a": 30, "b": 30})

    class Weights:
        itself: Any = None

    held: list[weakref.ref[Weights]] = []
    before = loads.load

    def load(source: str, cancel: threading.Event) -> Any:
        if source == "b":
            return before(source, cancel)
        weights = Weights()
        weights.itself = weights  # as the frames of a traceback may hold one another
        held.append(weakref.ref(weights))
        raise ModelFileError("it is broken")

    loads.load = load
    gc.disable()
    try:
        with pytest.raises(ModelFileError):
            pool.acquire("a")
        use(pool, "b")
        assert held[0]() is None
    finally:
        gc.enable()


def test_a_bug_in_a_load_is_an_engine_error_and_the_loader_lives_on(made: Any, caplog: Any) -> None:
    pool, loads = made({"a": 30, "b": 30})
    loads.errors["a"] = ZeroDivisionError("planted")
    with pytest.raises(EngineError, match="ZeroDivisionError: planted"):
        pool.acquire("a")
    use(pool, "b")
    assert "planted" in caplog.text


def test_who_leaves_while_a_model_loads_cancels_nothing_for_the_others(made: Any) -> None:
    pool, loads = made({"a": 30})
    gate = loads.gates["a"] = threading.Event()
    first, second = pool.request("a"), pool.request("a")
    pool.abandon(first)
    assert pool.status()["a"].waiting == 1
    gate.set()
    second.result(10).release()
    pool.unload("a")
    assert loads.log == ["+a", "-a"], "the one that left holds no lease"


def test_a_request_that_is_abandoned_after_it_was_granted_gives_its_lease_back(made: Any) -> None:
    pool, _ = made({"a": 30})
    future = pool.request("a")
    wait([future], 10)
    pool.abandon(future)
    pool.unload("a")
    assert states(pool) == {"a": "registered"}


def test_a_load_that_nobody_waits_for_any_more_is_not_begun(made: Any) -> None:
    pool, loads = made({"a": 30, "b": 30})
    gate = loads.gates["a"] = threading.Event()
    first, second = pool.request("a"), pool.request("b")
    assert loads.started["a"].wait(10)
    pool.abandon(second)
    gate.set()
    first.result(10).release()
    use(pool, "a")
    with pool.lease("a"):
        assert loads.log == ["+a"]
    use(pool, "b")
    assert loads.log == ["+a", "+b"]


def test_a_lease_counts_once_however_often_it_is_released(made: Any) -> None:
    pool, _ = made({"a": 60, "b": 60})
    one, two = pool.acquire("a"), pool.acquire("a")
    one.release()
    one.release()
    with pytest.raises(ModelsBusyError):
        pool.acquire("b")
    two.release()
    use(pool, "b")


@contextlib.contextmanager
def being_unloaded(pool: ModelPool, name: str, llm: FakeLLM) -> Iterator[threading.Event]:
    """Another thread is unloading the model until the event is set."""
    entered, go_on = threading.Event(), threading.Event()
    before = llm.unload

    def unload() -> None:
        entered.set()
        assert go_on.wait(10)
        before()

    llm.unload = unload
    thread = threading.Thread(target=pool.unload, args=(name,))
    thread.start()
    assert entered.wait(10)
    yield go_on
    thread.join(10)


def test_a_request_for_what_is_being_unloaded_loads_it_again(made: Any) -> None:
    pool, loads = made({"a": 60})
    use(pool, "a")
    llm = loads.here["a"]
    with being_unloaded(pool, "a", llm) as go_on:
        future = pool.request("a")
        assert states(pool) == {"a": "unloading"}
        go_on.set()
        assert future.result(10).llm is not llm
    assert loads.log == ["+a", "-a", "+a"]


def test_a_newcomer_waits_for_memory_that_is_just_being_given_back(made: Any) -> None:
    pool, loads = made({"a": 60, "b": 60})
    use(pool, "a")
    with being_unloaded(pool, "a", loads.here["a"]) as go_on:
        future = pool.request("b")
        go_on.set()
        assert future.result(10).llm is loads.here["b"]


def test_closing_ends_the_load_tells_who_waits_and_unloads_everything(made: Any) -> None:
    pool, loads = made({"a": 30, "b": 30, "c": 30})
    use(pool, "a")
    loads.gates["b"] = threading.Event()
    loading, queued = pool.request("b"), pool.request("c")
    assert loads.started["b"].wait(10)
    pool.close()
    for future in (loading, queued):
        assert isinstance(future.exception(10), EngineClosedError)
    assert loads.log == ["+a", "-a"]
    with pytest.raises(EngineClosedError):
        pool.request("a")
    pool.close()


def test_models_that_were_given_are_pinned_and_never_unloaded_by_the_pool() -> None:
    llm: Any = FakeLLM(FakeLoads({"x": 5}), "x")
    pool = ModelPool.of({"x": llm})
    with pool.lease("x") as leased:
        assert leased is llm
    assert pool.status()["x"].pinned
    pool.close()
    assert llm.alive


def test_an_adopted_model_is_the_pools_from_then_on(made: Any) -> None:
    pool, loads = made({"a": 60, "b": 60}, due=["a"])
    assert pool.missing() == ["a"]
    pool.adopt("a", loads.load("a", threading.Event()))
    assert pool.missing() == []
    assert not pool.fits_now("b")
    use(pool, "b")
    assert loads.log == ["+a", "-a", "+b"]
    assert pool.missing() == [], "what was there once isn't missed when others need its place"


def test_missing_names_what_is_due_and_what_loads(made: Any) -> None:
    pool, loads = made({"a": 30, "b": 30, "c": 30}, due=["a"])
    gate = loads.gates["b"] = threading.Event()
    future = pool.request("b")
    assert loads.started["b"].wait(10)
    assert pool.missing() == ["a", "b"]
    gate.set()
    future.result(10).release()
    use(pool, "a")
    assert pool.missing() == []


def test_what_fits_now_counts_what_is_loaded_and_what_never_fits_is_an_error(made: Any) -> None:
    pool, _ = made({"a": 60, "b": 40, "c": 41, "d": 101})
    use(pool, "a")
    assert pool.fits_now("b")
    assert not pool.fits_now("c")
    with pytest.raises(WontFitError):
        pool.fits_now("d")


def test_names_are_counted_and_listed_and_a_pin_must_be_one_of_them() -> None:
    pool, _ = make({"a": 1, "b": 2})
    assert list(pool) == ["a", "b"]
    assert len(pool) == 2
    assert "a" in pool
    assert "c" not in pool
    with pytest.raises(ModelNotFoundError):
        make({"a": 1}, pinned=["c"])
    with pytest.raises(ModelNotFoundError):
        pool.pin("c")


def test_a_model_registered_later_is_loaded_like_the_others(made: Any) -> None:
    pool, loads = made({"a": 10})
    loads.sizes["b-source"], loads.started["b-source"] = 20, threading.Event()
    pool.register("b", "b-source")
    with pool.lease("b") as llm:
        assert llm.info.name == "b-source"
    assert list(pool) == ["a", "b"]


def test_registering_again_changes_nothing_and_another_source_is_refused(made: Any) -> None:
    pool, _ = made({"a": 10})
    with pool.lease("a") as llm:
        pool.register("a", "a")
        assert pool.model("a") is llm
    with pytest.raises(InvalidRequestError, match="another model"):
        pool.register("a", "elsewhere")
