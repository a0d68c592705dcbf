"""Light or dark: the system's until it is chosen, and then kept, though the next start has another address."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.app import serving
from tests.app.serving import ready, tab

if TYPE_CHECKING:
    from pathlib import Path


def test_the_theme_is_the_systems_until_it_is_chosen_and_then_kept(tmp_path: Path, browser: Any) -> None:
    with serving.app(tmp_path, {}) as app, tab(app, browser, color_scheme="dark") as page:
        page.wait_for_selector("body.dark")
        with page.expect_response("**/app/theme/light"):
            page.click("#theme")
        page.wait_for_selector("body:not(.dark)")
        page.reload()
        ready(page)
        page.wait_for_timeout(300)
        assert page.locator("body.dark").count() == 0
    assert json.loads((tmp_path / "data" / "theme.json").read_text()) == {"theme": "light"}
    with serving.app(tmp_path, {}) as app, tab(app, browser, color_scheme="dark") as page:
        page.wait_for_selector("body:not(.dark)")
        with page.expect_response("**/app/theme/dark"):
            page.click("#theme")
        page.wait_for_selector("body.dark")
        page.click("a.language")
        page.wait_for_selector("#new-chat >> text=新しいチャット")
        page.wait_for_selector("body.dark")
