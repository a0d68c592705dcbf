"""What the page costs: the server's time for an update of a growing reply, and the first page."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mlxinfer.app.replies import Live, Shown
from tests.app.serving import ready

if TYPE_CHECKING:
    from tests.app.serving import App

MESSAGES, UPDATES, PER_S = 200, 100, 20
MOST_S = 0.02
"""Of the server's CPU time for an update. 5 ms are wanted and fewer measured; the rest is for slow machines."""


def test_an_update_costs_little_below_a_long_conversation(app: App, page: Any) -> None:
    store, replies = app.house.store, app.house.replies
    chat = store.create("tiny", title="long")
    for number in range(MESSAGES):
        store.add(chat.id, "assistant" if number % 2 else "user", f"message {number} with *some* text " * 10)
    store.add(chat.id, "user", "and now?")
    reply = store.add(chat.id, "assistant", "", status="streaming", model="tiny")
    # A reply that nobody computes: what is measured is the page.
    live = Live(reply, Shown(stage="writing"))
    replies._live[reply.id] = live
    page.goto(f"{app.base}/app/en/?chat={chat.id}")
    ready(page)
    page.wait_for_selector("#history .bot-row >> text=message 199")
    spent = _spent(live, "word ", UPDATES) - _spent(live, "", UPDATES)
    page.wait_for_function("document.querySelector('#tail .bot-row').innerText.includes('word word')")
    del replies._live[reply.id]
    live.show(stage="done")
    store.write(reply.id, live.shown.text, status="done")
    print(f"{1000 * spent / UPDATES:.2f} ms of CPU for an update below {MESSAGES} messages")
    assert spent / UPDATES < MOST_S


def _spent(live: Live, word: str, times: int) -> float:
    """CPU seconds of this process, in which the server is, while a reply grows by a word at a time, or doesn't."""
    began = time.process_time()
    for _ in range(times):
        if word:
            live.show(text=live.shown.text + word)
        time.sleep(1 / PER_S)
    return time.process_time() - began


def test_the_first_page_is_usable_soon(app: App, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    began = time.monotonic()
    page.goto(app.link)
    ready(page)
    page.fill("#composer textarea", "x")
    print(f"usable after {time.monotonic() - began:.2f} s")
    context.close()
