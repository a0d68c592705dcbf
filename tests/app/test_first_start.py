"""The page of someone who has no model yet."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from mlxinfer.app import pulls
from mlxinfer.errors import OfflineError
from tests.app import serving

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_model_that_is_fetched_is_announced_and_what_came_to_nothing_is_offered_again(
    tmp_path: Path, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()

    def resolve(*_: Any, **__: Any) -> None:
        ends.wait(100)
        raise OfflineError("no <i>network</i> here")

    monkeypatch.setattr(pulls.zoo, "resolve", resolve)
    with serving.app(tmp_path, {}) as app, serving.tab(app, browser) as page:
        page.click("#demo")
        page.locator("#hello", has_text="on its way").wait_for()
        page.locator("#demo").wait_for(state="hidden")
        page.locator("#status", has_text="Fetching smollm2-135m").wait_for()
        page.reload()
        serving.ready(page)
        page.locator("#hello", has_text="on its way").wait_for()
        assert not page.locator("#demo").is_visible()
        ends.set()
        page.locator("#demo").wait_for()
        page.locator("#hello", has_text="No model yet").wait_for()
        # Said for as long as it is so, whichever event finds it out.
        page.locator("#hello", has_text="smollm2-135m could not be fetched: no").wait_for()
        page.reload()
        page.locator("#hello", has_text="smollm2-135m could not be fetched: no").wait_for()
        assert page.locator("#hello i").count() == 0
