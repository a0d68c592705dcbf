"""`mlxinfer app` as a process: killed in mid-reply, stopped by Ctrl-C, without a model."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from mlxinfer.app.store import open_store
from tests import tiny
from tests.app.serving import ready, send

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STARTS_S = 120


@contextlib.contextmanager
def started(home: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its link."""
    own = {"MLXINFER_CACHE_DIR": str(home / "cache"), "MLXINFER_DATA_DIR": str(home / "data"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "mlxinfer", "app", "--no-open", *words]
    process = subprocess.Popen(command, env=os.environ | own, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if "The chat is at " in line:
                break
        else:
            raise AssertionError("".join(said))
        yield process, line.split("The chat is at ")[1].split()[0]
    finally:
        process.kill()
        process.wait(30)
        process.stderr.close()


def test_a_reply_survives_the_death_of_its_process(browser: Any, tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path / "tiny")
    page = browser.new_page()
    with started(tmp_path, str(folder)) as (process, link):
        page.goto(link)
        ready(page)
        page.click("#open-settings")
        page.fill(".code textarea", '{"type": "string", "minLength": 20000}')
        send(page, "tell me everything")
        page.wait_for_function("document.querySelector('#tail .bot-row')?.innerText.length > 200")
        time.sleep(1.2)  # a state is written each second
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    store = open_store(tmp_path / "data" / "chats.db").store
    (chat,) = store.conversations()
    kept = store.branch(chat.id)[-1]
    store.close()
    assert kept.status == "streaming"
    assert kept.content
    with started(tmp_path, str(folder)) as (process, link):
        page.goto(link)
        ready(page)
        page.locator("#listing .open", has_text="tell me everything").click()
        page.wait_for_selector("#tail .user-row >> text=tell me everything")
        page.wait_for_function("document.querySelector('#tail .bot-row')?.innerText.length > 100")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    page.close()


def test_without_a_model_the_page_says_how_to_get_one(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page()
    (tmp_path / "hub").mkdir()
    with started(tmp_path, "--lang", "en") as (process, link):
        page.goto(link)
        ready(page)
        page.wait_for_selector("#hello >> text=No model yet")
        assert "demo model" in page.inner_text("#demo")
        send(page, "hello")
        page.wait_for_selector(".toast-body >> text=Choose a model first")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    page.close()
