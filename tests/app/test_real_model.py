"""The demo model in the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.app import serving

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.model


def test_the_demo_model_answers_in_the_page_and_remembers(demo_gguf: Path, browser: Any, tmp_path: Path) -> None:
    with (
        serving.app(tmp_path, {"smollm2-135m": str(demo_gguf)}, model="smollm2-135m") as app,
        serving.tab(app, browser) as page,
    ):
        page.click("#open-settings")
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Longest reply").fill("40")
        serving.send(page, "What is the capital of France?")
        page.wait_for_selector("#tail .bot-row >> text=Paris", timeout=120_000)
        serving.settled(page)
        assert page.get_by_label("Top p").get_attribute("placeholder") not in ("", "default")
        serving.send(page, "And of Italy?")
        page.wait_for_selector("#history .user-row >> text=France")
        serving.settled(page)
        reply = app.house.store.branch(page.evaluate("mlxinfer.key()"))[-1]
        assert reply.extra["cached_tokens"] > 20
        assert reply.extra["completion_tokens"] <= 40
