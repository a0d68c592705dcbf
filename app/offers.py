"""What models there are: those on this machine, each as its files say, and those of the catalogue."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxinfer import zoo
from mlxinfer.errors import MlxinferError, ModelNotFoundError, OfflineError

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.config import Settings
    from mlxinfer.pool import ModelPool, ModelStatus
    from mlxinfer.zoo import CatalogEntry, ModelCard, ModelFiles

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


class Offers:
    """The list, read again from disk after FRESH_S; how each model stands in the pool is asked for each time."""

    def __init__(self, pool: ModelPool, settings: Settings) -> None:
        self._pool, self._settings = pool, settings
        self._listed: tuple[float, list[Offer]] = (float("-inf"), [])
        self._cards: dict[tuple[Path, int, int], ModelCard] = {}

    def all(self) -> list[Offer]:
        """Those on this machine first, then the catalogue's, in its order."""
        if time.monotonic() - self._listed[0] > FRESH_S:
            self._listed = (time.monotonic(), self._list())
        status, adapters = self._pool.status(), self._adapters()
        return [_now(offer, status.get(offer.name), adapters.get(offer.name, ())) for offer in self._listed[1]]

    def forget(self) -> None:
        """Read the disk at the next look."""
        self._listed = (float("-inf"), [])

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
