"""A glance at the conversations for a shell's completion: changes nothing, and says nothing of a file it can't read."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 0.2
"""For a writer; somebody's cursor stands still meanwhile."""


def recent(path: Path, beginning: str, *, deleted: bool = False, limit: int = 50) -> list[tuple[str, str]]:
    """Ids that start with `beginning`, with their titles, newest first. [] where there is no sound file."""
    query = (
        "SELECT id, title FROM conversations WHERE substr(id, 1, ?) = ? AND (deleted IS NOT NULL) = ?"
        " ORDER BY updated DESC LIMIT ?"
    )
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=WAIT_S)) as connection:
            return connection.execute(query, (len(beginning), beginning, deleted, limit)).fetchall()
    except (sqlite3.Error, ValueError):  # ValueError: an argument of a shell that is no text
        return []
