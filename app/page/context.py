"""What every part of the page is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.app.comparisons import Comparisons
    from mlxinfer.app.library import Library
    from mlxinfer.app.page.texts import Texts
    from mlxinfer.app.replies import Replies
    from mlxinfer.app.store import Store
    from mlxinfer.config import Settings
    from mlxinfer.pool import ModelPool


@dataclass(frozen=True, kw_only=True)
class House:
    """What the app works on, whoever looks at it."""

    pool: ModelPool
    store: Store
    replies: Replies
    library: Library
    comparisons: Comparisons
    settings: Settings
    uploads: Path
    """The folder that the browser's uploads arrive in."""
    notice: str = ""
    """What the reader should know about how the conversations were opened."""


@dataclass(frozen=True, kw_only=True)
class PageContext(House):
    """The house as the page of one language sees it."""

    texts: Texts
    languages: tuple[str, ...] = ("en",)
    """Those that the page is served in."""

    @classmethod
    def of(cls, house: House, texts: Texts, languages: tuple[str, ...]) -> PageContext:
        return cls(**vars(house), texts=texts, languages=languages)
