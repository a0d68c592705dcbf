"""The pool: loads on demand, unloads the idle, never evicts before the newcomer is known to exist and to fit."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from mlxinfer.config import Settings
from mlxinfer.errors import EngineClosedError, InvalidRequestError, ModelsBusyError
from mlxinfer.pool.entries import Entry, Lease, ModelStatus
from mlxinfer.pool.loads import Machine
from mlxinfer.pool.shelf import Shelf, wont_fit
from mlxinfer.pool.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from mlxinfer.encoders import Encoder
    from mlxinfer.llm import LLM
    from mlxinfer.pool.loads import Loads

LONGEST_S = 365 * 86400.0
"""What is to be kept for longer is kept for good; a thread can't wait for any number of seconds."""


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
        self._loads = loads
        self._shelf = Shelf(models, keep_alive, clock)
        self._workers = Workers(self._shelf, loads, timed=timer)
        for name, folders in (adapters or {}).items():
            self._shelf.offer(name, folders)
        for name in pinned:
            self._shelf.entry(name).pinned = True
        for name in due:
            self._shelf.entry(name).due = True

    @classmethod
    def of(cls, models: Mapping[str, LLM | Encoder]) -> ModelPool:
        """A pool of models that are loaded already: they stay, and closing the pool doesn't unload them."""
        pool = cls({}, Machine(Settings()))
        for name, model in models.items():
            pool._shelf.entries[name] = Entry(name, None, pinned=True, state="loaded", model=model, info=model.info)
        return pool

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._shelf.entries))

    def __len__(self) -> int:
        return len(self._shelf.entries)

    def __contains__(self, name: object) -> bool:
        return name in self._shelf.entries or name in self._shelf.adapted

    def adapted(self) -> dict[str, str]:
        """Name of each model with an adapter → name of the model."""
        return {name: entry.name for name, entry in tuple(self._shelf.adapted.items())}

    @property
    def keep_alive(self) -> float | None:
        """Seconds without a request after which a model goes; None: not by the clock."""
        return self._shelf.keep_alive

    # -- using a model -----------------------------------------------------------------------------------------------

    def request(self, name: str) -> Future[Lease]:
        """A lease, once the model is loaded; who doesn't want it any more calls `abandon`. Returns at once.

        Raises ModelNotFoundError for a name that isn't registered, the last load's error for a while after it failed,
        and EngineClosedError when the pool is closed. The future raises what loading raises, WontFitError, or
        ModelsBusyError when models that are at work stand in the way.
        """
        with self._shelf.changed:
            entry = self._shelf.entry(name)
            if self._shelf.closed:
                raise EngineClosedError("the models were unloaded; the server is shutting down")
            if entry.error is not None and self._shelf.clock() < entry.retry_at:
                raise copy.copy(entry.error)
            future: Future[Lease] = Future()
            entry.waiters.append((name, future))
            if entry.state == "loaded":
                self._shelf.grant(entry)
            elif entry.state in ("registered", "failed"):
                self._workers.enqueue(entry)
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

    def preload(self, name: str) -> None:
        """Begin to load a model that somebody will want. Raises as `request`; what loading raises `status` tells."""
        self.request(name).add_done_callback(_release_result)

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[LLM]:
        """The model, loaded, for the length of a `with` block; InvalidRequestError for one that writes no text."""
        with self.acquire(name) as lease:
            yield lease.llm

    # -- managing ----------------------------------------------------------------------------------------------------

    def register(self, name: str, source: str) -> None:
        """Let a model be asked for under a name from now on. Raises InvalidRequestError for a name that is taken."""
        with self._shelf.changed:
            if name not in self:
                self._shelf.entries[name] = Entry(name, source)
            elif self._shelf.entry(name).source != source or name in self._shelf.adapted:
                raise InvalidRequestError(f"{name} is another model here; choose another name", param="name")

    def offer(self, name: str, adapter: str, folder: str) -> str:
        """Let a model be asked for with the adapter in `folder`, too; its name then. One that is loaded stays loaded.

        Raises InvalidRequestError for a name that is taken, and what LLM.add_adapter raises; then nothing has changed.
        """
        with self._shelf.changed:
            self._shelf.offer(name, {adapter: folder})
            entry = self._shelf.entry(name)
        try:
            if entry.model is not None:
                entry.fit(entry.model, (adapter,))
        except BaseException:
            with self._shelf.changed:
                self._shelf.withdraw(name, adapter)
            raise
        return f"{name}:{adapter}"

    def withdraw(self, name: str, adapter: str) -> None:
        """Take an offer back: "name:adapter" can't be asked for any more. What it takes goes when the model does.

        Raises ModelNotFoundError when there is none.
        """
        with self._shelf.changed:
            self._shelf.entry(f"{name}:{adapter}")
            self._shelf.withdraw(name, adapter)

    def source(self, name: str) -> str | None:
        """What a registered model is loaded from; None for one that was given loaded. Raises ModelNotFoundError."""
        return self._shelf.entry(name).source

    def adopt(self, name: str, model: LLM | Encoder) -> None:
        """Take a loaded model in under a registered name; the pool unloads it from now on."""
        entry = self._shelf.entry(name)
        entry.fit(model)
        with self._shelf.changed:
            assert entry.state in ("registered", "failed"), f"{name} is {entry.state} already"
            self._workers.settle(entry, model)

    def fits_now(self, name: str) -> bool:
        """Whether a model fits beside those that are loaded. Raises WontFitError when it doesn't even fit alone."""
        entry = self._shelf.entry(name)
        assert entry.source is not None, "a model that was given is loaded"
        needed, budget = self._loads.predict(entry.source, self._workers.cancel), self._loads.budget()
        if needed > budget:
            raise wont_fit(name, needed, budget, [])
        return needed <= budget - self._loads.held()

    def pin(self, name: str, pinned: bool = True) -> None:
        """Keep a model, once it is loaded, whatever else needs its memory."""
        with self._shelf.changed:
            self._shelf.entry(name).pinned = pinned
            self._shelf.changed.notify_all()

    def keep(self, name: str, seconds: float) -> None:
        """Unload a model when it was idle for so long, in place of `keep_alive`; 0: at once, infinity: never.

        The last caller's wish counts, until the model is unloaded. Pinned models and those that were given loaded stay.
        """
        with self._shelf.changed:
            entry = self._shelf.entry(name)
            if entry.source is None:
                return
            entry.keep = seconds if seconds <= LONGEST_S else math.inf
            self._workers.start_timer()
            self._shelf.changed.notify_all()

    def unload(self, name: str) -> None:
        """Unload a model now, pinned or not; nothing happens when it isn't loaded.

        Raises ModelsBusyError when it is at work.
        """
        with self._shelf.changed:
            entry = self._shelf.entry(name)
            if entry.state != "loaded":
                return
            if entry.at_work():
                raise ModelsBusyError(f"{name} is at work; it can be unloaded when its requests have ended")
            entry.state = "unloading"
        self._workers.unload(entry)

    def relieve(self, wanted: int) -> bool:
        """Have idle models that aren't pinned unloaded, the least recently used first, until `wanted` bytes are free.

        For requests at work that need more memory. Returns at once, with whether any will go; while models are just
        going nothing is added.
        """
        with self._shelf.changed:
            if any(entry.state == "unloading" for entry in self._shelf.entries.values()):
                return True
            if next(iter(self._shelf.idle()), None) is None:
                return False
            self._shelf.wanted = max(self._shelf.wanted, wanted)
            self._workers.start_timer()
            self._shelf.changed.notify_all()
            return True

    def unload_idle(self) -> None:
        """Unload what `relieve` asked for and what was idle for `keep_alive`; a thread of the pool does it when due."""
        self._workers.unload_idle()

    def status(self) -> dict[str, ModelStatus]:
        """What is registered, and how each model is."""
        with self._shelf.changed:
            return {name: self._shelf.status(entry) for name, entry in self._shelf.entries.items()}

    def model(self, name: str) -> LLM | Encoder | None:
        """The model if it is loaded, without a lease: for figures, not for work."""
        return self._shelf.entry(name).model

    def missing(self) -> list[str]:
        """Models that were to be loaded at the start and aren't yet, and those that load now."""
        with self._shelf.changed:
            return [name for name, e in self._shelf.entries.items() if e.due or e.state == "loading"]

    def close(self, timeout: float = 30.0) -> None:
        """End a load that runs, fail who waits, and unload what the pool loaded or adopted."""
        with self._shelf.changed:
            self._shelf.closed = True
            self._workers.cancel.set()
            for entry in self._shelf.entries.values():
                entry.fail_waiters(EngineClosedError("the server is shutting down"))
            self._shelf.changed.notify_all()
        self._workers.join(timeout)
        for entry in self._shelf.entries.values():
            if entry.model is not None and entry.source is not None:
                self._workers.unload(entry)


def _release_result(future: Future[Lease]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().release()
