"""How the page looks and reads: themes, languages, narrow screens, keys, what a reply may do to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from axe_core_python.sync_playwright import Axe

from tests.app.serving import brief, ready, tab

if TYPE_CHECKING:
    from tests.app.serving import App

HOSTILE = (
    "Text <img src=http://evil.example/a.png onerror=alert(1)> ![x](http://evil.example/b.png) "
    "<script>alert(2)</script>\n\n"
    "<iframe src='http://evil.example/c'></iframe> <style>body{background:url(http://evil.example/d)}</style>\n\n"
    "[bad](javascript:alert(3)) [good](http://good.example/) ![r][ref] <svg onload=alert(4)>\n\n"
    "[ref]: http://evil.example/e.png\n\n$\\href{javascript:alert(5)}{x}$ `<b>code</b>` $a<b$\n\n<form action=http://evil.example><input></form>"
)


def hostile_chat(app: App) -> str:
    store = app.house.store
    chat = store.create("tiny", title="<img src=http://evil.example/t.png> {{7*7}} ${8*8}")
    store.add(chat.id, "user", HOSTILE)
    store.add(
        chat.id,
        "assistant",
        HOSTILE,
        reasoning=HOSTILE,
        tool_calls=[["<b>x</b>", '{"a": "~~~\\n<img src=http://evil.example/>"}']],
    )
    return chat.id


def test_a_hostile_reply_is_shown_as_text_and_asks_nobody(app: App, page: Any) -> None:
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.goto(f"{app.base}/app/en/?chat={hostile_chat(app)}")
    ready(page)
    page.wait_for_selector("#tail .bot-row a >> text=good")
    page.locator("#tail .thought-group .title").first.click()
    page.wait_for_timeout(500)
    assert page.locator("#tail .md :is(img, script, iframe, style, form, input, svg[onload])").count() == 0
    shown = page.inner_text("#tail")
    assert "<script>alert(2)</script>" in shown.replace("\u2060", "")
    assert "<b>code</b>" in shown
    assert page.locator("#tail a[href^='javascript']").count() == 0
    good = page.locator("#tail .bot-row a", has_text="good").first
    assert good.get_attribute("target") == "_blank"
    assert "noopener" in (good.get_attribute("rel") or "")
    assert page.locator("#listing img").count() == 0
    assert "{{7*7}} ${8*8}" in page.inner_text("#listing")
    assert not dialogs


def test_prices_stay_prices_beside_formulas(app: App, page: Any) -> None:
    chat = app.house.store.create("tiny", title="prices")
    app.house.store.add(chat.id, "user", "It costs $5 and $6")
    lines = [
        "It costs $5 and $6, or $7-$8.", "Inline $x^2$ for $9 and $y_1$.", r"Parenthesised \(z^3\).", "$$E = mc^2$$",
        "\\[\nF = ma\n\\]", "Code `$a$ $b$` and ```$c$```.", r"Escaped \$1 and \$2.",
    ]  # fmt: skip
    app.house.store.add(chat.id, "assistant", "\n\n".join(lines))
    page.goto(f"{app.base}/app/en/?chat={chat.id}")
    ready(page)
    page.wait_for_selector("#tail .bot-row .katex-display")
    formulas = page.locator("#tail .katex annotation").all_text_contents()
    assert [text.strip() for text in formulas] == ["x^2", "y_1", "z^3", "E = mc^2", "F = ma"]
    assert page.locator("#tail .katex-display").count() == 2
    shown = page.inner_text("#tail").replace("\u2060", "")
    for text in (
        "It costs $5 and $6\n",
        "It costs $5 and $6, or $7-$8.",
        "for $9 and",
        "$a$ $b$",
        "Escaped $1 and $2.",
    ):
        assert text in shown
    assert page.locator("#tail .katex-error").count() == 0


def test_what_is_copied_is_what_was_written(app: App, browser: Any) -> None:
    with tab(app, browser, permissions=["clipboard-read", "clipboard-write"]) as page:
        chat = app.house.store.create("tiny", title="copy")
        app.house.store.add(chat.id, "user", "say <b>it</b>")
        app.house.store.add(chat.id, "assistant", "as <b>said</b> ![x](y) $z$")
        page.goto(f"{app.base}/app/en/?chat={chat.id}")
        ready(page)
        page.locator("#tail .bot-row + .message-buttons [aria-label='Copy message']").click()
        page.wait_for_function("navigator.clipboard.readText().then(text => text.includes('said'))")
        assert page.evaluate("navigator.clipboard.readText()") == "as <b>said</b> ![x](y) $z$"


def test_the_page_speaks_japanese_to_a_japanese_browser(app: App, browser: Any) -> None:
    with tab(app, browser, locale="ja-JP") as page:
        assert page.url.startswith(f"{app.base}/app/ja/")
        assert "新しいチャット" in page.inner_text("#new-chat")
        brief(page)
        page.fill("#composer textarea", "日本の首都は")
        page.press("#composer textarea", "Enter")
        page.wait_for_selector("#tail .figures >> text=キャッシュ")
        assert "トークン" in page.inner_text("#status")
        page.click("a.language")
        page.wait_for_selector("#new-chat >> text=New chat")
        page.wait_for_selector("#tail .user-row >> text=日本の首都は")


def test_a_narrow_screen_shows_the_chat_and_folds_the_list(app: App, browser: Any) -> None:
    with tab(app, browser, width=390) as page:
        page.wait_for_selector("#side:not(.open)")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        brief(page)
        page.fill("#composer textarea", "hello")
        page.press("#composer textarea", "Enter")
        page.wait_for_selector("#tail .figures")
        box = page.locator("#composer").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        page.click("#side .toggle-button")
        page.wait_for_selector("#side.open #listing .open")
        page.click("#open-settings", force=True)


def test_right_to_left_text_reads_from_the_right(app: App, page: Any) -> None:
    chat = app.house.store.create("tiny", title="rtl")
    app.house.store.add(chat.id, "user", "hi")
    app.house.store.add(chat.id, "assistant", "مرحبا بك")
    page.goto(f"{app.base}/app/en/?chat={chat.id}")
    ready(page)
    page.wait_for_selector("#tail .bot-row p")
    side = """() => { const p = document.querySelector('#tail .bot-row p'); const range = document.createRange();
        range.selectNodeContents(p); const text = range.getBoundingClientRect(), box = p.getBoundingClientRect();
        return [text.left - box.left, box.right - text.right, getComputedStyle(p).unicodeBidi]; }"""
    left, right, bidi = page.evaluate(side)
    assert bidi == "plaintext"
    assert right <= left


def test_keys_begin_a_chat_and_find_the_search(page: Any) -> None:
    page.fill("#composer textarea", "one")
    page.press("#composer textarea", "Enter")
    page.wait_for_selector("#tail .figures")
    page.keyboard.press("Control+Shift+O")
    page.wait_for_selector("#hello", state="visible")
    page.wait_for_url(lambda url: "chat=" not in url)
    assert page.evaluate("document.activeElement.closest('#composer') !== null")
    page.keyboard.press("Control+k")
    page.wait_for_function("document.activeElement.closest('#search')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(app: App, browser: Any, scheme: str) -> None:
    with tab(app, browser, color_scheme=scheme) as page:
        page.goto(f"{app.base}/app/en/?chat={hostile_chat(app)}")
        ready(page)
        page.wait_for_selector("#tail .foot")
        page.click("#open-settings")
        page.wait_for_timeout(500)
        found = Axe().run(page)["violations"]
        serious = [
            (one["id"], [node["html"][:200] for node in one["nodes"]][:4])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert not serious
