"""Windows on a virtual display, each a process with a home of its own, driven through Chromium's own protocol."""

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import httpx


@contextmanager
def screen():
    """A virtual display's name."""
    reading, writing = os.pipe()
    options = ["-displayfd", str(writing), "-screen", "0", "1400x1000x24", "-nolisten", "tcp"]
    with subprocess.Popen(["Xvfb", *options], pass_fds=[writing], stderr=subprocess.DEVNULL) as server:
        os.close(writing)
        with os.fdopen(reading) as told:
            yield f":{told.readline().strip()}"
        server.terminate()


def environment(tmp_path, display):
    """The environment of a window: its own home, and a browser that only writes down what it was asked to open."""
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/opened\n')
    browser.chmod(0o755)
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    left_out = {"WAYLAND_DISPLAY", "QT_QPA_PLATFORM", "XDG_DOWNLOAD_DIR"}
    return {name: value for name, value in os.environ.items() if name not in left_out} | {
        "HOME": str(tmp_path),
        "DISPLAY": display,
        "BROWSER": f"{browser} %s",
        "MLXINFER_DATA_DIR": str(tmp_path / "data"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "QTWEBENGINE_CHROMIUM_FLAGS": "--no-sandbox",
        "QTWEBENGINE_REMOTE_DEBUGGING": str(port),
    }


@contextmanager
def started(code, surroundings, *arguments):
    log = Path(surroundings["HOME"]) / "log"
    with log.open("ab") as out:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        process = subprocess.Popen(command, env=surroundings, stdout=out, stderr=out, cwd=Path(__file__).parents[2])
    process.log = log
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class Driven:
    """A page, through Chromium's protocol: Playwright wants more of it than Qt's Chromium has."""

    def __init__(self, connection):
        self._connection, self._number = connection, 0

    def call(self, method, **parameters):
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while (answer := json.loads(self._connection.recv(timeout=30))).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def evaluate(self, script):
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def click(self, selector):
        box = f"JSON.stringify(document.querySelector('{selector}').getBoundingClientRect())"
        box = json.loads(self.evaluate(box))
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)


@contextmanager
def page_of(process, surroundings):
    """The page in the window, once it is loaded."""
    address = f"http://127.0.0.1:{surroundings['QTWEBENGINE_REMOTE_DEBUGGING']}/json/list"
    until(lambda: process.poll() is not None or _pages(address), "the window's page")
    assert process.poll() is None, process.log.read_text()
    connect = importlib.import_module("websockets.sync.client").connect
    with connect(_pages(address)[0]["webSocketDebuggerUrl"]) as connection:
        page = Driven(connection)
        until(lambda: page.evaluate("document.readyState") == "complete", "the page")
        yield page


def _pages(address):
    try:
        return [page for page in httpx.get(address).json() if page["url"].startswith("http")]
    except httpx.TransportError:
        return []


def until(holds, what, seconds=90):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)
