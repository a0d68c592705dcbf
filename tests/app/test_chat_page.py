"""The chat in a real browser, on a real engine with a tiny model."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from tests.app.conftest import CONTEXT
from tests.app.serving import ready, send, settled, tab

if TYPE_CHECKING:
    from mlxinfer.app.store import Conversation, Message
    from tests.app.serving import App

LONG = {"schema": '{"type": "string", "minLength": 4000}'}
"""A random model ends its reply after a few words, unless it may not."""


def shown_chat(app: App, page: Any) -> Conversation:
    page.wait_for_url("**chat=*")
    return app.house.store.conversation(page.evaluate("mlxinfer.key()"))


def branch(app: App, page: Any) -> list[Message]:
    return app.house.store.branch(shown_chat(app, page).id)


def open_chat(app: App, page: Any, chat: Conversation) -> None:
    page.goto(f"{app.base}/app/en/?chat={chat.id}")
    ready(page)
    page.wait_for_selector(f"#listing .open[data-id='{chat.id}'][aria-current]")


def long_chat(app: App, page: Any) -> Conversation:
    """A conversation whose replies take seconds."""
    chat = app.house.store.create("tiny", title="long", **LONG)
    open_chat(app, page, chat)
    return chat


def test_a_message_is_sent_and_its_reply_streams_and_stays(app: App, page: Any) -> None:
    page.click("#open-settings")
    page.get_by_label("Temperature").fill("0")
    send(page, "the quick brown fox")
    settled(page)
    asked, reply = branch(app, page)
    assert asked.content == "the quick brown fox"
    assert reply.status == "done"
    assert reply.extra["completion_tokens"] > 0
    figures = page.inner_text("#tail .figures")
    assert "tok/s" in figures
    assert "from the cache" in figures
    assert shown_chat(app, page).title == "the quick brown fox"
    assert shown_chat(app, page).settings["temperature"] == 0.0
    assert page.locator("#listing .open[aria-current]").inner_text() == "the quick brown fox"
    assert f"of {CONTEXT:,} tokens" in page.inner_text("#status")
    assert page.input_value("#composer textarea") == ""


def test_shift_and_enter_begin_a_line_and_a_composed_word_is_not_sent(page: Any) -> None:
    page.fill("#composer textarea", "one")
    page.press("#composer textarea", "Shift+Enter")
    page.type("#composer textarea", "two")
    assert page.input_value("#composer textarea") == "one\ntwo"
    page.eval_on_selector(
        "#composer textarea",
        """box => box.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", isComposing: true, bubbles: true}))""",
    )
    page.wait_for_timeout(300)
    assert page.locator("#tail .message-row").count() == 0


def test_a_reply_is_stopped_at_once_every_time(app: App, page: Any) -> None:
    chat = long_chat(app, page)
    waits: list[float] = []
    for _ in range(20):
        send(page, "tell me everything")
        page.wait_for_selector("#composer .stop-button")
        live = writing(app, chat)
        page.click("#composer .stop-button") if len(waits) % 2 else page.keyboard.press("Escape")
        began = time.monotonic()
        while not live.shown.over and time.monotonic() - began < 5:
            live.wait(live.shown, 0.05)
        waits.append(time.monotonic() - began)
        settled(page)
        assert app.house.store.message(live.message).status == "stopped"
    print(f"stopped after at most {max(waits):.2f} s, {sorted(waits)[10]:.2f} s in the middle")
    assert max(waits) < 0.5
    assert not app.errors


def writing(app: App, chat: Conversation) -> Any:
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        live = app.house.replies.writing(chat.id)
        if live is not None and live.shown.text:
            return live
        time.sleep(0.01)
    raise AssertionError("nothing is being written")


def test_a_page_reloaded_in_mid_reply_shows_it_growing_on(app: App, page: Any) -> None:
    chat = long_chat(app, page)
    send(page, "tell me everything")
    writing(app, chat)
    page.reload()
    ready(page)
    live = writing(app, chat)
    text = "(document.querySelector('#tail .bot-row')?.innerText.length ?? 0)"
    page.wait_for_function(f"{text} > 40")
    before = page.evaluate(text)
    page.wait_for_function(f"{text} > {before}")
    page.click("#composer .stop-button")
    settled(page)
    assert app.house.store.message(live.message).content == live.shown.text


def test_a_closed_page_leaves_the_reply_to_end_by_itself(app: App, browser: Any) -> None:
    with tab(app, browser) as page:
        chat = app.house.store.create("tiny", schema='{"type": "string", "minLength": 300, "maxLength": 320}')
        open_chat(app, page, chat)
        send(page, "go")
        live = writing(app, chat)
    while not live.shown.over:
        live.wait(live.shown, 1)
    assert app.house.store.message(live.message).status == "done"


