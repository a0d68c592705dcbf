"""The models that the app offers: those on this machine and those of the catalogue, fetched while one goes on."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from mlxinfer import zoo
from mlxinfer.errors import InvalidRequestError, MlxinferError, ModelNotFoundError, OfflineError

if TYPE_CHECKING:
    from mlxinfer.config import Settings
    from mlxinfer.pool import ModelPool
    from mlxinfer.types import ProgressEvent
    from mlxinfer.zoo import CatalogEntry, FitReport

log = logging.getLogger(__name__)

FRESH_S = 5.0
"""How long what is on this machine is taken to stay."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A model as the picker shows it. Empty or 0 where it isn't known."""

    name: str
    here: bool
    """On this machine: it can be loaded."""
    state: str
    """In the pool: loaded, loading, unloading, failed; else registered."""
    size_bytes: int
    parameters: int
    bits: float
    licence: str
    capabilities: tuple[str, ...]
    origin: str


@dataclass(slots=True)
class Pull:
    """A model on its way here."""

    name: str
    done: int = 0
    total: int | None = None
    phase: str = "resolve"
    state: Literal["running", "done", "cancelled", "failed"] = "running"
    error: str = ""
    began: float = field(default_factory=time.monotonic)
    cancel: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """Bytes."""

    weights: int
    kv: int
    cache: int
    free: int


class Library:
    """Thread-safe. What is asked for is registered with the pool, under the name it goes by everywhere."""

    def __init__(self, pool: ModelPool, settings: Settings) -> None:
        self._pool, self._settings = pool, settings
        self._pulls: dict[str, Pull] = {}
        self._lock = threading.Lock()
        self._listed: tuple[float, list[Offer]] = (float("-inf"), [])

    def offers(self) -> list[Offer]:
        """Those on this machine first, then the catalogue's, in its order."""
        if time.monotonic() - self._listed[0] > FRESH_S:
            self._listed = (time.monotonic(), self._list())
        states = {name: status.state for name, status in self._pool.status().items()}
        return [_with_state(offer, states.get(offer.name, "registered")) for offer in self._listed[1]]

    def _list(self) -> list[Offer]:
        found: dict[str, Offer] = {}
        for name in self._pool:
            found[name] = _offer(name, here=True, entry=zoo.find_entry(name))
        for files in zoo.installed(self._settings):
            entry = zoo.find_entry(files.name)
            found[files.name] = _offer(files.name, here=True, entry=entry, size=files.size_bytes, origin=files.origin)
        for entry in zoo.catalog():
            if entry.alias not in found:
                found[entry.alias] = _offer(entry.alias, here=False, entry=entry)
        return list(found.values())

    def fit(self, name: str) -> FitReport | None:
        """Whether it fits, before it is loaded; None where its size can't be known."""
        try:
            return zoo.fit(name, self._settings)
        except (ModelNotFoundError, OfflineError):
            return None

    def use(self, name: str) -> None:
        """Have the pool know a model that is on this machine. Raises ModelNotFoundError or OfflineError."""
        if name not in self._pool:
            zoo.resolve(name, self._settings, fetch=False)
            self._pool.register(name, name)
            self._listed = (float("-inf"), [])

    def memory(self) -> MemoryBar:
        """Of all models together."""
        from mlxinfer.engine.governor import governor

        figures = governor().figures()
        return MemoryBar(figures.weights, figures.kv, figures.prefix_cache, max(0, figures.free))

    # Pulls

    def pull(self, name: str) -> Pull:
        """Begin to fetch a model, or go on where a fetch was broken off; one that runs is handed out again.

        Raises InvalidRequestError for what is no model's name.
        """
        with self._lock:
            running = self._pulls.get(name)
            if running is not None and running.state == "running":
                return running
            if not name.strip():
                raise InvalidRequestError("name a model: an alias, org/name, or a path", param="model")
            pull = self._pulls[name] = Pull(name)
        threading.Thread(target=self._fetch, args=(pull,), name="mlxinfer-pull", daemon=True).start()
        return pull

    def pulls(self) -> list[Pull]:
        """Those of this process, the last one first."""
        return sorted(self._pulls.values(), key=lambda pull: -pull.began)

    def close(self) -> None:
        """Break off what runs; what arrived is kept."""
        for pull in self.pulls():
            pull.cancel.set()

    def _fetch(self, pull: Pull) -> None:
        def progress(event: ProgressEvent) -> None:
            pull.phase, pull.done, pull.total = event.phase, event.done, event.total

        try:
            zoo.resolve(pull.name, self._settings, progress=progress, cancel=pull.cancel)
            self.use(pull.name)
            pull.state = "done"
        except zoo.CancelledError:
            pull.state = "cancelled"
        except MlxinferError as error:
            pull.state, pull.error = "failed", str(error)
        except Exception as error:
            # The thread's edge: whoever looks at the bar has to see that it stands.
            log.exception("fetching %s failed", pull.name)
            pull.state, pull.error = "failed", f"{type(error).__name__}: {error}"
        finally:
            self._listed = (float("-inf"), [])


def _offer(name: str, *, here: bool, entry: CatalogEntry | None, size: int = 0, origin: str = "") -> Offer:
    if entry is None:
        return Offer(name, here, "registered", size, 0, 0.0, "", (), origin)
    return Offer(
        name, here, "registered", size or entry.size_bytes, entry.parameters, entry.bits, entry.licence,
        entry.capabilities, origin or ", ".join(entry.sources),
    )  # fmt: skip


def _with_state(offer: Offer, state: str) -> Offer:
    return dataclasses.replace(offer, state=state)
