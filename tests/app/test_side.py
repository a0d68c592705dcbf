"""The list of conversations, files that come and go, in a real browser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.app.conftest import CONTEXT
from tests.app.serving import ready, send, settled

if TYPE_CHECKING:
    from pathlib import Path

    from mlxinfer.app.store import Conversation
    from tests.app.serving import App

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 32


def chat_of(app: App, title: str, *said: str) -> Conversation:
    chat = app.house.store.create("tiny", title=title)
    for number, text in enumerate(said):
        app.house.store.add(chat.id, "assistant" if number % 2 else "user", text)
    return chat


def again(page: Any) -> None:
    page.reload()
    ready(page)


def item(page: Any, title: str) -> Any:
    return page.locator("#listing li", has_text=title)


def menu(page: Any, title: str, action: str) -> None:
    item(page, title).first.locator("summary").click()
    item(page, title).first.get_by_text(action, exact=True).click()


def test_search_finds_messages_and_opens_the_branch_they_are_in(app: App, page: Any) -> None:
    chat = chat_of(app, "plants", "what is a zucchini?", "a summer squash")
    chat_of(app, "stars", "what is a nova?", "an exploding star")
    again(page)
    page.keyboard.press("Control+k")
    page.wait_for_function("document.activeElement.closest('#search')")
    page.keyboard.type("squash")
    page.wait_for_selector("#listing small >> text=summer squash")
    assert page.locator("#listing li").count() == 1
    page.click("#listing .open")
    page.wait_for_selector("#tail >> text=a summer squash")
    assert page.evaluate("mlxinfer.key()") == chat.id
    page.fill("#search input", "nothing like it")
    page.wait_for_selector("#listing .nothing")


def test_a_conversation_is_renamed_in_its_place(app: App, page: Any) -> None:
    chat = chat_of(app, "old name", "hi")
    again(page)
    menu(page, "old name", "Rename")
    page.fill("#listing .rename", "new <b>name</b>")
    page.press("#listing .rename", "Enter")
    page.wait_for_selector("#listing .open >> text=new <b>name</b>")
    assert app.house.store.conversation(chat.id).title == "new <b>name</b>"


def test_a_pinned_conversation_stands_first(app: App, page: Any) -> None:
    chat = chat_of(app, "to be pinned", "hi")
    chat_of(app, "newer", "hi")
    again(page)
    menu(page, "to be pinned", "Pin")
    page.wait_for_selector("#listing .pin")
    assert "to be pinned" in page.locator("#listing li").first.inner_text()
    assert app.house.store.conversation(chat.id).pinned
    menu(page, "to be pinned", "Unpin")
    page.wait_for_selector("#listing .pin", state="detached")


def test_a_deleted_conversation_comes_back_by_undo(app: App, page: Any) -> None:
    chat = chat_of(app, "precious", "keep this")
    again(page)
    page.locator("#listing .open", has_text="precious").click()
    page.wait_for_selector("#tail >> text=keep this")
    menu(page, "precious", "Delete")
    page.wait_for_selector("#listing .undo >> text=precious")
    page.wait_for_selector("#hello", state="visible")
    assert app.house.store.conversation(chat.id).deleted
    page.get_by_role("button", name="Undo").click()
    page.wait_for_selector("#tail >> text=keep this")
    assert not app.house.store.conversation(chat.id).deleted


def test_exported_files_are_imported_again(app: App, page: Any, tmp_path: Path) -> None:
    chat_of(app, "to: be/exported", "a question", "an answer <b>bold</b>")
    again(page)
    for action, ending in (("Export as JSON", "json"), ("Export as Markdown", "md")):
        with page.expect_download() as waited:
            menu(page, "to: be/exported", action)
        assert waited.value.suggested_filename == f"to_ be_exported.{ending}"
        file = tmp_path / f"chat.{ending}"
        waited.value.save_as(file)
        before = len(app.house.store.conversations())
        page.set_input_files("#side input[type=file]", file)
        page.wait_for_selector(".toast-body >> text=imported")
        page.wait_for_selector("#tail >> text=an answer")
        key = page.evaluate("mlxinfer.key()")
        assert app.house.store.branch(key)[-1].content == "an answer <b>bold</b>"
        assert len(app.house.store.conversations()) == before + 1
        page.locator(".toast-close").first.click()
        page.wait_for_selector(".toast-body", state="detached")
    assert not list(app.house.uploads.rglob("chat.*"))


def test_a_file_that_is_no_conversation_is_refused_and_adds_nothing(app: App, page: Any, tmp_path: Path) -> None:
    before = len(app.house.store.conversations())
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"format": "other"}))
    page.set_input_files("#side input[type=file]", file)
    page.wait_for_selector(".toast-body >> text=no conversation")
    assert len(app.house.store.conversations()) == before


def attach(page: Any, *files: Any) -> None:
    page.set_input_files("#composer input[type=file]", list(files))
    page.wait_for_selector("#composer .thumbnail-item")


def test_an_attached_file_is_read_counted_and_kept_with_the_message(app: App, page: Any, tmp_path: Path) -> None:
    file = tmp_path / "notes.py"
    file.write_text("print('the quick brown fox')\n")
    attach(page, file)
    send(page, "what does it print?")
    settled(page)
    assert "notes.py" in page.inner_text("#tail .file")
    asked = app.house.store.branch(page.evaluate("mlxinfer.key()"))[0]
    (kept,) = asked.extra["attachments"]
    assert kept["text"] == "print('the quick brown fox')\n"
    assert kept["tokens"] > 0
    assert f"{kept['tokens']} tokens" in page.inner_text("#tail .file")
    assert not list(app.house.uploads.rglob("notes.py"))


def test_a_file_beyond_the_context_is_refused_with_both_numbers_and_nothing_is_lost(
    app: App, page: Any, tmp_path: Path
) -> None:
    file = tmp_path / "long.txt"
    file.write_text("capital of france " * 20_000)
    attach(page, file)
    before = len(app.house.store.conversations())
    send(page, "sum it up")
    page.wait_for_selector(".toast-body >> text=Too long for tiny")
    said = page.inner_text(".toast-body")
    assert f"{CONTEXT:,}" in said
    assert len(app.house.store.conversations()) == before
    assert page.input_value("#composer textarea") == "sum it up"
    assert page.locator("#composer .thumbnail-item").count() == 1


def test_an_image_is_refused_clearly(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    file.write_bytes(PNG)
    page.set_input_files("#composer input[type=file]", file)
    page.wait_for_selector(".toast-body >> text=no model here reads images")
    assert "cat.png" in page.inner_text(".toast-body")
    assert page.locator("#composer .thumbnail-item").count() == 0
