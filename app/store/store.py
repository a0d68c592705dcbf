"""Conversations and the trees of their messages."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from mlxinfer.app.store.records import Conversation, Hit, Message, Role, Status, conversation_of, message_of
from mlxinfer.errors import InvalidRequestError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_TITLE = 200
SHORTEST = 3
"""Characters from which the index finds a text; shorter ones are looked for in every message."""
AROUND = 40
"""Characters of a snippet on each side of what was found."""


class Store:
    """Thread-safe; other processes may write the same file. Every change is on disk when its call returns."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self.path = path
        self._connection = connection
        self._lock = threading.RLock()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    # Conversations

    def create(self, model: str, *, title: str = "", system: str = "", **settings: Any) -> Conversation:
        now = time.time()
        made = Conversation(_new_id(), title[:MAX_TITLE], model, now, now, system=system, settings=settings)
        with self._writing() as write:
            write(
                "INSERT INTO conversations (id, title, model, created, updated, system, settings)"
                " VALUES (?,?,?,?,?,?,?)",
                made.id, made.title, model, now, now, system, json.dumps(settings),
            )  # fmt: skip
        return made

    def conversation(self, key: str) -> Conversation:
        """By its id or the beginning of it. Raises InvalidRequestError for none or several."""
        escaped = key.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_")
        rows = self._read(
            "SELECT * FROM conversations WHERE id LIKE ? ESCAPE '\\' ORDER BY id = ? DESC LIMIT 2", f"{escaped}%", key
        )
        if not key or not rows:
            raise InvalidRequestError(f"there is no conversation {key!r:.80}", param="conversation")
        if len(rows) > 1 and rows[0]["id"] != key:
            raise InvalidRequestError(f"several conversations begin with {key!r:.80}", param="conversation")
        return conversation_of(rows[0])

    def conversations(self, *, deleted: bool = False, limit: int = 200, offset: int = 0) -> list[Conversation]:
        """Pinned ones first, then by the time of the last change."""
        where = "deleted IS NOT NULL" if deleted else "deleted IS NULL"
        query = f"SELECT * FROM conversations WHERE {where} ORDER BY pinned DESC, updated DESC LIMIT ? OFFSET ?"
        return [conversation_of(row) for row in self._read(query, limit, offset)]

    def change(
        self,
        key: str,
        *,
        title: str | None = None,
        pinned: bool | None = None,
        model: str | None = None,
        system: str | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        """What isn't None. Pinning doesn't count as a change in time."""
        values: dict[str, Any] = {
            "title": None if title is None else title[:MAX_TITLE],
            "pinned": pinned,
            "model": model,
            "system": system,
            "settings": None if settings is None else json.dumps(settings),
        }
        given = {name: value for name, value in values.items() if value is not None}
        if given.keys() - {"pinned"}:
            given["updated"] = time.time()
        with self._writing() as write:
            for name, value in given.items():
                write(f"UPDATE conversations SET {name} = ? WHERE id = ?", value, key)

    def delete(self, key: str) -> None:
        """Until `purge`, `restore` brings it back."""
        with self._writing() as write:
            write("UPDATE conversations SET deleted = ? WHERE id = ?", time.time(), key)

    def restore(self, key: str) -> None:
        with self._writing() as write:
            write("UPDATE conversations SET deleted = NULL WHERE id = ?", key)

    def remove(self, key: str) -> None:
        """For good."""
        with self._writing() as write:
            write("DELETE FROM conversations WHERE id = ?", key)

    def purge(self, *, older_than_s: float) -> int:
        """Remove for good what was deleted so long ago. How many."""
        with self._writing() as write:
            return write("DELETE FROM conversations WHERE deleted < ?", time.time() - older_than_s).rowcount

    # Messages

    def add(
        self,
        conversation: str,
        role: Role,
        content: str,
        *,
        parent: str | None = None,
        root: bool = False,
        reasoning: str = "",
        status: Status = "done",
        **extra: Any,
    ) -> Message:
        """Below `parent`, or below the end of the shown branch; with `root`, a new beginning. It becomes that end."""
        now = time.time()
        key = _new_id()
        with self._writing() as write:
            row = write("SELECT leaf FROM conversations WHERE id = ?", conversation).fetchone()
            if row is None:
                raise InvalidRequestError(f"there is no conversation {conversation!r:.80}", param="conversation")
            above = None if root else parent or row["leaf"]
            if (
                parent
                and not write(
                    "SELECT 1 FROM messages WHERE id = ? AND conversation = ?", parent, conversation
                ).fetchone()
            ):
                raise InvalidRequestError(f"there is no message {parent!r:.80} in this conversation", param="parent")
            write(
                "INSERT INTO messages (id, conversation, parent, role, content, created, updated, reasoning, status,"
                " extra) VALUES (?,?,?,?,?,?,?,?,?,?)",
                key, conversation, above, role, content, now, now, reasoning, status, json.dumps(extra),
            )  # fmt: skip
            write("UPDATE conversations SET leaf = ?, updated = ? WHERE id = ?", key, now, conversation)
        return Message(key, conversation, above, role, content, now, now, reasoning, status, extra)

    def write(
        self,
        message: str,
        content: str,
        *,
        reasoning: str = "",
        status: Status = "streaming",
        extra: dict[str, Any] | None = None,
    ) -> None:
        """A reply as it has grown; `extra` is added to what is there."""
        with self._writing() as write:
            write(
                "UPDATE messages SET content = ?, reasoning = ?, status = ?, updated = ?, extra = json_patch(extra, ?)"
                " WHERE id = ?",
                content, reasoning, status, time.time(), json.dumps(extra or {}), message,
            )  # fmt: skip

    def message(self, key: str) -> Message:
        rows = self._read("SELECT * FROM messages WHERE id = ?", key)
        if not rows:
            raise InvalidRequestError(f"there is no message {key!r:.80}", param="message")
        return message_of(rows[0])

    def branch(self, conversation: str, leaf: str | None = None) -> list[Message]:
        """From the root to `leaf`, or to the end of the shown branch."""
        leaf = leaf or self.conversation(conversation).leaf
        rows = self._read(
            "WITH RECURSIVE up (id, depth) AS (VALUES (?, 0) UNION ALL SELECT parent, depth + 1 FROM messages JOIN up"
            " USING (id) WHERE parent IS NOT NULL)"
            " SELECT messages.* FROM messages JOIN up USING (id) ORDER BY depth DESC",
            leaf,
        )
        return [message_of(row) for row in rows]

    def messages(self, conversation: str) -> list[Message]:
        """Of all branches, in the order in which they were made."""
        rows = self._read("SELECT * FROM messages WHERE conversation = ? ORDER BY number", conversation)
        return [message_of(row) for row in rows]

    def siblings(self, message: str) -> list[str]:
        """The alternatives of a message, itself included, oldest first."""
        one = self.message(message)
        rows = self._read(
            "SELECT id FROM messages WHERE conversation = ? AND parent IS ? ORDER BY number",
            one.conversation, one.parent,
        )  # fmt: skip
        return [row["id"] for row in rows]

    def show(self, message: str) -> None:
        """Show the branch through `message`, to the newest end below it."""
        one = self.message(message)
        leaf = one.id
        with self._writing() as write:
            while row := write(
                "SELECT id FROM messages WHERE parent = ? ORDER BY number DESC LIMIT 1", leaf
            ).fetchone():
                leaf = row["id"]
            write("UPDATE conversations SET leaf = ? WHERE id = ?", leaf, one.conversation)

    def show_end(self, message: str) -> None:
        """Show the branch that ends with `message`, whatever stands below it."""
        one = self.message(message)
        with self._writing() as write:
            write("UPDATE conversations SET leaf = ? WHERE id = ?", one.id, one.conversation)

    # Search

    def search(self, text: str, *, limit: int = 50) -> list[Hit]:
        """Conversations whose title or any message has `text`, newest first; case doesn't count, marks do."""
        text = text.strip()
        if not text:
            return []
        like = "%{}%".format(text.replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_"))
        hits = [
            Hit(conversation_of(row), None, row["title"])
            for row in self._read(
                "SELECT * FROM conversations WHERE deleted IS NULL AND title LIKE ? ESCAPE '\\'"
                " ORDER BY updated DESC LIMIT ?",
                like, limit,
            )
        ]  # fmt: skip
        if len(text) >= SHORTEST:
            inside = "number IN (SELECT rowid FROM found WHERE content MATCH ?)"
            sought = '"{}"'.format(text.replace('"', '""'))
        else:
            inside, sought = "content LIKE ? ESCAPE '\\'", like
        rows = self._read(
            f"SELECT messages.id AS message, content, conversations.* FROM messages JOIN conversations"
            f" ON conversations.id = conversation WHERE deleted IS NULL AND {inside} ORDER BY number DESC LIMIT ?",
            sought, limit,
        )  # fmt: skip
        for row in rows:
            values = dict(row)
            key, content = values.pop("message"), values.pop("content")
            hits.append(Hit(conversation_of(values), key, _snippet(content, text)))
        return hits[:limit]

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside or none, from this thread."""
        with self._writing():
            yield

    # Underneath

    def _read(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock, self._errors():
            return self._connection.execute(query, values).fetchall()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Any]:
        """One transaction; a part of the outer one inside another."""
        with self._lock, self._errors():

            def write(query: str, *values: Any) -> sqlite3.Cursor:
                return self._connection.execute(query, values)

            if self._connection.in_transaction:
                yield write
                return
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:  # commits, or takes everything back
                yield write

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"the conversations in {self.path} cannot be read or written: {error}") from error


def _snippet(content: str, text: str) -> str:
    at = max(0, content.lower().find(text.lower()))
    start, end = max(0, at - AROUND), at + len(text) + AROUND
    middle = " ".join(content[start:end].split())
    return f"{'…' if start else ''}{middle}{'…' if end < len(content) else ''}"


def _new_id() -> str:
    return uuid.uuid4().hex
