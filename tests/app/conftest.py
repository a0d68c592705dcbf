"""One app and one browser for each file of tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import tiny
from tests.app import serving, windowing

CONTEXT = 16384
"""Tokens: room for replies that don't end by themselves."""

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.app.serving import App


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gradio and Playwright leave event loops to the garbage collector; that isn't ours to mend."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """The app on two tiny models, which are loaded: "tiny" and "other"."""
    home = tmp_path_factory.mktemp("home")
    models = {
        name: str(tiny.write_folder(home / name, seed=seed, max_position_embeddings=CONTEXT))
        for seed, name in enumerate(("tiny", "other"))
    }
    with serving.app(home, models, model="tiny") as running:
        for name in models:
            with running.house.pool.lease(name):
                pass
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if serving.CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with serving.browser() as opened:
        yield opened


@pytest.fixture
def page(app: App, browser: Any) -> Iterator[Any]:
    """A tab on a new conversation, in English. Nothing may be asked of another machine, and no script may fail."""
    with serving.tab(app, browser) as opened:
        serving.brief(opened)
        yield opened


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    with windowing.screen() as name:
        yield name


@pytest.fixture
def surroundings(tmp_path: Path, display: str) -> dict[str, str]:
    return windowing.environment(tmp_path, display)
