"""Opens the file: makes it, brings an older one up to date after a backup, sets a damaged one aside."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxinfer.app.store.schema import VERSIONS
from mlxinfer.app.store.store import Store
from mlxinfer.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

FILE = "chats.db"
"""In the data folder."""
WAIT_S = 10.0
"""How long a write waits for that of another process."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A store, and what its reader should know about how it was opened."""

    store: Store
    notice: str = ""


def open_store(path: Path) -> Opened:
    """Open or make `path`. Raises StoreError for a file of a newer version, and where nothing can be written.

    A file that is no database or a damaged one is renamed, never deleted, and a new one begun: `notice` says so.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists() or not path.stat().st_size
        connection = _connect(path)
        try:
            _check(connection)
        except sqlite3.DatabaseError as error:
            connection.close()
            if _is_busy(error):
                raise StoreError(f"{path} is being used by another process that does not let go: {error}") from error
            aside = _set_aside(path)
            opened = open_store(path)
            return Opened(
                opened.store, f"{path.name} was damaged ({error}); it is kept as {aside}, and a new one begun"
            )
        notice = _migrate(connection, path, new=new)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"the conversations in {path} cannot be opened: {error}") from error
    return Opened(Store(connection, path), notice)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    return connection


def _check(connection: sqlite3.Connection) -> None:
    """Raises sqlite3.DatabaseError for a file that is damaged."""
    # Readers don't wait for the writer, and a kill at any moment leaves the last committed state.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise sqlite3.DatabaseError(str(found))


def _is_busy(error: sqlite3.DatabaseError) -> bool:
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )


def _migrate(connection: sqlite3.Connection, path: Path, *, new: bool) -> str:
    """Bring the file to the last version. Says where the copy of an older one is."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(VERSIONS):
        connection.close()
        raise StoreError(
            f"{path} was written by a newer version (its format is {version}, this program knows {len(VERSIONS)}): "
            "update mlxinfer"
        )
    if version == len(VERSIONS):
        return ""
    notice = "" if new else _backed_up(connection, path, version)
    for number in range(version, len(VERSIONS)):
        # The version is read again inside: another process may have been faster.
        connection.execute("BEGIN IMMEDIATE")
        with connection:  # commits, or takes everything back
            if connection.execute("PRAGMA user_version").fetchone()[0] == number:
                for statement in _statements(VERSIONS[number]):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {number + 1}")
    return notice


def _backed_up(connection: sqlite3.Connection, path: Path, version: int) -> str:
    copy = path.with_name(f"{path.name}.v{version}.bak")
    with contextlib.closing(sqlite3.connect(copy)) as target:
        connection.backup(target)
    return f"{path.name} was brought up to date; a copy of the old one is {copy}"


def _statements(script: str) -> list[str]:
    """A script cut where SQLite sees whole statements; executescript would commit in between."""
    found: list[str] = []
    part = ""
    for piece in script.split(";"):
        part += piece + ";"
        if sqlite3.complete_statement(part):
            found.append(part)
            part = ""
    return [one for one in found if one.strip(" \n;")]


def _set_aside(path: Path) -> Path:
    """Rename the file and what belongs to it; where the name is taken, another one."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1000):
        aside = path.with_name(f"{path.name}.damaged-{stamp}{f'-{number}' if number else ''}")
        if not aside.exists():
            for suffix in ("-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{path}{suffix}", f"{aside}{suffix}")
            path.rename(aside)
            return aside
    raise OSError(f"{path} is damaged and there is no free name to keep it under")
