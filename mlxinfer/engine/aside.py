"""Short work on a thread of its own, so that what turns out long can be left behind."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from mlxinfer import runtime

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_LEFT = 8
"""Threads that may be busy with what was left behind; they end with it."""


class Aside:
    """For one caller at a time. The work must let the caller run meanwhile (release the GIL)."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None] | None = None
        self._thread: threading.Thread | None = None
        self._left: list[threading.Event] = []

    @property
    def full(self) -> bool:
        """Too much was left behind that still runs."""
        self._left = [done for done in self._left if not done.is_set()]
        return len(self._left) >= MAX_LEFT

    def start(self, work: Callable[[], None]) -> threading.Event:
        """Begin `work`; returns what it sets at its end."""
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="mlxinfer-aside", daemon=True)
            self._thread.start()
        done = threading.Event()
        self._jobs.put((work, done))
        return done

    def wait(self, done: threading.Event, seconds: float) -> bool:
        """Wait for what was started last. False: it takes longer, goes on, and nobody waits for it any more."""
        if done.wait(seconds):
            return True
        # Its thread ends after this; the next work gets another. Until then it takes what the others leave.
        if self._thread is not None:
            runtime.lower_priority(self._thread)
        if self._jobs is not None:
            self._jobs.put(None)
        self._jobs = None
        self._left.append(done)
        return False

    def close(self) -> None:
        """Let the thread go."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def _serve(jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None]) -> None:
    while (job := jobs.get()) is not None:
        work, done = job
        try:
            work()
        finally:
            done.set()
