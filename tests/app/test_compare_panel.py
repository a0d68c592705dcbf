"""The panel "Compare" in a real browser, on a tiny model and it with a real adapter; both panels' looks and labels."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from axe_core_python.sync_playwright import Axe

from mlxinfer.app.comparisons import same_until
from tests import tiny
from tests.adapters import write_adapter
from tests.app.host import GRADIO_LEAKS, Host, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = GRADIO_LEAKS
SHOTS = os.environ.get("PANEL_SHOTS", "")
"""A folder for pictures of the panels, for whoever wants to look at them."""
PROMPT = "what is the capital of france?"


def models(folder: Path) -> dict[str, str]:
    return {name: str(tiny.write_folder(folder / name, seed=seed)) for seed, name in enumerate(("base", "other"))}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("compare")
    made = serve(folder, models(folder))
    adapter = write_adapter(folder / "adapter", folder / "base", seed=1, size=0.05)
    made.context.library.add_adapter("base", "mine", str(adapter))
    yield made
    made.close()


def opened(host: Host, browser: Any, tab: str = "Compare", **options: Any) -> Any:
    page = browser.new_page(**({"viewport": {"width": 1280, "height": 900}} | options))
    page.set_default_timeout(90_000)
    page.goto(host.url)
    page.get_by_role("tab", name=tab).click()
    return page


@pytest.fixture
def page(host: Host, browser: Any) -> Iterator[Any]:
    made = opened(host, browser)
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    until(lambda: value(made, "left") == "base")
    yield made
    made.close()
    assert problems == []


def until(true: Callable[[], object], timeout: float = 90.0) -> None:
    ends = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < ends, "it did not come true"
        time.sleep(0.02)


def value(page: Any, side: str) -> str:
    return page.locator(f"#compare-{side} input").input_value()


def compare(page: Any, prompt: str = PROMPT, **settings: object) -> None:
    if settings:
        accordion = page.locator("#compare-sampling button").first
        if not page.locator("#compare-seed input").is_visible():
            accordion.click()
        for name, setting in settings.items():
            until(partial(filled, page, name, setting))
    page.locator("#compare-prompt textarea").fill(prompt)
    page.locator("#compare-prompt textarea").press("Enter")


def filled(page: Any, name: str, setting: object) -> bool:
    """Fill in a number. What is typed in the first milliseconds after the accordion opens, Gradio sets back."""
    field = page.locator(f"#compare-{name} input")
    if field.input_value() != str(setting):
        field.fill(str(setting))
    time.sleep(0.1)
    return field.input_value() == str(setting)


def choose(page: Any, side: str, name: str) -> None:
    page.locator(f"#compare-{side} input").click()
    # The other list may be closing still.
    page.get_by_role("option", name=name, exact=True).last.click()
    until(lambda: value(page, side) == name)


def over(page: Any) -> None:
    page.locator("#compare-replies .comparison:not([data-running])").wait_for()


def answered(page: Any, prompt: str = PROMPT, **settings: object) -> None:
    """Compare, and wait for the end of it; an earlier comparison may still be shown."""
    shown = page.locator("#compare-replies [data-key]")

    def key() -> str:
        return shown.get_attribute("data-key") if shown.count() else ""

    before = key()
    compare(page, prompt, **settings)
    until(lambda: key() != before)
    over(page)


def texts(page: Any) -> list[str]:
    return page.locator("#compare-replies section > .text").all_text_contents()


def test_base_and_adapter_answer_side_by_side_with_their_figures_and_the_first_difference_marked(
    page: Any, host: Host
) -> None:
    assert (value(page, "left"), value(page, "right")) == ("base", "base:mine")
    before = len(host.context.store.conversations())
    answered(page, temperature=0, max_tokens=60)
    left, right = texts(page)
    assert left != right
    marks = page.locator("#compare-replies mark")
    assert marks.count() == 2
    first, second = marks.all_text_contents()
    same = same_until(left, right)
    assert left[same:].startswith(first)
    assert right[same:].startswith(second)
    figures = page.locator("#compare-replies .figures").all_inner_texts()
    assert all("tok/s" in one and "first token after" in one and "tokens" in one for one in figures)
    assert len(host.context.store.conversations()) == before


def test_one_model_in_both_columns_writes_one_text(page: Any) -> None:
    choose(page, "right", "base")
    compare(page, temperature=1, seed=7, max_tokens=20)
    page.get_by_text("Both replies are the same text").wait_for()
    left, right = texts(page)
    assert left == right != ""
    assert page.locator("#compare-replies mark").count() == 0


@pytest.mark.model
def test_both_stream_at_once_survive_a_reload_and_stop(page: Any, host: Host, demo_gguf: Path) -> None:
    host.context.pool.register("smollm2", str(demo_gguf))
    until(lambda: "smollm2" in host.context.library.models())
    page.reload()
    page.get_by_role("tab", name="Compare").click()
    until(lambda: value(page, "left") == "base")
    for side in ("left", "right"):
        choose(page, side, "smollm2")
    compare(page, "Tell me a very long story about a river.", temperature=1, max_tokens=1500)
    until(lambda: page.locator("#compare-replies .stage.writing").count() == 2, 120)
    before = [len(text) for text in texts(page)]
    until(lambda: all(len(text) > was for text, was in zip(texts(page), before, strict=True)))
    page.reload()
    page.get_by_role("tab", name="Compare").click()
    page.locator("#compare-replies .comparison").wait_for()
    page.locator("#compare-stop").click()
    over(page)
    page.locator("#compare-stop").wait_for(state="hidden")
    assert page.locator("#compare-replies .stage").all_inner_texts() == ["stopped", "stopped"]
    assert all(texts(page))
    page.locator("#compare-run:not([disabled])").wait_for()


def test_a_reply_is_gone_on_with_as_a_chat_and_votes_are_counted(page: Any, host: Host) -> None:
    answered(page, "name a fruit", temperature=0, max_tokens=5)
    page.locator("#compare-replies section h3", has_text="base:mine").wait_for()
    page.get_by_role("button", name="This one is better: base:mine").click()
    page.get_by_text("Votes: base 0 : 1 base:mine").wait_for()
    page.get_by_role("button", name="Continue this one as a chat: base:mine").click()
    page.get_by_text("It is among your conversations now: “name a fruit”").wait_for()
    chat = next(one for one in host.context.store.conversations() if one.title == "name a fruit")
    assert chat.model == "base:mine"
    assert page.locator("#opened textarea, #opened input").first.input_value() == chat.id
    assert [one.role for one in host.context.store.branch(chat.id)] == ["user", "assistant"]


def test_kept_comparisons_are_among_the_conversations(page: Any, host: Host) -> None:
    page.locator("#compare-keep input").check()
    answered(page, "name a city", temperature=0, max_tokens=5)
    titles = {one.title for one in host.context.store.conversations()}
    assert {"name a city (base)", "name a city (base:mine)"} <= titles


def test_what_cannot_be_compared_is_said(page: Any) -> None:
    compare(page, "   ")
    page.locator("#compare-notice [role=alert]", has_text="the prompt is empty").wait_for()
    compare(page, "hi", temperature=200)
    said = page.locator("#compare-notice [role=alert]")

    def told() -> bool:
        # The first answer may come while the second question is typed: then Enter is for nobody. Each one clears what
        # is said, so it is given time.
        page.locator("#compare-prompt textarea").press("Enter")
        ends = time.monotonic() + 5
        while time.monotonic() < ends:
            if any("temperature is 200" in text for text in said.all_inner_texts()):
                return True
            time.sleep(0.05)
        return False

    until(told)


@pytest.mark.parametrize("dark", [False, True])
def test_no_serious_fault_of_accessibility_in_either_panel(dark: bool, host: Host, browser: Any) -> None:
    axe = Axe()
    page = opened(host, browser, color_scheme="dark" if dark else "light")
    answered(page, temperature=0, max_tokens=30)
    faults: list[str] = []
    for tab in ("Compare", "Models"):
        page.get_by_role("tab", name=tab).click()
        if tab == "Models":
            page.locator("#models-table [data-name=base]").click()
            page.locator("#models-detail h3").wait_for()
            page.locator("#models-adapters").wait_for()
        picture(page, f"{tab.lower()}-{'dark' if dark else 'light'}-1280")
        found = axe.run(page, context={"include": [["[role=tabpanel]"]]})["violations"]
        faults += [
            f"{tab}: {one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0].get('failureSummary', '')[:300]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
    page.close()
    assert faults == []


def test_a_narrow_window_shows_everything_without_scrolling_sideways(host: Host, browser: Any) -> None:
    page = opened(host, browser, viewport={"width": 390, "height": 844})
    answered(page, temperature=0, max_tokens=30)
    for tab in ("Compare", "Models"):
        page.get_by_role("tab", name=tab).click()
        if tab == "Models":
            page.locator("#models-table [data-name=base]").click()
            page.locator("#models-detail h3").wait_for()
        picture(page, f"{tab.lower()}-light-390")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


def test_the_panels_speak_japanese(tmp_path: Path, browser: Any) -> None:
    host = serve(tmp_path, models(tmp_path), "ja")
    try:
        page = opened(host, browser, "Models")
        page.locator("#models-table [data-name=base]").click()
        page.get_by_text("このマシンで動作します").wait_for()
        page.get_by_role("button", name="読み込む").wait_for()
        picture(page, "models-ja-1280")
        page.get_by_role("tab", name="Compare").click()
        answered(page, temperature=0, max_tokens=20)
        page.get_by_role("button", name="こちらが良い: base").wait_for()
        picture(page, "compare-ja-1280")
        page.close()
    finally:
        host.close()


def picture(page: Any, name: str) -> None:
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/{name}.png", full_page=True)
