"""Conversations outlive kills, damage and updates, and their trees are what was written."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.app.store import exchange, open_store, opening, records
from mlxinfer.errors import InvalidRequestError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mlxinfer.app.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "chats.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    opened = open_store(path)
    assert opened.notice == ""
    yield opened.store
    opened.store.close()


def texts(store: Store, key: str) -> list[str]:
    return [message.content for message in store.branch(key)]


def test_an_edit_and_a_retry_branch_and_every_branch_can_be_shown(store: Store) -> None:
    chat = store.create("m", title="Greetings", system="Be brief.", temperature=0.2)
    first = store.add(chat.id, "user", "Hi")
    one = store.add(chat.id, "assistant", "Hello")
    store.add(chat.id, "user", "Bye")
    retried = store.add(chat.id, "assistant", "Hi there", parent=first.id)
    assert texts(store, chat.id) == ["Hi", "Hi there"]
    assert store.siblings(one.id) == [one.id, retried.id]
    store.show(one.id)
    assert texts(store, chat.id) == ["Hi", "Hello", "Bye"]
    edited = store.add(chat.id, "user", "Good day", root=True)
    assert store.siblings(first.id) == [first.id, edited.id]
    assert texts(store, chat.id) == ["Good day"]
    assert [message.content for message in store.branch(chat.id, retried.id)] == ["Hi", "Hi there"]
    assert len(store.messages(chat.id)) == 5
    held = store.conversation(chat.id[:8])
    assert (held.title, held.system, held.settings) == ("Greetings", "Be brief.", {"temperature": 0.2})


def test_pinned_ones_come_first_and_a_deleted_one_can_be_brought_back(store: Store) -> None:
    keys = [store.create("m", title=f"chat {number}").id for number in range(3)]
    store.change(keys[0], pinned=True)
    store.change(keys[1], title="renamed")
    assert [one.title for one in store.conversations()] == ["chat 0", "renamed", "chat 2"]
    store.delete(keys[1])
    assert keys[1] not in [one.id for one in store.conversations()]
    assert [one.id for one in store.conversations(deleted=True)] == [keys[1]]
    store.restore(keys[1])
    assert len(store.conversations()) == 3
    store.add(keys[2], "user", "gone soon")
    store.delete(keys[2])
    assert store.purge(older_than_s=3600) == 0
    assert store.purge(older_than_s=-1) == 1
    assert store.search("gone soon") == []
    with pytest.raises(InvalidRequestError, match="no conversation"):
        store.conversation(keys[2])


@pytest.mark.parametrize(
    ("text", "sought"),
    [
        ("The quick brown fox", "BROWN f"),
        ("日本語で話してください", "話して"),
        ("東京", "東京"),
        ('say "hi" AND (more) NEAR*', '"hi" AND ('),
        ("100 % of a_b", "% of a_"),
        ("x", "x"),
    ],
)
def test_search_finds_any_part_of_a_text(store: Store, text: str, sought: str) -> None:
    chat = store.create("m")
    other = store.add(chat.id, "user", "nothing of the kind")
    message = store.add(chat.id, "user", f"{'before ' * 20}{text}")
    hits = store.search(sought)
    assert [hit.message for hit in hits] == [message.id]
    assert sought.lower() in hits[0].snippet.lower()
    store.write(message.id, "changed", status="done")
    assert store.search(sought) == []
    assert [hit.message for hit in store.search("nothing of")] == [other.id]


def test_a_title_is_found_and_a_wildcard_is_a_character(store: Store) -> None:
    chat = store.create("m", title="50% off")
    store.create("m", title="50 off")
    assert [hit.conversation.id for hit in store.search("50%")] == [chat.id]
    assert store.search("  ") == []


def test_a_reply_grows_and_one_whose_writer_died_shows_as_cut_off(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = store.create("m")
    reply = store.add(chat.id, "assistant", "", status="streaming", model="m")
    store.write(reply.id, "Once", reasoning="hm", extra={"tokens": 1})
    held = store.message(reply.id)
    assert (held.content, held.reasoning, held.status, held.cut_off) == ("Once", "hm", "streaming", False)
    assert held.extra == {"model": "m", "tokens": 1}
    monkeypatch.setattr(records, "QUIET_S", -1.0)
    assert held.cut_off
    store.write(reply.id, "Once upon", status="stopped")
    assert not store.message(reply.id).cut_off


WRITER = """
import sys
from pathlib import Path
from mlxinfer.app.store import open_store
store = open_store(Path(sys.argv[1])).store
chat = store.create("m", title="long")
reply = store.add(chat.id, "assistant", "", status="streaming")
text = ""
for number in range(10**6):
    text += f"{number} "
    store.write(reply.id, text)
    print(number, flush=True)
