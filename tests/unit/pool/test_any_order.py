"""Random requests, releases and waits: the pool keeps every rule whatever comes in whatever order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
from hypothesis import given, settings

from mlxinfer.errors import MlxinferError, ModelFileError, ModelsBusyError, WontFitError
from tests.unit.pool.fake import BUDGET, FakeClock, FakeLoads, make

if TYPE_CHECKING:
    from mlxinfer.pool import Lease, ModelPool

SIZES = {"a": 20, "b": 30, "c": 40, "d": 50, "e": 90, "f": 101}
KEEP_ALIVE = 60

names = st.sampled_from(sorted(SIZES))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("use"), names),
        st.tuples(st.just("get"), names),
        st.tuples(st.just("release"), st.integers(0, 5)),
        st.tuples(st.just("pass"), st.sampled_from([1, 30, KEEP_ALIVE])),
        st.tuples(st.just("pin"), names),
        st.tuples(st.just("unpin"), names),
        st.tuples(st.just("break"), names),
        st.tuples(st.just("mend"), names),
    ),
    max_size=40,
)


class Checked:
    """A pool, what a reader of the rules expects of it, and the leases that are out."""

    def __init__(self, pool: ModelPool, loads: FakeLoads, clock: FakeClock) -> None:
        self.pool, self.loads, self.clock = pool, loads, clock
        self.leases: list[Lease] = []
        self.pinned: set[str] = set()
        self.used: dict[str, float] = {}
        """When each was last used, in the order of last use."""

    def touch(self, name: str) -> None:
        self.used.pop(name, None)
        self.used[name] = self.clock.now

    def idle(self) -> list[str]:
        """Those that may go, least recently used first."""
        leased = {lease.name for lease in self.leases}
        return [n for n in self.used if n in self.loads.here and n not in self.pinned | leased]

    def get(self, name: str, *, keep: bool) -> None:
        before, log = dict(self.loads.here), len(self.loads.log)
        expected: list[str] = []
        room = BUDGET - self.loads.held()
        if name not in before:
            for other in self.idle():
                if room >= SIZES[name]:
                    break
                expected.append(other)
                room += SIZES[other]
        fits = name in before or room >= SIZES[name]
        try:
            lease = self.pool.acquire(name)
        except MlxinferError as error:
            new = self.loads.log[log:]
            if isinstance(error, WontFitError):
                # A remembered error may be older than the room that there is now.
                assert not fits or self.pool.status()[name].state == "failed"
                assert new == [], "nothing goes for a newcomer that can't come"
                movable = sum(SIZES[n] for n in before if n not in self.pinned)
                could = SIZES[name] <= BUDGET - self.loads.held() + movable
                busy = isinstance(error, ModelsBusyError)
                assert could or not busy
            else:
                assert new in ([], [f"-{other}" for other in expected])
            return
        loaded = [] if name in before else [*(f"-{other}" for other in expected), f"+{name}"]
        assert self.loads.log[log:] == loaded
        assert lease.llm is self.loads.here[name]
        self.touch(name)
        if keep:
            self.leases.append(lease)
        else:
            lease.release()

    def release(self, index: int) -> None:
        if self.leases:
            lease = self.leases.pop(index % len(self.leases))
            self.touch(lease.name)
            lease.release()

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        due = {name for name in self.idle() if self.clock.now - self.used[name] >= KEEP_ALIVE}
        before = set(self.loads.here)
        self.pool.unload_idle()
        assert before - set(self.loads.here) == due

    def check(self) -> None:
        assert not self.loads.wrong
        assert self.loads.held() <= BUDGET
        states = self.pool.status()
        assert {name for name, s in states.items() if s.state == "loaded"} == set(self.loads.here)
        for lease in self.leases:
            assert lease.llm is self.loads.here[lease.name], "a leased model is the one that is loaded"


@settings(max_examples=300, deadline=None)
@given(operations)
def test_every_rule_holds_in_any_order(steps: list[tuple[str, str | int]]) -> None:
    clock = FakeClock()
    pool, loads = make(SIZES, clock, keep_alive=KEEP_ALIVE)
    checked = Checked(pool, loads, clock)
    try:
        for what, value in steps:
            if what in ("use", "get"):
                checked.get(str(value), keep=what == "get")
            elif what == "release":
                checked.release(int(value))
            elif what == "pass":
                checked.wait(float(value))
            elif what == "break":
                loads.errors[str(value)] = ModelFileError("planted")
            elif what == "mend":
                loads.errors.pop(str(value), None)
            else:
                pool.pin(str(value), what == "pin")
                checked.pinned = checked.pinned | {str(value)} if what == "pin" else checked.pinned - {str(value)}
            checked.check()
    finally:
        for lease in checked.leases:
            lease.release()
        pool.close()
    assert not loads.here
    assert not loads.wrong
