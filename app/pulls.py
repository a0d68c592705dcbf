"""Models on their way to this machine: each fetched on a thread of its own, whoever looks at it."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mlxinfer import zoo
from mlxinfer.errors import InvalidRequestError, MlxinferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.config import Settings
    from mlxinfer.types import ProgressEvent

log = logging.getLogger(__name__)

WINDOW_S = 5.0
"""Seconds over which the rate of a pull is taken."""
MARK_S = 0.1
FIRST_S = 1.0
"""Before so much of the window is there, a rate says nothing: what an earlier try left is read at the disk's speed."""


@dataclass(slots=True)
class Pull:
    """A model on its way here. Bytes are those of the whole model."""

    name: str
    done: int = 0
    total: int | None = None
    phase: str = "resolve"
    state: Literal["running", "done", "cancelled", "failed"] = "running"
    error: str = ""
    began: float = field(default_factory=time.monotonic)
    cancel: threading.Event = field(default_factory=threading.Event)
    marks: tuple[tuple[float, int], ...] = ()
    """(when, bytes) of the last seconds, for the rate; replaced whole, so that any thread may read it."""

    @property
    def cancelling(self) -> bool:
        """Asked to end, and not over yet."""
        return self.state == "running" and self.cancel.is_set()

    @property
    def rate(self) -> float:
        """Bytes per second; 0 where it isn't known."""
        marks = self.marks
        if self.state != "running" or len(marks) < 2 or marks[-1][0] - marks[0][0] < FIRST_S:
            return 0.0
        # To now, not to the last mark: a connection that hangs has to be seen.
        return max(0.0, (marks[-1][1] - marks[0][1]) / (time.monotonic() - marks[0][0]))

    @property
    def left_s(self) -> float | None:
        """Seconds to the end at this rate; None where it isn't known."""
        rate = self.rate
        return (self.total - self.done) / rate if self.total and rate > 0 else None

    def moved(self, event: ProgressEvent) -> None:
        now = time.monotonic()
        marks = self.marks if event.phase == self.phase else ()
        self.phase, self.done, self.total = event.phase, event.done, event.total
        if not marks or now - marks[-1][0] >= MARK_S:
            self.marks = (*(mark for mark in marks if mark[0] >= now - WINDOW_S), (now, event.done))


class Pulls:
    """Those of this process. Thread-safe. `arrived` is called, on the pull's thread, with the name of each that ended
    well; what it raises makes the pull fail."""

    def __init__(self, settings: Settings, arrived: Callable[[str], None]) -> None:
        self._settings, self._arrived = settings, arrived
        self._pulls: dict[str, Pull] = {}
        self._lock = threading.Lock()

    def begin(self, name: str) -> Pull:
        """Fetch a model, or go on where a fetch was broken off; one that runs is handed out again.

        Raises InvalidRequestError for what is no model's name.
        """
        name = name.strip()
        if not name:
            raise InvalidRequestError("name a model: an alias, org/name, or a path", param="model")
        with self._lock:
            running = self._pulls.get(name)
            if running is not None and running.state == "running":
                return running
            pull = self._pulls[name] = Pull(name)
        threading.Thread(target=self._fetch, args=(pull,), name="mlxinfer-pull", daemon=True).start()
        return pull

    def all(self) -> list[Pull]:
        """The last one first."""
        with self._lock:
            return sorted(self._pulls.values(), key=lambda pull: -pull.began)

    def running(self, name: str) -> bool:
        with self._lock:
            pull = self._pulls.get(name)
            return pull is not None and pull.state == "running"

    def cancel(self, name: str) -> None:
        """What arrived is kept. Nothing happens when it doesn't run."""
        with self._lock:
            if pull := self._pulls.get(name):
                pull.cancel.set()

    def forget(self, name: str) -> None:
        """Take one that is over off the list. Raises InvalidRequestError for one that runs."""
        with self._lock:
            pull = self._pulls.get(name)
            if pull is not None and pull.state == "running":
                raise InvalidRequestError(f"{name} is on its way here; cancel that first", param="model")
            self._pulls.pop(name, None)

    def close(self) -> None:
        """Break off what runs; what arrived is kept."""
        for pull in self.all():
            pull.cancel.set()

    def _fetch(self, pull: Pull) -> None:
        try:
            zoo.resolve(pull.name, self._settings, progress=pull.moved, cancel=pull.cancel)
            self._arrived(pull.name)
            pull.state = "done"
        except zoo.CancelledError:
            pull.state = "cancelled"
        except MlxinferError as error:
            pull.error, pull.state = str(error), "failed"
        except Exception as error:
            # The thread's edge: whoever looks at the bar has to see that it stands.
            log.exception("fetching %s failed", pull.name)
            pull.error, pull.state = f"{type(error).__name__}: {error}", "failed"
