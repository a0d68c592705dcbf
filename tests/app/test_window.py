"""The window of its own: pywebview's Qt back end on a virtual display, driven through Chromium's own protocol."""

import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

for name in ("webview", "qtpy"):
    pytest.importorskip(name)
connect = pytest.importorskip("websockets.sync.client").connect
pytestmark = [
    pytest.mark.skipif(not shutil.which("Xvfb"), reason="needs Xvfb: apt install xvfb libegl1 libxcb-cursor0"),
    pytest.mark.timeout(120),
]

PAGE = """<!doctype html><meta charset=utf-8><title>page</title><body>
<button id=copy onclick="navigator.clipboard.writeText('copied').then(() => document.title = 'copied',
  error => document.title = String(error))">copy</button>
<a id=save href=/notes.md download>save</a><a id=blank target=_blank href=https://example.invalid/blank>elsewhere</a>
<a id=same href=https://example.invalid/same>elsewhere</a><a id=file target=_blank href=file:///etc/passwd>a file</a>
<p id=mark>here</p></body>"""
NOTES = "# Notes\n日本語\n"
OPENS = """
import sys
from pathlib import Path
from mlxinfer.app import window
print("opens", flush=True)
print("ended by", window.open_window(sys.argv[1], "mlxinfer", file=Path(sys.argv[2])), flush=True)
"""
BESIDE = """
import sys, threading
from mlxinfer.app import window
from mlxinfer.errors import StoreError

def serve(until, started):
    started(sys.argv[1])
    if until.wait(float(sys.argv[2])):
        print("told to end", flush=True)
    else:
        raise StoreError("the disk is full")

print("ended by", window.run_beside(serve, "mlxinfer"), flush=True)
"""


class Page(http.server.BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self):
        self.asked.append(self.path)
        notes = self.path == "/notes.md"
        body = (NOTES if notes else PAGE).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/markdown" if notes else "text/html")
        self.send_header("Content-Length", str(len(body)))
        if notes:
            self.send_header("Content-Disposition", 'attachment; filename="notes.md"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture(scope="module")
def url():
    handler = type("Handler", (Page,), {"asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/app/?key=secret"
        server.shutdown()


@pytest.fixture(scope="module")
def display():
    reading, writing = os.pipe()
    options = ["-displayfd", str(writing), "-screen", "0", "1400x1000x24", "-nolisten", "tcp"]
    with subprocess.Popen(["Xvfb", *options], pass_fds=[writing], stderr=subprocess.DEVNULL) as server:
        os.close(writing)
        with os.fdopen(reading) as told:
            yield f":{told.readline().strip()}"
        server.terminate()


@pytest.fixture
def surroundings(tmp_path, display):
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
    with connect(_pages(address)[0]["webSocketDebuggerUrl"]) as connection:
        page = Driven(connection)
        until(lambda: page.evaluate("document.readyState") == "complete", "the page")
        yield page


def _pages(address):
    try:
        return [page for page in httpx.get(address).json() if page["url"].startswith("http")]
    except httpx.TransportError:
        return []


def until(holds, what, seconds=40):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


def ends(process, number):
    process.send_signal(number)
    assert process.wait(30) == 0, process.log.read_text()
    text = process.log.read_text()
    assert f"ended by {int(number)}" in text
    assert "Traceback" not in text
    assert "Expect troubles" not in text


def test_links_to_elsewhere_open_the_browser_and_the_window_stays(url, surroundings, tmp_path):
    opened = tmp_path / "opened"
    with started(OPENS, surroundings, url, tmp_path / "window.json") as process:
        with page_of(process, surroundings) as page:
            page.click("#blank")
            until(opened.is_file, "the browser")
            page.click("#same")
            until(lambda: len(opened.read_text().split()) == 2, "the second link")
            page.click("#file")
            page.evaluate("location.href = 'file:///etc/passwd'")
            page.evaluate("fetch('https://example.invalid/fetched').catch(() => {})")
            assert page.evaluate("document.querySelector('#mark').innerText") == "here"
            assert page.evaluate("location.href") == url
            assert page.evaluate("typeof window.pywebview + typeof window.qt") == "undefinedundefined"
        ends(process, signal.SIGINT)
    assert opened.read_text().split() == ["https://example.invalid/blank", "https://example.invalid/same"]


def test_a_download_lands_in_the_downloads_folder_and_never_over_another(url, surroundings, tmp_path):
    folder = tmp_path / "Downloads"
    with started(OPENS, surroundings, url, tmp_path / "window.json") as process:
        with page_of(process, surroundings) as page:
            page.click("#save")
            until(lambda: len(list(folder.glob("*.md"))) == 1, "the first")
            page.click("#save")
            until(lambda: len(list(folder.glob("*.md"))) == 2, "the second")
            page.click("#copy")
            until(lambda: page.evaluate("document.title") == "copied", "the clipboard")
        ends(process, signal.SIGTERM)
    assert [file.read_text() for file in folder.glob("*.md")] == [NOTES, NOTES]


@pytest.mark.skipif(not shutil.which("xdotool"), reason="needs xdotool for keys")
def test_place_size_and_zoom_are_there_again(url, surroundings, tmp_path):
    file, act = tmp_path / "window.json", ["xdotool", "search", "--sync", "--onlyvisible", "--name", "^mlxinfer$"]

    def acts(*what):
        return subprocess.run([*act, *what], env=surroundings, check=True, capture_output=True, text=True).stdout

    with started(OPENS, surroundings, url, file) as process:
        with page_of(process, surroundings) as page:
            ratio = page.evaluate("devicePixelRatio")
            acts("windowmove", "--sync", "200", "120", "windowsize", "--sync", "900", "700", "windowfocus", "--sync")
            acts("key", "ctrl+plus", "key", "ctrl+plus", "key", "ctrl+minus", "key", "ctrl+plus")
            until(lambda: abs(page.evaluate("devicePixelRatio") - 1.25 * ratio) < 0.01, "the zoom")
        ends(process, signal.SIGINT)
    kept = json.loads(file.read_text())
    assert kept == {"width": 900, "height": 700, "x": 200, "y": 120, "zoom": 1.25, "maximized": False}
    with started(OPENS, surroundings, url, file) as process:
        with page_of(process, surroundings) as page:
            until(lambda: abs(page.evaluate("devicePixelRatio") - 1.25 * ratio) < 0.01, "the zoom")
            places = acts("getwindowgeometry")
            assert "200,120" in places
            assert "900x700" in places
        ends(process, signal.SIGINT)


def test_a_server_that_fails_closes_the_window_and_its_error_is_the_end(url, surroundings):
    with started(BESIDE, surroundings, url, 4) as process:
        assert process.wait(40) == 1
    assert "StoreError: the disk is full" in process.log.read_text()


def test_closing_the_window_tells_the_server_to_end_and_waits_for_it(url, surroundings):
    with started(BESIDE, surroundings, url, 60) as process:
        with page_of(process, surroundings):
            pass
        ends(process, signal.SIGINT)
    assert "told to end" in process.log.read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"DISPLAY": ""}, "no display"),
        ({"DISPLAY": ":9999"}, "display :9999 cannot be reached"),
        pytest.param(
            {"QTWEBENGINE_CHROMIUM_FLAGS": ""},
            "does not run as root",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="root's own message"),
        ),
    ],
)
def test_what_a_window_is_missing_is_said_in_one_line(surroundings, change, message):
    code = "from mlxinfer.app import window; print(window.available())"
    ran = subprocess.run([sys.executable, "-c", code], env=surroundings | change, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert message in ran.stdout
    assert ran.stdout.count("\n") == 1
