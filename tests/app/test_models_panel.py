"""The panel "Models" in a real browser: tiny models, a real adapter, a hub on 127.0.0.1 whose connection breaks."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests import tiny
from tests.adapters import write_adapter
from tests.app.host import GRADIO_LEAKS, Host, serve
from tests.unit.zoo.fake_hub import FakeHub
from tests.unit.zoo.models import model_repo, safetensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = GRADIO_LEAKS
BIG = safetensors(weight=(2048, 1024))
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("panel")


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[FakeHub]:
    """Also the only home that these tests know."""
    server = FakeHub()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_TOKEN", "OLLAMA_MODELS",
                     "LLAMA_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # fmt: skip
            patch.delenv(name, raising=False)
        patch.setenv("HOME", str(folder / "home"))
        patch.setenv("HF_HOME", str(folder / "home" / "hf"))
        patch.setenv("HF_ENDPOINT", server.url)
        patch.setattr("mlxinfer.zoo.blobs.BACKOFF_S", 0.01)
        yield server
    server.close()


@pytest.fixture(scope="module")
def host(folder: Path, hub: FakeHub) -> Iterator[Host]:
    base = tiny.write_folder(folder / "base")
    write_adapter(folder / "adapter", base, seed=1)
    made = serve(folder, {"base": str(base), EVIL: str(tiny.write_folder(folder / "second", seed=1))})
    yield made
    made.close()


@pytest.fixture
def page(host: Host, browser: Any) -> Iterator[Any]:
    made = browser.new_page(viewport={"width": 1280, "height": 900})
    made.set_default_timeout(90_000)
    requests: list[str] = []
    problems: list[str] = []
    made.on("request", lambda request: requests.append(request.url))
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    made.goto(host.url)
    made.get_by_role("tab", name="Models").click()
    made.wait_for_selector("#models-table tbody tr")
    yield made
    outside = [url for url in requests if not url.startswith((host.url, "data:", "blob:"))]
    made.close()
    assert outside == []
    assert problems == []


def row(page: Any, name: str) -> Any:
    return page.locator("#models-table tr", has=page.locator(f'[data-name="{name}"]'))


def choose(page: Any, name: str) -> None:
    page.locator(f'#models-table [data-name="{name}"]').click()
    page.locator("#models-detail h3", has_text=name).wait_for()


def state(page: Any, name: str, text: str) -> None:
    row(page, name).locator("td.state", has_text=text).wait_for()


def until(true: Callable[[], object], timeout: float = 90.0) -> None:
    ends = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < ends, "it did not come true"
        time.sleep(0.02)


def test_a_verdict_with_bytes_context_and_speed_stands_there_before_anything_is_loaded(page: Any) -> None:
    assert re.search(r"yes\s*[\d,.]+ tok/s", row(page, "base").locator("td.fit").inner_text())
    assert "no" in page.locator("#models-table td.fit .badge.no").first.inner_text()
    choose(page, "base")
    said = page.locator("#models-detail").inner_text()
    assert "It fits" in said
    assert re.search(r"MB with a context of 2,048 tokens: weights 6\d\d\.\d kB", said)
    assert re.search(r"Predicted: [\d,.]+ tok/s", said)
    state(page, "base", "here")


def test_the_list_can_be_filtered(page: Any) -> None:
    rows = page.locator("#models-table tbody tr")
    everything = rows.count()
    assert everything > 50
    page.locator("#models-filter input, #models-filter textarea").fill("qwen thinking")
    until(lambda: 0 < rows.count() < everything and "qwen" in rows.first.inner_text())
    page.locator("#models-only-here input").check()
    page.get_by_text("No model is like that").wait_for()
    page.locator("#models-filter input, #models-filter textarea").fill("")
    until(lambda: row(page, "base").count() == 1 and rows.count() < 10)


def test_a_model_loads_fills_the_bar_is_pinned_and_unloads(page: Any, host: Host) -> None:
    choose(page, "base")
    page.locator("#models-load").click()
    state(page, "base", "loaded")
    until(lambda: "weights 608.0 kB" in page.locator("#models-memory").inner_text().replace("\n", " "))
    page.locator("#models-pin").click()
    state(page, "base", "pinned")
    page.locator("#models-pin", has_text="Unpin").click()
    page.locator("#models-pin", has_text="Pin in memory").wait_for()
    page.locator("#models-unload").click()
    state(page, "base", "here")
    until(lambda: "weights 0 B" in page.locator("#models-memory").inner_text().replace("\n", " "))


def test_a_model_at_work_is_not_unloaded_and_says_so(page: Any, host: Host) -> None:
    from mlxinfer.types import SamplingParams

    with host.context.pool.lease("base") as llm:
        generation = llm.submit([5, 6, 7], SamplingParams(max_tokens=1900, ignore_eos=True))
        choose(page, "base")
        state(page, "base", "at work")
        page.locator("#models-unload").click()
        page.locator("#models-notice [role=alert]", has_text="base is at work").wait_for()
        generation.cancel()
    state(page, "base", "loaded")


def test_a_pull_shows_its_bar_is_cancelled_and_goes_on(page: Any, hub: FakeHub, host: Host) -> None:
    hub.repos["org/slow"] = model_repo(files={"model.safetensors": BIG})
    hub.delay = 0.03
    page.locator("#models-pull-name input, #models-pull-name textarea").fill("org/slow")
    page.locator("#models-pull").click()
    said = page.locator("#models-pulls .said")
    until(lambda: re.search(r"MB of 8\.4 MB · [\d.]+ [kM]B/s · \d+ s left", said.inner_text()))
    assert 0 < int(page.locator("#models-pulls [role=progressbar]").get_attribute("aria-valuenow")) < 100
    page.get_by_role("button", name="Cancel: org/slow").click()
    page.get_by_text("cancelled; what arrived is kept").wait_for()
    hub.delay = 0.0
    page.get_by_role("button", name="Resume: org/slow").click()
    state(page, "org/slow", "here")
    assert int(str(hub.gets("/cdn/org/slow")[-1].range).removeprefix("bytes=").rstrip("-")) > 0
    page.get_by_role("button", name="Clear: org/slow").click()
    until(lambda: page.locator("#models-pulls .pull").count() == 0)


def test_a_pull_whose_connection_drops_goes_on_where_it_stopped_when_it_is_resumed(page: Any, hub: FakeHub) -> None:
    hub.repos["org/dropped"] = model_repo(files={"model.safetensors": BIG})
    hub.drop_after = [5_000_000, 0, 0, 0, 0]
    page.locator("#models-pull-name input, #models-pull-name textarea").fill("org/dropped")
    page.locator("#models-pull-name input, #models-pull-name textarea").press("Enter")
    page.locator("#models-pulls [role=alert]", has_text="broke off at 5000000 of").wait_for()
    before = len(hub.gets("/cdn/org/dropped"))
    page.get_by_role("button", name="Resume: org/dropped").click()
    state(page, "org/dropped", "here")
    assert [get.range for get in hub.gets("/cdn/org/dropped")[before:]] == ["bytes=5000000-"]


def test_a_model_is_deleted_after_a_question_and_the_users_own_folder_never(
    page: Any, host: Host, hub: FakeHub, folder: Path
) -> None:
    hub.repos["org/small"] = model_repo()
    host.context.library.pull("org/small")
    row(page, "org/small").wait_for()
    choose(page, "org/small")
    page.locator("#models-delete").click()
    page.locator("#models-question", has_text="org/small").wait_for()
    page.locator("#models-no").click()
    page.locator("#models-confirm").wait_for(state="hidden")
    assert row(page, "org/small").count() == 1
    page.locator("#models-delete").click()
    page.locator("#models-yes").click()
    page.locator("#models-notice", has_text=re.compile(r"org/small was deleted; 2\.1 MB are free again")).wait_for()
    until(lambda: row(page, "org/small").count() == 0)
    choose(page, "base")
    page.locator("#models-delete").click()
    page.locator("#models-yes").click()
    page.locator("#models-notice [role=alert]", has_text="is your own folder").wait_for()
    assert (folder / "base" / "model.safetensors").exists()


def test_an_adapter_is_added_shown_as_a_name_of_its_own_and_taken_off(page: Any, host: Host, folder: Path) -> None:
    choose(page, "base")
    page.locator("#models-adapters button").first.click()
    page.locator("#models-adapter-name input, #models-adapter-name textarea").fill("mine")
    page.locator("#models-adapter-folder input, #models-adapter-folder textarea").fill(str(folder / "nowhere"))
    page.locator("#models-adapter-add").click()
    page.locator("#models-notice [role=alert]", has_text="holds no adapter_config.json").wait_for()
    page.locator("#models-adapter-folder input, #models-adapter-folder textarea").fill(str(folder / "adapter"))
    page.locator("#models-adapter-add").click()
    page.locator("#models-notice", has_text="base:mine can be chosen now").wait_for()
    row(page, "base").get_by_text("base:mine").wait_for()
    assert "base:mine" in host.context.library.models()
    page.get_by_role("button", name="Take base:mine off").click()
    until(lambda: "base:mine" not in host.context.library.models())


def test_the_server_is_left_alone_while_another_tab_is_seen(page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    until(lambda: page.wait_for_timeout(100) or len(asked) >= 2)
    page.get_by_role("tab", name="Other").click()
    page.get_by_text("another tab").wait_for()
    page.wait_for_timeout(600)
    asked.clear()
    page.wait_for_timeout(1500)
    assert asked == []
    page.get_by_role("tab", name="Models").click()
    until(lambda: page.wait_for_timeout(100) or asked)


def test_a_name_of_html_is_shown_as_it_is(page: Any) -> None:
    shown = page.locator("#models-table button[data-act=choose]", has_text=EVIL)
    shown.click()
    page.locator("#models-detail h3", has_text=EVIL).wait_for()
    assert page.locator("#models-table img, #models-detail img").count() == 0
