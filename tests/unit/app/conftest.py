"""Conversations on disk and replies that are written into them; each file brings its own `pool`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlxinfer.app.replies import Replies
from mlxinfer.app.store import Store, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlxinfer.pool import ModelPool


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = open_store(tmp_path / "chats.db").store
    yield made
    made.close()


@pytest.fixture
def replies(pool: ModelPool, store: Store) -> Iterator[Replies]:
    made = Replies(pool, store)
    yield made
    made.close()