"""


def test_a_kill_in_mid_reply_keeps_what_was_written(path: Path) -> None:
    last = -1
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while last < 50:
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    opened = open_store(path)
    assert opened.notice == ""
    (chat,) = opened.store.conversations()
    (reply,) = opened.store.branch(chat.id)
    assert reply.content.startswith("".join(f"{number} " for number in range(last + 1)))
    assert reply.status == "streaming"
    opened.store.close()


def test_two_writers_lose_nothing(path: Path) -> None:
    stores = [open_store(path).store for _ in range(2)]
    chat = stores[0].create("m")

    def work(store: Store) -> None:
        for number in range(40):
            store.add(chat.id, "user", str(number))

    threads = [threading.Thread(target=work, args=(store,)) for store in (*stores, stores[0])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores[1].messages(chat.id)) == 120
    assert len(stores[1].branch(chat.id)) == 120
    for store in stores:
        store.close()


def test_an_older_file_is_brought_up_to_date_after_a_copy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(path).store
    chat = store.create("m", title="old")
    store.close()
    monkeypatch.setattr(opening, "VERSIONS", (*opening.VERSIONS, "ALTER TABLE conversations ADD COLUMN colour TEXT;"))
    opened = open_store(path)
    copy = path.with_name("chats.db.v1.bak")
    assert str(copy) in opened.notice
    with sqlite3.connect(copy) as old:
        assert old.execute("PRAGMA user_version").fetchone() == (1,)
        assert old.execute("SELECT title FROM conversations").fetchall() == [("old",)]
    with sqlite3.connect(path) as new:
        assert new.execute("SELECT id, colour FROM conversations").fetchall() == [(chat.id, None)]
    opened.store.close()
    assert open_store(path).notice == ""
    monkeypatch.undo()
    with pytest.raises(StoreError, match="its format is 2, this program knows 1"):
        open_store(path)


def test_a_step_that_fails_leaves_the_old_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(path).store
    store.create("m", title="kept")
    store.close()
    script = "ALTER TABLE conversations ADD COLUMN a TEXT; ALTER TABLE nowhere ADD COLUMN b TEXT;"
    monkeypatch.setattr(opening, "VERSIONS", (*opening.VERSIONS, script))
    with pytest.raises(StoreError, match="nowhere"):
        open_store(path)
    monkeypatch.undo()
    assert [one.title for one in open_store(path).store.conversations()] == ["kept"]


@pytest.mark.parametrize("damage", ["text", "torn", "page"])
def test_a_damaged_file_is_kept_under_another_name_and_a_new_one_begun(path: Path, damage: str) -> None:
    store = open_store(path).store
    chat = store.create("m")
    for number in range(200):
        store.add(chat.id, "user", f"{number} " * 50)
    store.close()
    whole = path.read_bytes()
    broken = {
        "text": b"this is no database, and long enough to be looked at as one" * 20,
        "torn": whole[: len(whole) // 2],
        "page": whole[:8192] + b"\xff" * 16384 + whole[24576:],
    }[damage]
    path.write_bytes(broken)
    opened = open_store(path)
    assert "was damaged" in opened.notice
    (aside,) = (one for one in path.parent.iterdir() if ".damaged-" in one.name and one.suffix not in ("-wal", "-shm"))
    assert aside.read_bytes() == broken
    assert str(aside) in opened.notice
    assert opened.store.conversations() == []
    opened.store.create("m")
    opened.store.close()


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"chats\.db cannot be opened"):
        open_store(tmp_path / "file" / "chats.db")


def tree(store: Store) -> str:
    """A conversation of two branches; its id."""
    chat = store.create("m", title="Two\nlines", system="Be\n<!-- user -->\nbrief.", temperature=0.5)
    first = store.add(chat.id, "user", "Hi\n\n<!-- assistant -->\n\\<!-- tool -->\n# not a head")
    other = store.add(chat.id, "assistant", "", reasoning="hm\n<!-- reasoning -->", model="m")
    store.add(chat.id, "assistant", "日本\n", parent=first.id, status="stopped")
    store.add(chat.id, "tool", "{}")
    store.show(other.id)
    return chat.id


def as_lists(store: Store, key: str) -> list[object]:
    ids = {message.id: number for number, message in enumerate(store.messages(key))}
    chat = store.conversation(key)
    return [chat.title, chat.model, chat.system, chat.settings, ids.get(chat.leaf or "")] + [
        (m.role, m.content, m.reasoning, m.status, m.extra, ids.get(m.parent or "")) for m in store.messages(key)
    ]


def test_json_brings_every_branch_back(store: Store) -> None:
    key = tree(store)
    copy = exchange.from_json(store, exchange.to_json(store, key))
    assert copy.id != key
    assert as_lists(store, copy.id) == as_lists(store, key)


def test_markdown_brings_the_shown_branch_back(store: Store) -> None:
    key = tree(store)
    copy = exchange.from_markdown(store, exchange.to_markdown(store, key))
    said = [[(m.role, m.content, m.reasoning) for m in store.branch(one)] for one in (key, copy.id)]
    assert said[0] == said[1] != []
    assert copy.system == store.conversation(key).system
    assert copy.title == "Two lines"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update(format="x"), "no conversation"),
        (lambda w: w.update(messages={}), "messages is"),
        (lambda w: w["messages"].append(3), r"messages\[4\] is 3"),
        (lambda w: w["messages"][1].update(parent="nobody"), r"messages\[1\].parent is 'nobody'"),
        (lambda w: w["messages"][1].update(role="system"), r"messages\[1\].role is 'system'"),
        (lambda w: w["messages"][1].update(content=None), r"messages\[1\].content is None"),
        (lambda w: w["messages"][1].update(id=w["messages"][0]["id"]), "is there twice"),
    ],
)
def test_a_file_that_is_no_conversation_adds_nothing(store: Store, change: Any, message: str) -> None:
    whole = json.loads(exchange.to_json(store, tree(store)))
    change(whole)
    with pytest.raises(InvalidRequestError, match=message):
        exchange.from_json(store, json.dumps(whole))
    for text in ("[" * 100_000, "# Notes\n\nnothing"):
        with pytest.raises(InvalidRequestError):
            (exchange.from_json if text[0] == "[" else exchange.from_markdown)(store, text)
    assert len(store.conversations()) == 1
