"""The panels where they live: inside the whole page, behind its door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.app.test_compare_panel import choose, compare, over, until, value

if TYPE_CHECKING:
    from tests.app.serving import App


def test_the_list_of_models_is_drawn_with_the_memory_they_take(app: App, page: Any) -> None:
    page.get_by_role("tab", name="Models").click()
    page.locator("#models-table tr, #models-table li", has_text="other").first.wait_for()
    # The list and the bar come one after the other.
    page.locator("#models-memory .bar").wait_for()


def test_a_reply_of_a_comparison_goes_on_as_a_chat(app: App, page: Any) -> None:
    page.get_by_role("tab", name="Compare").click()
    until(lambda: value(page, "left") in ("tiny", "other"))
    choose(page, "left", "tiny")
    choose(page, "right", "other")
    before = len(app.house.store.conversations())
    compare(page, "the quick brown fox", seed=3, max_tokens=20)
    over(page)
    assert len(app.house.store.conversations()) == before
    page.locator("#compare-replies button[data-act=continue]").first.click()
    page.locator("#tail .bot-row, #history .bot-row").first.wait_for()
    assert len(app.house.store.conversations()) == before + 1
    assert page.get_by_role("tab", name="Chat").get_attribute("aria-selected") == "true"
    assert "the quick brown fox" in page.locator("#history, #tail").all_inner_texts()[-1]


def test_what_is_sent_as_soon_as_it_can_be_typed_is_shown_with_its_reply(app: App, browser: Any) -> None:
    from tests.app.serving import send, settled, tab

    with tab(app, browser) as page:
        send(page, "at once")
        page.wait_for_selector("#composer .stop-button, #tail .foot [data-do=retry]")
        page.evaluate("document.querySelector('#composer .stop-button')?.click()")
        settled(page)
        assert "at once" in page.locator("#tail").inner_text()
        assert not page.locator("#hello").is_visible()


def test_what_is_typed_as_soon_as_it_can_be_is_not_drawn_over_by_the_page_that_loads(app: App, browser: Any) -> None:
    """The page asks for its conversation and settings when it is drawn already; here that takes its time."""
    from tests.app.serving import ready, tab

    chat = app.house.store.create("tiny", title="kept", top_p=0.5)
    with tab(app, browser) as page:
        held: list[Any] = []
        page.route("**/queue/join*", lambda route: held.append(route))
        with page.expect_request("**/queue/join*"):
            page.goto(f"{app.base}/app/en/?chat={chat.id}")
        page.click("#open-settings")
        field = page.locator("#set-temperature :is(input, textarea)")
        field.wait_for()
        inputs = "#composer textarea, #search input, #model input, #settings :is(input, textarea)"
        assert page.locator(inputs).count() > 10
        assert page.locator(inputs).evaluate_all("all => all.every(one => one.disabled || one.readOnly)")
        assert held
        for route in held:
            route.continue_()
        page.unroute("**/queue/join*")
        field.click()  # waits until it can be
        field.press_sequentially("0.3")
        ready(page)
        page.wait_for_function("document.querySelector('#set-top_p :is(input, textarea)').value === '0.5'")
        until(lambda: app.house.store.conversation(chat.id).settings.get("temperature") == 0.3)
        assert field.input_value() == "0.3"
        assert app.house.store.conversation(chat.id).settings == {"top_p": 0.5, "temperature": 0.3}
        field.fill("")
        field.press("Tab")
        until(lambda: app.house.store.conversation(chat.id).settings == {"top_p": 0.5})


def test_presets_that_are_damaged_keep_nobody_from_the_chat(app: App, browser: Any) -> None:
    from tests.app.serving import send, settled, tab

    file = app.house.settings.data_dir / "presets.json"
    file.write_text("{")
    try:
        with tab(app, browser) as page:
            page.get_by_text("presets.json").first.wait_for()
            send(page, "all the same")
            page.wait_for_selector("#composer .stop-button, #tail .foot [data-do=retry]")
            page.evaluate("document.querySelector('#composer .stop-button')?.click()")
            settled(page)
    finally:
        file.unlink()
