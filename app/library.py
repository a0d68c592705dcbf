"""The models that the app offers: those on this machine and those of the catalogue, and what can be done with each."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlxinfer import runtime, zoo
from mlxinfer.app.pulls import Pull, Pulls
from mlxinfer.errors import InvalidRequestError, MlxinferError, ModelNotFoundError, ModelsBusyError, OfflineError

if TYPE_CHECKING:
    from mlxinfer.config import Settings
    from mlxinfer.pool import ModelPool, ModelStatus
    from mlxinfer.zoo import CatalogEntry, FitReport, ModelCard, ModelFiles

__all__ = ["Library", "MemoryBar", "Offer", "Pull"]

FRESH_S = 5.0
"""How long what is on this machine is taken to stay."""
FIT_FRESH_S = 60.0
"""How long a prediction holds: other programs take and give back memory."""


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
    error: str = ""
    """Why it can't be loaded, or why the last load failed."""
    pinned: bool = False
    at_work: bool = False
    adapters: tuple[str, ...] = ()
    """Each can be asked for as "name:adapter"."""

    @property
    def writes(self) -> bool:
        """Whether it answers with text."""
        return not {"embedding", "reranking"} & set(self.capabilities)


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
        self._pulls = Pulls(settings, self._arrived)
        self._listed: tuple[float, list[Offer]] = (float("-inf"), [])
        self._fits: dict[tuple[str, bool], tuple[float, FitReport | None]] = {}
        self._cards: dict[tuple[Path, int, int], ModelCard] = {}
        self._lock = threading.Lock()
        self._bandwidth: tuple[float, str] | None = None

    # What there is

    def offers(self) -> list[Offer]:
        """Those on this machine first, then the catalogue's, in its order."""
        if time.monotonic() - self._listed[0] > FRESH_S:
            self._listed = (time.monotonic(), self._list())
        status, adapters = self._pool.status(), self._adapters()
        return [_now(offer, status.get(offer.name), adapters.get(offer.name, ())) for offer in self._listed[1]]

    def models(self) -> list[str]:
        """Names that can be chosen for a reply now: models on this machine, each followed by it with its adapters."""
        offers = [offer for offer in self.offers() if offer.here and offer.writes]
        return [name for o in offers for name in (o.name, *(f"{o.name}:{adapter}" for adapter in o.adapters))]

    def _adapters(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for both, name in self._pool.adapted().items():
            found[name] = (*found.get(name, ()), both.removeprefix(f"{name}:"))
        return found

    def _list(self) -> list[Offer]:
        from mlxinfer.zoo.resolver import find_local_entry

        found: dict[str, Offer] = {}
        there: dict[Path, str] = {}
        for entry in zoo.catalog():
            if files := find_local_entry(entry, self._settings):
                found[entry.alias] = _of_entry(entry, files)
                there[files.path] = entry.alias
        for files in zoo.installed(self._settings):
            # A model of the catalogue that came from the hub goes by its alias alone.
            if files.path not in there and files.name not in found:
                found[files.name] = self._of_files(files.name, files)
        for name in self._pool:
            if name not in found and (offer := self._registered(name)):
                found[name] = offer
        for entry in zoo.catalog():
            if entry.alias not in found:
                found[entry.alias] = _of_entry(entry, None)
        return list(found.values())

    def _registered(self, name: str) -> Offer | None:
        """A model that only the pool knows; None when its files are gone."""
        source, info = self._pool.source(name), self._pool.status()[name].info
        if source is not None:
            with contextlib.suppress(ModelNotFoundError, OfflineError):
                return self._of_files(name, zoo.resolve(source, self._settings, fetch=False))
            return None
        assert info is not None, "a model without a source was given loaded"
        kinds = {"text": ("chat",) if info.has_chat_template else ("completion",), "embeddings": ("embedding",)}
        size, parameters = info.weight_bytes, info.num_parameters
        return Offer(
            name, True, "loaded", size, parameters, _bits(size, parameters), "",
            kinds.get(info.makes, ("reranking",)), info.source,
        )  # fmt: skip

    def _of_files(self, name: str, files: ModelFiles) -> Offer:
        """By what its files say; where they are wrong, with the error."""
        card = self._card(files)
        if isinstance(card, str):
            return Offer(name, True, "registered", files.size_bytes, 0, 0.0, "", (), files.origin, error=card)
        return Offer(
            name, True, "registered", files.size_bytes, card.parameters, _bits(files.size_bytes, card.parameters),
            card.licence, card.capabilities, files.origin,
        )  # fmt: skip

    def _card(self, files: ModelFiles) -> ModelCard | str:
        """What the files say, read once for each state of them, or what is wrong with them."""
        from mlxinfer.zoo.cards import card_of

        try:
            key = (files.path, files.path.stat().st_mtime_ns, files.size_bytes)
            if key not in self._cards:
                self._cards[key] = card_of(files)
        except (MlxinferError, OSError) as error:
            return str(error)
        return self._cards[key]

    def _forget_list(self) -> None:
        self._listed = (float("-inf"), [])

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
            self._forget_list()

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
            self._forget_list()
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
        self._forget_list()
        self.use(name)


def _of_entry(entry: CatalogEntry, files: ModelFiles | None) -> Offer:
    return Offer(
        entry.alias, files is not None, "registered", files.size_bytes if files else entry.size_bytes,
        entry.parameters, entry.bits, entry.licence, entry.capabilities,
        files.origin if files else ", ".join(entry.sources),
    )  # fmt: skip


def _bits(size_bytes: int, parameters: int) -> float:
    """Per weight, as stored."""
    return round(size_bytes * 8 / parameters, 1) if parameters else 0.0


def _now(offer: Offer, status: ModelStatus | None, adapters: tuple[str, ...]) -> Offer:
    if status is None:
        return offer
    return dataclasses.replace(
        offer, state=status.state, error=offer.error or status.error or "", pinned=status.pinned, adapters=adapters,
        at_work=status.running + status.waiting > 0,
    )  # fmt: skip
