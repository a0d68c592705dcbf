"""The tables, version by version. A version that was published is never changed; a change is a new one."""

from __future__ import annotations

VERSIONS = (
    """
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY,
        title TEXT NOT NULL,
        model TEXT NOT NULL,
        created REAL NOT NULL,
        updated REAL NOT NULL,
        pinned INTEGER NOT NULL DEFAULT 0,
        deleted REAL,
        leaf TEXT,
        system TEXT NOT NULL DEFAULT '',
        settings TEXT NOT NULL DEFAULT '{}'
    );
    CREATE INDEX conversations_by_time ON conversations (deleted, pinned DESC, updated DESC);
    CREATE TABLE messages (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        parent TEXT REFERENCES messages (id) ON DELETE CASCADE,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        created REAL NOT NULL,
        updated REAL NOT NULL,
        reasoning TEXT NOT NULL DEFAULT '',
        status TEXT NOT NULL DEFAULT 'done',
        extra TEXT NOT NULL DEFAULT '{}'
    );
    CREATE INDEX messages_by_parent ON messages (conversation, parent);
    CREATE VIRTUAL TABLE found USING fts5 (
        content, content = 'messages', content_rowid = 'number', tokenize = 'trigram'
    );
    CREATE TRIGGER message_added AFTER INSERT ON messages BEGIN
        INSERT INTO found (rowid, content) VALUES (new.number, new.content);
    END;
    CREATE TRIGGER message_removed AFTER DELETE ON messages BEGIN
        INSERT INTO found (found, rowid, content) VALUES ('delete', old.number, old.content);
    END;
    CREATE TRIGGER message_changed AFTER UPDATE OF content ON messages BEGIN
        INSERT INTO found (found, rowid, content) VALUES ('delete', old.number, old.content);
        INSERT INTO found (rowid, content) VALUES (new.number, new.content);
    END;
    """,
)
"""Version N of the file is what the first N scripts make; PRAGMA user_version holds N."""