def test_another_conversation_is_not_written_into_by_the_reply_of_the_first(app: App, page: Any) -> None:
    other = app.house.store.create("tiny", title="elsewhere")
    app.house.store.add(other.id, "user", "quiet here")
    chat = long_chat(app, page)
    send(page, "tell me everything")
    live = writing(app, chat)
    page.locator("#listing .open", has_text="elsewhere").click()
    page.wait_for_selector("#tail .user-row >> text=quiet here")
    assert not live.shown.over
    page.wait_for_function("!document.querySelector('#tail .bot-row')")
    page.wait_for_timeout(800)
    assert page.locator("#tail .bot-row").count() == 0
    live.stop()


def test_a_retry_is_a_sibling_and_the_switcher_goes_between_them(app: App, page: Any) -> None:
    send(page, "hello there")
    settled(page)
    first = branch(app, page)[-1]
    page.click("#tail [data-do=retry]")
    page.wait_for_selector("#tail .versions >> text=2 / 2")
    second = branch(app, page)[-1]
    assert second.id != first.id
    assert app.house.store.siblings(first.id) == [first.id, second.id]
    page.click("#tail .versions [aria-label='Earlier version']")
    page.wait_for_selector("#tail .versions >> text=1 / 2")
    assert branch(app, page)[-1].id == first.id
    assert page.locator("#tail .versions button").first.is_disabled()


def test_an_edited_message_is_a_branch_and_the_old_one_stays(app: App, page: Any) -> None:
    send(page, "first question")
    settled(page)
    send(page, "second question")
    page.wait_for_selector("#history .user-row >> text=first question")
    settled(page)
    before = branch(app, page)
    page.click("#history [data-do=edit]")
    page.wait_for_selector("#edit-bar >> text=editing")
    assert page.input_value("#composer textarea") == "first question"
    send(page, "another question")
    page.wait_for_selector("#tail .user-row >> text=another question")
    settled(page)
    after = branch(app, page)
    assert [one.content for one in after if one.role == "user"] == ["another question"]
    assert after[0].parent is None
    assert not page.is_visible("#edit-bar")
    page.click("#tail .user-row + .message-buttons [aria-label='Earlier version']")
    page.wait_for_selector("#tail .user-row >> text=second question")
    assert [one.id for one in branch(app, page)] == [one.id for one in before]


def test_an_edit_can_be_given_up(page: Any) -> None:
    send(page, "a question")
    settled(page)
    page.click("#tail [data-do=edit]")
    page.click("#edit-bar button")
    page.wait_for_selector("#edit-bar", state="hidden")
    assert page.input_value("#composer textarea") == ""


def test_a_reply_is_gone_on_with(app: App, page: Any) -> None:
    chat = app.house.store.create("tiny", temperature=0.0, max_tokens=12, stop=["\0"])
    open_chat(app, page, chat)
    send(page, "count")
    settled(page)
    before = branch(app, page)[-1]
    page.click("#tail [data-do=continue]")
    page.wait_for_selector("#tail [data-do=continue]", state="detached")
    settled(page)
    after = branch(app, page)[-1]
    assert after.id == before.id
    assert after.content.startswith(before.content)
    assert len(after.content) > len(before.content)


def test_the_model_is_switched_for_the_next_reply(app: App, page: Any) -> None:
    send(page, "hello")
    settled(page)
    page.click("#model input")
    page.get_by_role("option", name="other").click()
    send(page, "again")
    page.wait_for_selector("#tail .figures >> text=other")
    assert [one.extra["model"] for one in branch(app, page) if one.role == "assistant"] == ["tiny", "other"]


def test_an_invalid_setting_is_said_and_the_message_stays_in_the_composer(app: App, page: Any) -> None:
    page.click("#open-settings")
    page.fill(".code textarea", "{not json")
    send(page, "hello")
    page.wait_for_selector(".toast-body >> text=JSON schema")
    assert page.input_value("#composer textarea") == "hello"
    assert page.evaluate("mlxinfer.key()") == ""


def test_a_json_schema_forces_the_reply(app: App, page: Any) -> None:
    page.click("#open-settings")
    page.fill(
        ".code textarea",
        '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": false}',
    )
    send(page, "hello")
    settled(page)
    assert json.loads(branch(app, page)[-1].content) == {"a": 1}


def test_presets_are_kept_and_put_into_the_system_prompt(app: App, page: Any) -> None:
    page.click("#open-settings")
    page.fill("#system textarea", "Answer like a pirate.")
    page.fill("#preset input", "pirate")
    page.press("#preset input", "Enter")
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_selector(".toast-body >> text=pirate")
    page.reload()
    ready(page)
    page.click("#open-settings")
    assert page.input_value("#system textarea") == ""
    page.click("#preset input")
    page.get_by_role("option", name="pirate").click()
    page.wait_for_function("document.querySelector('#system textarea').value.includes('pirate')")
    send(page, "ahoy")
    settled(page)
    assert shown_chat(app, page).system == "Answer like a pirate."
    assert (app.house.settings.data_dir / "presets.json").stat().st_mode & 0o077 == 0
