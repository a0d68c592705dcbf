"""What the app costs while nobody asks anything: `python -m tests.app.cost [SECONDS]`, in per cent of one core.

The server is a process of its own, `mlxinfer app --no-open`, without a model; then one of this process, in which a
reply grows that nobody computes, so that what is counted is the page alone. Chromium's own time isn't counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from mlxinfer.app.replies import Live, Shown
from tests import tiny
from tests.app import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORDS_PER_S = 20
SETTLES_S = 5.0
"""What loading a page sets off is over by then."""


def measure(what: str, cpu_s: Callable[[], float], seconds: float) -> None:
    time.sleep(SETTLES_S)
    before, began = cpu_s(), time.monotonic()
    time.sleep(seconds)
    spent, took = cpu_s() - before, time.monotonic() - began
    print(f"{what:58} {spent:6.2f} s of CPU in {took:.0f} s  {100 * spent / took:5.2f} %", flush=True)


@contextlib.contextmanager
def server(home: Path) -> Iterator[tuple[str, Callable[[], float]]]:
    """A link, and the CPU seconds of the process behind it."""
    surroundings = os.environ | {f"MLXINFER_{name}_DIR": str(home / name) for name in ("DATA", "CACHE")}
    command = [sys.executable, "-m", "mlxinfer", "app", "--no-open", "--json"]
    with subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        link = json.loads(process.stdout.readline())["url"]
        times = psutil.Process(process.pid).cpu_times

        def cpu_s() -> float:
            now = times()
            return now.user + now.system

        yield link, cpu_s
        process.send_signal(signal.SIGTERM)


@contextlib.contextmanager
def page(browser: Any, link: str, tab: str = "") -> Iterator[Any]:
    context = browser.new_context()
    opened = context.new_page()
    opened.goto(link)
    serving.ready(opened)
    if tab:
        opened.get_by_role("tab", name=tab).click()
        opened.locator("#models-memory .bar").wait_for(timeout=120_000)
    yield opened
    context.close()


def grows(app: serving.App, browser: Any, seconds: float) -> None:
    """A reply of 20 words a second, looked at; then with the memory bar beside it."""
    store, replies = app.house.store, app.house.replies
    chat = store.create("tiny", title="long")
    store.add(chat.id, "user", "and now?")
    reply = store.add(chat.id, "assistant", "", status="streaming", model="tiny")
    live, over = Live(reply, Shown(stage="writing")), threading.Event()
    replies._live[reply.id] = live

    def write() -> None:
        while not over.wait(1 / WORDS_PER_S):
            live.show(text=live.shown.text[-2000:] + "word ")

    writer = threading.Thread(target=write)
    writer.start()
    with page(browser, app.link) as chatting:
        chatting.goto(f"{app.base}/app/en/?chat={chat.id}")
        chatting.wait_for_selector("#tail .bot-row >> text=word")
        measure("a reply of 20 words/s, one page", time.process_time, seconds)
        with page(browser, app.link, "Models"):
            measure("… and another page on the tab Models", time.process_time, seconds)
    over.set()
    writer.join()
    del replies._live[reply.id]
    live.show(stage="done")


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    with tempfile.TemporaryDirectory() as folder, serving.browser() as browser:
        with server(Path(folder) / "apart") as (link, cpu_s):
            measure("no page", cpu_s, seconds)
            with page(browser, link):
                measure("one page on the chat", cpu_s, seconds)
            with page(browser, link, "Models"):
                measure("one page on the tab Models", cpu_s, seconds)
        models = {"tiny": str(tiny.write_folder(Path(folder) / "tiny"))}
        with serving.app(Path(folder) / "here", models, model="tiny") as app:
            grows(app, browser, seconds)


if __name__ == "__main__":
    main()
