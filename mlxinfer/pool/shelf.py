"""What the pool knows of its models: names, states, leases, who may go. No thread and no file in here."""

from __future__ import annotations

import math
import threading
from collections import deque
from typing import TYPE_CHECKING

from mlxinfer.errors import InvalidRequestError, ModelNotFoundError, ModelsBusyError, WontFitError
from mlxinfer.pool.entries import Entry, Lease, ModelStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


RECHECK_S = 1.0
"""When a model that is due to go is looked at again, if requests that nobody reads any more still run in it."""


class Shelf:
    """The entries and the lock that guards them: every method but the first two is called with `changed` held."""

    def __init__(self, models: Mapping[str, str], keep_alive: float | None, clock: Callable[[], float]) -> None:
        self.keep_alive = keep_alive
        self.clock = clock
        self.entries = {name: Entry(name, source) for name, source in models.items()}
        self.adapted: dict[str, Entry] = {}
        self.changed = threading.Condition()
        self.queue: deque[Entry] = deque()
        """What is to be loaded."""
        self.wanted = 0
        """Bytes that idle models are to make free."""
        self.closed = False
        self._turn = 0

    def offer(self, name: str, adapters: Mapping[str, str]) -> None:
        """Let a model be asked for with these adapters (name → folder), too. Raises InvalidRequestError."""
        entry = self.entry(name)
        for adapter in adapters:
            if (both := f"{name}:{adapter}") in self.entries or both in self.adapted:
                raise InvalidRequestError(f"{both} would be two models; give one another name")
        entry.adapters = {**entry.adapters, **adapters}
        self.adapted |= {f"{name}:{adapter}": entry for adapter in adapters}

    def withdraw(self, name: str, adapter: str) -> None:
        """Take an offer back."""
        entry = self.adapted.pop(f"{name}:{adapter}")
        entry.adapters = {other: folder for other, folder in entry.adapters.items() if other != adapter}

    def entry(self, name: str) -> Entry:
        entry = self.entries.get(name) or self.adapted.get(name)
        if entry is None:
            there = ", ".join([*self.entries, *self.adapted])
            raise ModelNotFoundError(f"no model {name!r:.80} here; registered are: {there}")
        return entry

    def status(self, entry: Entry) -> ModelStatus:
        stats = {"running": 0, "waiting": 0} if entry.model is None else entry.model.stats()
        idle = None if entry.used is None or entry.leases else self.clock() - entry.used
        return ModelStatus(
            state=entry.state,
            error=None if entry.error is None else str(entry.error),
            bytes=entry.bytes,
            idle_s=idle,
            pinned=entry.pinned,
            keep_s=None if entry.pinned else self.keep(entry),
            running=stats["running"],
            waiting=stats["waiting"] + sum(not w.cancelled() for _, w in entry.waiters),
            info=entry.info,
        )

    def touch(self, entry: Entry) -> None:
        self._turn += 1
        entry.turn, entry.used = self._turn, self.clock()
        self.changed.notify_all()

    def grant(self, entry: Entry) -> None:
        waiters, entry.waiters = entry.waiters, []
        assert entry.model is not None, "only loaded models are leased"
        for name, waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                entry.leases += 1
                waiter.set_result(Lease(name, entry.leased(name), lambda: self._end_lease(entry)))
        self.touch(entry)

    def _end_lease(self, entry: Entry) -> None:
        with self.changed:
            entry.leases -= 1
            self.touch(entry)

    def idle(self) -> list[Entry]:
        """What may go when memory is wanted, least recently used first."""
        loaded = sorted((e for e in self.entries.values() if e.state == "loaded"), key=lambda e: e.turn)
        return [e for e in loaded if not e.pinned and not e.at_work()]

    def victims(self, name: str, needed: int, budget: int, held: int) -> list[Entry]:
        """What has to go, least recently used first. Raises ModelsBusyError or WontFitError, and then nothing goes."""
        room = budget - held
        loaded = [e for e in self.entries.values() if e.state == "loaded"]
        busy = [e for e in loaded if e.at_work() and not e.pinned]
        chosen: list[Entry] = []
        for entry in self.idle():
            if needed <= room:
                break
            chosen.append(entry)
            room += entry.bytes
        if needed <= room:
            return chosen
        if needed <= room + sum(e.bytes for e in busy):
            names = ", ".join(e.name for e in busy)
            raise ModelsBusyError(f"{name} has to wait for memory: {names} is at work; try again in a moment")
        raise wont_fit(name, needed, budget, [e for e in loaded if e.pinned])

    def take_due(self) -> list[Entry]:
        """Mark what has been idle for long enough, and what has to make room, as going."""
        now = self.clock()
        going: list[Entry] = []
        for entry in self.idle() if self.wanted > 0 else ():
            if sum(e.bytes for e in going) >= self.wanted:
                break
            entry.state = "unloading"
            going.append(entry)
        self.wanted = 0
        due = [e for e in self.entries.values() if (end := self.deadline(e)) is not None and end <= now]
        for entry in list(due):
            if entry.at_work():
                entry.recheck = now + RECHECK_S
                due.remove(entry)
            else:
                entry.state = "unloading"
        return [*going, *due]

    def deadline(self, entry: Entry) -> float | None:
        """When the clock unloads a model; None: not by the clock."""
        keep = self.keep(entry)
        if keep is None or entry.state != "loaded" or entry.pinned or entry.leases or entry.used is None:
            return None
        return max(entry.used + keep, entry.recheck)

    def keep(self, entry: Entry) -> float | None:
        keep = self.keep_alive if entry.keep is None else entry.keep
        return None if keep == math.inf else keep


def wont_fit(name: str, needed: int, budget: int, pinned: list[Entry]) -> WontFitError:
    """What to say where not even unloading helps."""
    from mlxinfer.engine.governor import wont_fit as said

    held = f", of which {', '.join(e.name for e in pinned)} (pinned) keeps a part" if pinned else ""
    return said(name, needed, budget, held)
