"""The pool's two threads: one loads what is asked for, one unloads what was idle for long enough."""

from __future__ import annotations

import copy
import gc
import logging
import threading
from typing import TYPE_CHECKING

from mlxinfer.errors import EngineError, MlxinferError, ModelsBusyError

if TYPE_CHECKING:
    from mlxinfer.encoders import Encoder
    from mlxinfer.llm import LLM
    from mlxinfer.pool.entries import Entry
    from mlxinfer.pool.loads import Loads
    from mlxinfer.pool.shelf import Shelf

log = logging.getLogger(__name__)

BACKOFF_S = (1.0, 5.0, 30.0, 60.0)
"""How long a failed load is answered with its error before it is tried again: after the first failure, the second, …"""


class Workers:
    """Loads and unloads. The threads begin when there is first something for them; without `timed` there is but one."""

    def __init__(self, shelf: Shelf, loads: Loads, *, timed: bool) -> None:
        self.cancel = threading.Event()
        self._shelf, self._loads, self._timed = shelf, loads, timed
        self._loader: threading.Thread | None = None
        self._timer: threading.Thread | None = None

    def join(self, timeout: float) -> None:
        """Wait for both, once the shelf is closed."""
        for thread in (self._loader, self._timer):
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout)

    # -- with the shelf's lock held ----------------------------------------------------------------------------------

    def enqueue(self, entry: Entry) -> None:
        """Have it loaded."""
        entry.state = "loading"
        self._shelf.queue.append(entry)
        if self._loader is None:
            self._loader = threading.Thread(target=self._run_loader, name="mlxinfer-load", daemon=True)
            self._loader.start()
        self._shelf.changed.notify_all()

    def settle(self, entry: Entry, model: LLM | Encoder) -> None:
        """A model is there: all that wait for it get it."""
        entry.model, entry.info, entry.state = model, model.info, "loaded"
        entry.error, entry.failures, entry.due = None, 0, False
        self._shelf.touch(entry)
        self._shelf.grant(entry)
        if self._shelf.keep_alive is not None:
            self.start_timer()

    def start_timer(self) -> None:
        """There is something that the clock may unload."""
        if self._timed and self._timer is None and not self._shelf.closed:
            self._timer = threading.Thread(target=self._run_timer, name="mlxinfer-idle", daemon=True)
            self._timer.start()

    # -- without it --------------------------------------------------------------------------------------------------

    def unload_idle(self) -> None:
        """Unload what has to make room and what was idle for long enough."""
        with self._shelf.changed:
            due = self._shelf.take_due()
        for entry in due:
            self.unload(entry)

    def _run_timer(self) -> None:
        while True:
            self.unload_idle()
            with self._shelf.changed:
                if self._shelf.closed:
                    return
                ends = [end for e in self._shelf.entries.values() if (end := self._shelf.deadline(e)) is not None]
                pause = min(ends) - self._shelf.clock() if ends else None
                if not self._shelf.wanted and (pause is None or pause > 0):
                    self._shelf.changed.wait(pause)

    def _run_loader(self) -> None:
        while True:
            with self._shelf.changed:
                while not self._shelf.queue and not self._shelf.closed:
                    self._shelf.changed.wait()
                if self._shelf.closed:
                    return
                entry = self._shelf.queue.popleft()
                if all(w.cancelled() for _, w in entry.waiters):
                    entry.waiters.clear()
                    entry.state = "registered"
                    continue
            self._load(entry)

    def _load(self, entry: Entry) -> None:
        assert entry.source is not None, "only a model with a source is ever not loaded"
        try:
            needed = self._loads.predict(entry.source, self.cancel)
            self._make_room(entry.name, needed)
            model = self._loads.load(entry.source, self.cancel)
            _fitted(entry, model)
        except MlxinferError as error:
            self._failed(entry, error)
        except Exception as error:
            # The loader's edge: this thread serves every model.
            log.exception("loading %s failed", entry.name)
            self._failed(entry, EngineError(f"loading {entry.name} failed: {type(error).__name__}: {error}"))
        else:
            with self._shelf.changed:
                self.settle(entry, model)
            return
        gc.collect()  # a traceback's frames hold what was loaded

    def _make_room(self, name: str, needed: int) -> None:
        with self._shelf.changed:
            while any(e.state == "unloading" for e in self._shelf.entries.values()):
                self._shelf.changed.wait()
            victims = self._shelf.victims(name, needed, self._loads.budget(), self._loads.held())
            for victim in victims:
                victim.state = "unloading"
        for victim in victims:
            log.info("unloading %s to make room for %s", victim.name, name)
            self.unload(victim)

    def unload(self, entry: Entry) -> None:
        """Of an entry that was marked as unloading, or after the end."""
        model, entry.model = entry.model, None
        try:
            if model is not None:
                model.unload()
        except Exception:
            # The pool's edge: its threads serve every model. The MLX thread may have stopped, and everything with it.
            log.exception("unloading %s failed", entry.name)
        finally:
            with self._shelf.changed:
                entry.state, entry.keep = "registered", None
                if entry.waiters:
                    self.enqueue(entry)
                self._shelf.changed.notify_all()

    def _failed(self, entry: Entry, error: MlxinferError) -> None:
        with self._shelf.changed:
            if isinstance(error, ModelsBusyError):
                entry.state = "registered"
            else:
                entry.state = "failed"
                entry.error = copy.copy(error)  # without its traceback, whose frames hold what was loaded
                entry.retry_at = self._shelf.clock() + BACKOFF_S[min(entry.failures, len(BACKOFF_S) - 1)]
                entry.failures += 1
            entry.fail_waiters(error)
            self._shelf.changed.notify_all()


def _fitted(entry: Entry, model: LLM | Encoder) -> None:
    """A model with its adapters; without them it is not kept."""
    try:
        entry.fit(model)
    except BaseException:
        model.unload()
        raise
