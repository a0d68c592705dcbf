"""What can be done with the models that the app offers: whether each fits, loading, fetching, deleting, adapters."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlxinfer import runtime, zoo
from mlxinfer.app.offers import Offer, Offers
from mlxinfer.app.pulls import Pull, Pulls
from mlxinfer.errors import InvalidRequestError, MlxinferError, ModelNotFoundError, ModelsBusyError, OfflineError

if TYPE_CHECKING:
    from mlxinfer.config import Settings
    from mlxinfer.pool import ModelPool
    from mlxinfer.zoo import FitReport

__all__ = ["Library", "MemoryBar", "Offer", "Pull"]

FIT_FRESH_S = 60.0
"""How long a prediction holds: other programs take and give back memory."""


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """Bytes; the five together are what models may take on this machine."""

    weights: int
    kv: int
    cache: int
    free: int
    other: int = 0
    """What models might take and other programs hold now."""

    @property
    def budget(self) -> int:
        return self.weights + self.kv + self.cache + self.free + self.other


class Library:
    """Thread-safe. What is asked for is registered with the pool, under the name it goes by everywhere."""

    def __init__(self, pool: ModelPool, settings: Settings) -> None:
        self._pool, self._settings = pool, settings
        self._offers, self._pulls = Offers(pool, settings), Pulls(settings, self._arrived)
        self._fits: dict[tuple[str, bool], tuple[float, FitReport | None]] = {}
        self._lock = threading.Lock()
        self._bandwidth: tuple[float, str] | None = None

    # What there is

    def offers(self) -> list[Offer]:
        """Those on this machine first, then the catalogue's, in its order."""
        return self._offers.all()

    def models(self) -> list[str]:
        """Names that can be chosen for a reply now: models on this machine, each followed by it with its adapters."""
        offers = [offer for offer in self.offers() if offer.here and offer.writes]
        return [name for o in offers for name in (o.name, *(f"{o.name}:{adapter}" for adapter in o.adapters))]

    # Whether it fits

    def fit(self, name: str) -> FitReport | None:
        """Whether it fits, before it is loaded; None where its size can't be known. Raises ModelFileError."""
        entry = zoo.find_entry(name)
        source = (self._pool.source(name) or name) if name in self._pool else name
        try:
            return zoo.fit(source, self._settings, bandwidth=self._speed())
        except (ModelNotFoundError, OfflineError):
            return zoo.fit(entry, self._settings, bandwidth=self._speed()) if entry else None

    def fits(self) -> dict[str, FitReport]:
        """Of every offer whose size is known; no network is asked."""
        now, found = time.monotonic(), {}
        memory = runtime.memory()
        for offer in self.offers():
            key = (offer.name, offer.here)
            made, report = self._fits.get(key, (float("-inf"), None))
            if now - made > FIT_FRESH_S:
                try:
                    report = self._predicted(offer, memory)
                except MlxinferError:  # a file that is wrong: the offer says so itself
                    report = None
                self._fits[key] = (now, report)
            if report is not None:
                found[offer.name] = report
        return found

    def _predicted(self, offer: Offer, memory: runtime.Memory) -> FitReport | None:
        entry = zoo.find_entry(offer.name)
        if offer.here:
            return self.fit(offer.name)
        return zoo.fit(entry, self._settings, memory=memory, bandwidth=self._speed()) if entry else None

    def _speed(self) -> tuple[float, str]:
        """The memory's bandwidth and where the figure is from. Measured once, on the one thread that mlx runs on."""
        from mlxinfer.engine.worker import mlx_thread
        from mlxinfer.zoo.fitting import measured_bandwidth

        with self._lock:
            if self._bandwidth is None:
                self._bandwidth = mlx_thread().call(measured_bandwidth)
            return self._bandwidth

    def memory(self) -> MemoryBar:
        """Of all models together."""
        from mlxinfer.engine.governor import governor

        figures = governor().figures()
        room = max(0, figures.free)
        free = min(room, runtime.memory().available)
        return MemoryBar(figures.weights, figures.kv, figures.prefix_cache, free, room - free)

    # What can be done

    def use(self, name: str) -> None:
        """Have the pool know a model that is on this machine. Raises ModelNotFoundError or OfflineError."""
        if name not in self._pool:
            zoo.resolve(name, self._settings, fetch=False)
            self._pool.register(name, name)
            self._offers.forget()

    def load(self, name: str) -> None:
        """Begin to load a model; `offers` says how that goes.

        Raises as `use`, and for a while the error of a load that failed.
        """
        self.use(name)
        self._pool.preload(name)

    def unload(self, name: str) -> None:
        """Raises ModelsBusyError when it is at work. Nothing happens when it isn't loaded."""
        if name in self._pool:
            self._pool.unload(name)

    def pin(self, name: str, pinned: bool) -> None:
        """Keep a model in memory once it is loaded, whatever else needs the room. Raises as `use`."""
        self.use(name)
        self._pool.pin(name, pinned)

    def remove(self, name: str) -> int:
        """Delete a model from disk, what a pull left of it, too; how many bytes that freed.

        Raises InvalidRequestError for what belongs to the user or another program and for a model that is being
        fetched, ModelNotFoundError, and ModelsBusyError for one that is at work; then nothing has changed.
        """
        if self._pulls.running(name):
            raise InvalidRequestError(f"{name} is on its way here; cancel that first", param="model")
        status = self._pool.status().get(name)
        if status is not None and (status.state == "loading" or status.running + status.waiting > 0):
            raise ModelsBusyError(f"{name} is at work; it can be deleted when its requests have ended")
        try:
            source = self._pool.source(name) if status is not None else name
            freed = zoo.remove(source or name, self._settings)
        finally:
            self._offers.forget()
        self._pulls.forget(name)
        self.unload(name)
        return freed

    def add_adapter(self, name: str, adapter: str, folder: str) -> str:
        """Let a model be asked for with the adapter in `folder`, too; its name then, "name:adapter".

        Raises what `use` raises, InvalidRequestError for a name that is taken or can't be one, ModelNotFoundError,
        ModelFileError or UnsupportedModelError for the folder; then nothing has changed. Whether an adapter belongs to
        a model that isn't loaded shows when that is.
        """
        from mlxinfer.engine.adapter_files import read_adapter

        path = Path(folder.strip()).expanduser().absolute() if folder.strip() else None
        if path is None:
            raise InvalidRequestError("name the adapter's folder", param="folder")
        self.use(name)
        read_adapter(adapter, path)
        return self._pool.offer(name, adapter, str(path))

    def drop_adapter(self, name: str, adapter: str) -> None:
        """Take an adapter off a model. Its files stay. Raises ModelNotFoundError when it has none of that name."""
        self._pool.withdraw(name, adapter)

    # Pulls

    def pull(self, name: str) -> Pull:
        """Begin to fetch a model, or go on where a fetch was broken off; one that runs is handed out again.

        Raises InvalidRequestError for what is no model's name.
        """
        return self._pulls.begin(name)

    def pulls(self) -> list[Pull]:
        """Those of this process, the last one first."""
        return self._pulls.all()

    def cancel(self, name: str) -> None:
        """Break a pull off; what arrived is kept for the next one."""
        self._pulls.cancel(name)

    def discard(self, name: str) -> None:
        """Take a pull that is over off the list, with what it left. Raises InvalidRequestError for one that runs."""
        pull = next((one for one in self.pulls() if one.name == name), None)
        self._pulls.forget(name)
        if pull is not None and pull.state in ("cancelled", "failed"):
            with contextlib.suppress(ModelNotFoundError, InvalidRequestError):  # nothing had come, or it isn't ours
                zoo.remove(name, self._settings)

    def close(self) -> None:
        """Break off what runs; what arrived is kept."""
        self._pulls.close()

    def _arrived(self, name: str) -> None:
        self._offers.forget()
        self.use(name)
