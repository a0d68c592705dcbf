"""The pool: loads on demand, unloads the idle, never evicts before the newcomer is known to exist and to fit."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from mlxinfer.config import Settings
from mlxinfer.errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    MlxinferError,
    ModelNotFoundError,
    ModelsBusyError,
    WontFitError,
)
from mlxinfer.pool.entries import Entry, Lease, ModelStatus
from mlxinfer.pool.loads import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from mlxinfer.encoders import Encoder
    from mlxinfer.llm import LLM
    from mlxinfer.pool.loads import Loads

log = logging.getLogger(__name__)

BACKOFF_S = (1.0, 5.0, 30.0, 60.0)
"""How long a failed load is answered with its error before it is tried again: after the first failure, the second, …"""
LONGEST_S = 365 * 86400.0
"""What is to be kept for longer is kept for good; a thread can't wait for any number of seconds."""
RECHECK_S = 1.0
"""When a model that is due to go is looked at again, if requests that nobody reads any more still run in it."""


class ModelPool:
    """Registered models by name, and those of them that are in memory. Thread-safe.

    Iterating gives the names. Loads run one after another on a thread of the pool; idle models go on another, which
    sleeps until the next one is due; without `timer` the caller calls `unload_idle`. `due` are names that `missing`
    waits for. `adapters` are, for a model's name, names and folders: a lease of "model:adapter" is the same model with
    that adapter. Iterating and `status` leave these names out; `adapted` has them.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        loads: Loads,
        *,
        keep_alive: float | None = None,
        pinned: Iterable[str] = (),
        due: Iterable[str] = (),
        adapters: Mapping[str, Mapping[str, str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        timer: bool = True,
    ) -> None:
        self.keep_alive = keep_alive
        self._loads = loads
        self._clock = clock
        self._timed = timer
        self._wanted = 0
        self._entries = {name: Entry(name, source) for name, source in models.items()}
        self._adapted: dict[str, Entry] = {}
        for name, folders in (adapters or {}).items():
            entry = self._entry(name)
            entry.adapters = dict(folders)
            self._adapted |= {f"{name}:{adapter}": entry for adapter in folders}
        if both := sorted(self._adapted.keys() & self._entries.keys()):
            raise InvalidRequestError(f"{both[0]} would be a model and a model's adapter; give one another name")
        for name in pinned:
            self._entry(name).pinned = True
        for name in due:
            self._entry(name).due = True
        self._changed = threading.Condition()
        self._queue: deque[Entry] = deque()
        self._cancel = threading.Event()
        self._closed = False
        self._turn = 0
        self._loader: threading.Thread | None = None
        self._timer: threading.Thread | None = None

    @classmethod
    def of(cls, models: Mapping[str, LLM | Encoder]) -> ModelPool:
        """A pool of models that are loaded already: they stay, and closing the pool doesn't unload them."""
        pool = cls({}, Machine(Settings()))
        for name, model in models.items():
            pool._entries[name] = Entry(name, None, pinned=True, state="loaded", model=model, info=model.info)
        return pool

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._adapted

    def adapted(self) -> dict[str, str]:
        """Name of each model with an adapter → name of the model."""
        return {name: entry.name for name, entry in self._adapted.items()}

    # -- using a model -----------------------------------------------------------------------------------------------

    def request(self, name: str) -> Future[Lease]:
        """A lease, once the model is loaded; who doesn't want it any more calls `abandon`. Returns at once.

        Raises ModelNotFoundError for a name that isn't registered, the last load's error for a while after it failed,
        and EngineClosedError when the pool is closed. The future raises what loading raises, WontFitError, or
        ModelsBusyError when models that are at work stand in the way.
        """
        with self._changed:
            entry = self._entry(name)
            if self._closed:
                raise EngineClosedError("the models were unloaded; the server is shutting down")
            if entry.error is not None and self._clock() < entry.retry_at:
                raise copy.copy(entry.error)
            future: Future[Lease] = Future()
            entry.waiters.append((name, future))
            if entry.state == "loaded":
                self._grant(entry)
            elif entry.state in ("registered", "failed"):
                self._enqueue(entry)
            return future

    @staticmethod
    def abandon(future: Future[Lease]) -> None:
        """Give up on a request, whether it was granted meanwhile or not."""
        if not future.cancel():
            future.add_done_callback(_release_result)

    def acquire(self, name: str) -> Lease:
        """`request`, waited for."""
        future = self.request(name)
        try:
            return future.result()
        except BaseException:
            self.abandon(future)
            raise

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[LLM]:
        """The model, loaded, for the length of a `with` block; InvalidRequestError for one that writes no text."""
        with self.acquire(name) as lease:
            yield lease.llm

    # -- managing ----------------------------------------------------------------------------------------------------

    def adopt(self, name: str, model: LLM | Encoder) -> None:
        """Take a loaded model in under a registered name; the pool unloads it from now on."""
        entry = self._entry(name)
        entry.fit(model)
        with self._changed:
            assert entry.state in ("registered", "failed"), f"{name} is {entry.state} already"
            self._settle(entry, model)

    def fits_now(self, name: str) -> bool:
        """Whether a model fits beside those that are loaded. Raises WontFitError when it doesn't even fit alone."""
        entry = self._entry(name)
        assert entry.source is not None, "a model that was given is loaded"
        needed, budget = self._loads.predict(entry.source, self._cancel), self._loads.budget()
        if needed > budget:
            raise _wont_fit(name, needed, budget, [])
        return needed <= budget - self._loads.held()

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep a model, once it is loaded, whatever else needs its memory."""
        with self._changed:
            self._entry(name).pinned = pinned
            self._changed.notify_all()

    def keep(self, name: str, seconds: float) -> None:
        """Unload a model when it was idle for so long, in place of `keep_alive`; 0: at once, infinity: never.

        The last caller's wish counts, until the model is unloaded. Pinned models and those that were given loaded stay.
        """
        with self._changed:
            entry = self._entry(name)
            if entry.source is None:
                return
            entry.keep = seconds if seconds <= LONGEST_S else math.inf
            self._start_timer()
            self._changed.notify_all()

    def unload(self, name: str) -> None:
        """Unload a model now, pinned or not; nothing happens when it isn't loaded.

        Raises ModelsBusyError when it is at work.
        """
        with self._changed:
            entry = self._entry(name)
            if entry.state != "loaded":
                return
            if entry.at_work():
                raise ModelsBusyError(f"{name} is at work; it can be unloaded when its requests have ended")
            entry.state = "unloading"
        self._unload(entry)

    def relieve(self, wanted: int) -> bool:
        """Have idle models that aren't pinned unloaded, the least recently used first, until `wanted` bytes are free.

        For requests at work that need more memory. Returns at once, with whether any will go; while models are just
        going nothing is added.
        """
        with self._changed:
            if any(entry.state == "unloading" for entry in self._entries.values()):
                return True
            if next(iter(self._idle()), None) is None:
                return False
            self._wanted = max(self._wanted, wanted)
            self._start_timer()
            self._changed.notify_all()
            return True

    def unload_idle(self) -> None:
        """Unload what `relieve` asked for and what was idle for `keep_alive`; a thread of the pool does it when due."""
        for entry in self._take_due():
            self._unload(entry)

    def status(self) -> dict[str, ModelStatus]:
        """What is registered, and how each model is."""
        with self._changed:
            return {name: self._status(entry) for name, entry in self._entries.items()}

    def model(self, name: str) -> LLM | Encoder | None:
        """The model if it is loaded, without a lease: for figures, not for work."""
        return self._entry(name).model

    def missing(self) -> list[str]:
        """Models that were to be loaded at the start and aren't yet, and those that load now."""
        with self._changed:
            return [name for name, e in self._entries.items() if e.due or e.state == "loading"]

    def close(self, timeout: float = 30.0) -> None:
        """End a load that runs, fail who waits, and unload what the pool loaded or adopted."""
        with self._changed:
            self._closed = True
            self._cancel.set()
            for entry in self._entries.values():
                entry.fail_waiters(EngineClosedError("the server is shutting down"))
            self._changed.notify_all()
        for thread in (self._loader, self._timer):
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout)
        for entry in self._entries.values():
            if entry.model is not None and entry.source is not None:
                self._unload(entry)

    # -- inside, with the lock held ----------------------------------------------------------------------------------

    def _entry(self, name: str) -> Entry:
        entry = self._entries.get(name) or self._adapted.get(name)
        if entry is None:
            there = ", ".join([*self._entries, *self._adapted])
            raise ModelNotFoundError(f"no model {name!r:.80} here; registered are: {there}")
        return entry

    def _status(self, entry: Entry) -> ModelStatus:
        stats = {"running": 0, "waiting": 0} if entry.model is None else entry.model.stats()
        idle = None if entry.used is None or entry.leases else self._clock() - entry.used
        return ModelStatus(
            state=entry.state,
            error=None if entry.error is None else str(entry.error),
            bytes=entry.bytes,
            idle_s=idle,
            pinned=entry.pinned,
            keep_s=None if entry.pinned else self._keep(entry),
            running=stats["running"],
            waiting=stats["waiting"] + sum(not w.cancelled() for _, w in entry.waiters),
            info=entry.info,
        )

    def _touch(self, entry: Entry) -> None:
        self._turn += 1
        entry.turn, entry.used = self._turn, self._clock()
        self._changed.notify_all()

    def _enqueue(self, entry: Entry) -> None:
        entry.state = "loading"
        self._queue.append(entry)
        if self._loader is None:
            self._loader = threading.Thread(target=self._run_loader, name="mlxinfer-load", daemon=True)
            self._loader.start()
        self._changed.notify_all()

    def _settle(self, entry: Entry, model: LLM | Encoder) -> None:
        """A model is there: all that wait for it get it."""
        entry.model, entry.info, entry.state = model, model.info, "loaded"
        entry.error, entry.failures, entry.due = None, 0, False
        self._touch(entry)
        self._grant(entry)
        if self.keep_alive is not None:
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timed and self._timer is None and not self._closed:
            self._timer = threading.Thread(target=self._run_timer, name="mlxinfer-idle", daemon=True)
            self._timer.start()

    def _grant(self, entry: Entry) -> None:
        waiters, entry.waiters = entry.waiters, []
        assert entry.model is not None, "only loaded models are leased"
        for name, waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                entry.leases += 1
                waiter.set_result(Lease(name, entry.leased(name), lambda: self._end_lease(entry)))
        self._touch(entry)

    def _idle(self) -> list[Entry]:
        """What may go when memory is wanted, least recently used first."""
        loaded = sorted((e for e in self._entries.values() if e.state == "loaded"), key=lambda e: e.turn)
        return [e for e in loaded if not e.pinned and not e.at_work()]

    def _victims(self, name: str, needed: int) -> list[Entry]:
        """What has to go, least recently used first. Raises ModelsBusyError or WontFitError, and then nothing goes."""
        budget = self._loads.budget()
        room = budget - self._loads.held()
        loaded = [e for e in self._entries.values() if e.state == "loaded"]
        busy = [e for e in loaded if e.at_work() and not e.pinned]
        chosen: list[Entry] = []
        for entry in self._idle():
            if needed <= room:
                break
            chosen.append(entry)
            room += entry.bytes
        if needed <= room:
            return chosen
        if needed <= room + sum(e.bytes for e in busy):
            names = ", ".join(e.name for e in busy)
            raise ModelsBusyError(f"{name} has to wait for memory: {names} is at work; try again in a moment")
        raise _wont_fit(name, needed, budget, [e for e in loaded if e.pinned])

    def _take_due(self) -> list[Entry]:
        """Mark what has been idle for long enough, and what has to make room, as going."""
        with self._changed:
            now = self._clock()
            going: list[Entry] = []
            for entry in self._idle() if self._wanted > 0 else ():
                if sum(e.bytes for e in going) >= self._wanted:
                    break
                entry.state = "unloading"
                going.append(entry)
            self._wanted = 0
            due = [e for e in self._entries.values() if (end := self._deadline(e)) is not None and end <= now]
            for entry in list(due):
                if entry.at_work():
                    entry.recheck = now + RECHECK_S
                    due.remove(entry)
                else:
                    entry.state = "unloading"
            return [*going, *due]

    def _deadline(self, entry: Entry) -> float | None:
        """When the clock unloads a model; None: not by the clock."""
        keep = self._keep(entry)
        if keep is None or entry.state != "loaded" or entry.pinned or entry.leases or entry.used is None:
            return None
        return max(entry.used + keep, entry.recheck)

    def _keep(self, entry: Entry) -> float | None:
        keep = self.keep_alive if entry.keep is None else entry.keep
        return None if keep == math.inf else keep

    # -- inside, without it ------------------------------------------------------------------------------------------

    def _end_lease(self, entry: Entry) -> None:
        with self._changed:
            entry.leases -= 1
            self._touch(entry)

    def _run_timer(self) -> None:
        while True:
            self.unload_idle()
            with self._changed:
                if self._closed:
                    return
                ends = [end for e in self._entries.values() if (end := self._deadline(e)) is not None]
                pause = min(ends) - self._clock() if ends else None
                if not self._wanted and (pause is None or pause > 0):
                    self._changed.wait(pause)

    def _run_loader(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                entry = self._queue.popleft()
                if all(w.cancelled() for _, w in entry.waiters):
                    entry.waiters.clear()
                    entry.state = "registered"
                    continue
            self._load(entry)

    def _load(self, entry: Entry) -> None:
        assert entry.source is not None, "only a model with a source is ever not loaded"
        try:
            needed = self._loads.predict(entry.source, self._cancel)
            self._make_room(entry.name, needed)
            model = self._loads.load(entry.source, self._cancel)
            _fitted(entry, model)
        except MlxinferError as error:
            self._failed(entry, error)
        except Exception as error:
            # The loader's edge: this thread serves every model.
            log.exception("loading %s failed", entry.name)
            self._failed(entry, EngineError(f"loading {entry.name} failed: {type(error).__name__}: {error}"))
        else:
            with self._changed:
                self._settle(entry, model)
            return
        gc.collect()  # a traceback's frames hold what was loaded

    def _make_room(self, name: str, needed: int) -> None:
        with self._changed:
            while any(e.state == "unloading" for e in self._entries.values()):
                self._changed.wait()
            victims = self._victims(name, needed)
            for victim in victims:
                victim.state = "unloading"
        for victim in victims:
            log.info("unloading %s to make room for %s", victim.name, name)
            self._unload(victim)

    def _unload(self, entry: Entry) -> None:
        """Of an entry that was marked as unloading, or after the end."""
        model, entry.model = entry.model, None
        try:
            if model is not None:
                model.unload()
        except Exception:
            # The pool's edge: its threads serve every model. The MLX thread may have stopped, and everything with it.
            log.exception("unloading %s failed", entry.name)
        finally:
            with self._changed:
                entry.state, entry.keep = "registered", None
                if entry.waiters:
                    self._enqueue(entry)
                self._changed.notify_all()

    def _failed(self, entry: Entry, error: MlxinferError) -> None:
        with self._changed:
            if isinstance(error, ModelsBusyError):
                entry.state = "registered"
            else:
                entry.state = "failed"
                entry.error = copy.copy(error)  # without its traceback, whose frames hold what was loaded
                entry.retry_at = self._clock() + BACKOFF_S[min(entry.failures, len(BACKOFF_S) - 1)]
                entry.failures += 1
            entry.fail_waiters(error)
            self._changed.notify_all()


def _fitted(entry: Entry, model: LLM | Encoder) -> None:
    """A model with its adapters; without them it is not kept."""
    try:
        entry.fit(model)
    except BaseException:
        model.unload()
        raise


def _release_result(future: Future[Lease]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()


def _wont_fit(name: str, needed: int, budget: int, pinned: list[Entry]) -> WontFitError:
    from mlxinfer.engine.governor import wont_fit

    held = f", of which {', '.join(e.name for e in pinned)} (pinned) keeps a part" if pinned else ""
    return wont_fit(name, needed, budget, held)
