"""The app on a thread of the test's process, and a browser that looks at it."""

from __future__ import annotations

import contextlib
import shutil
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mlxinfer.app import serving
from mlxinfer.config import Settings
from mlxinfer.pool import Machine, ModelPool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from mlxinfer.app.page.context import House

STARTS_S = 120
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class App:
    """A running app."""

    link: str
    house: House
    errors: list[str] = field(default_factory=list)
    """What threads died of."""

    @property
    def base(self) -> str:
        parts = urlsplit(self.link)
        return f"{parts.scheme}://{parts.netloc}"


@contextlib.contextmanager
def app(home: Path, models: Mapping[str, str], *, lang: str | None = None, **changes: Any) -> Iterator[App]:
    """The app on `models`, with data and cache below `home`."""
    settings = Settings(cache_dir=home / "cache", data_dir=home / "data", **changes)
    pool = ModelPool(models, Machine(settings))
    link, failed, until, ready = [""], [], threading.Event(), threading.Event()
    before = threading.excepthook
    threading.excepthook = lambda args: failed.append(repr(args.exc_value))

    def started(url: str) -> None:
        link[0] = url
        ready.set()

    try:
        with serving.opened(pool, settings) as house:
            thread = threading.Thread(
                target=serving.serve_house,
                args=(house,),
                kwargs={"port": 0, "lang": lang, "on_started": started, "until": until},
            )
            thread.start()
            try:
                assert ready.wait(STARTS_S), failed
                yield App(link[0], house, failed)
            finally:
                until.set()
                thread.join(30)
    finally:
        threading.excepthook = before
        pool.close()
    assert not thread.is_alive()
    assert not failed


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextlib.contextmanager
def tab(app: App, browser: Any, *, width: int = 1280, locale: str = "en-US", **more: Any) -> Iterator[Any]:
    """A page of its own, let in by the link. Asserts at the end that it asked no other machine and nothing failed."""
    context = browser.new_context(viewport={"width": width, "height": 844}, locale=locale, **more)
    context.set_default_timeout(120_000)
    opened = context.new_page()
    foreign, broken = list[str](), list[str]()
    opened.on("request", lambda request: _note_foreign(app, request.url, foreign))
    opened.on("pageerror", lambda error: broken.append(str(error)))
    opened.goto(app.link)
    ready(opened)
    try:
        yield opened
    finally:
        context.close()
    assert not foreign
    assert not broken
    assert not app.errors


def _note_foreign(app: App, url: str, foreign: list[str]) -> None:
    if not url.startswith((app.base, "data:", "blob:")):
        foreign.append(url)


def ready(page: Any) -> None:
    """The page has loaded, and its own script has named its controls."""
    page.wait_for_selector("#composer textarea[aria-label]:not([disabled])")
    page.wait_for_selector("#listing ul, #listing .nothing")


def brief(page: Any) -> None:
    """Keep the replies of the new conversation short: a random model may go on to the end of its context."""
    page.wait_for_selector("#set-temperature [placeholder='0.7']", state="attached")  # the page has loaded
    page.click("#open-settings")
    page.fill("#set-max_tokens :is(input, textarea)", "40")
    page.click("#open-settings")


def send(page: Any, text: str) -> None:
    page.fill("#composer textarea", text)
    page.press("#composer textarea", "Enter")


def settled(page: Any) -> None:
    """A reply is over, and its foot there."""
    page.wait_for_selector("#tail .bot-row + .message-buttons .foot [data-do=retry]")
