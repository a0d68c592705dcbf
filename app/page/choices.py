"""The models that a conversation can be held with, and the one that a new conversation gets."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from mlxinfer.errors import MlxinferError

if TYPE_CHECKING:
    from mlxinfer.app.page.context import House


def first(house: House) -> str:
    """The configured model, else that of the newest conversation, else the first one here; "" where there is none."""
    here = house.library.models()
    used = [chat.model for chat in sorted(house.store.conversations(limit=20), key=lambda chat: -chat.updated)]
    wanted = (house.settings.model or "", *used, *here)
    return next((name for name in wanted if name in here), "")


def load(house: House, name: str) -> None:
    """Have a model loaded on the pool's thread. What goes wrong is told by the first reply that needs it."""
    with contextlib.suppress(MlxinferError):
        house.library.load(name)


def status(house: House, name: str) -> str:
    """ "loading" while it is, "loaded", or another state of the pool; "" where it isn't registered."""
    base = house.pool.adapted().get(name, name)
    found = house.pool.status().get(base)
    return found.state if found else ""


def context_length(house: House, name: str) -> int:
    """Tokens; 0 while the model isn't loaded."""
    loaded = house.pool.model(name) if name in house.pool else None
    return loaded.info.context_length if loaded is not None else 0
