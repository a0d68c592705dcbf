"""The window of its own: pywebview's Qt back end on a virtual display, driven through Chromium's own protocol."""

import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from tests.app.windowing import page_of, started, until

for name in ("webview", "qtpy", "websockets"):
    pytest.importorskip(name)
pytestmark = pytest.mark.skipif(not shutil.which("Xvfb"), reason="needs Xvfb: apt install xvfb")

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
APP = """
import sys
from mlxinfer.cli import main
sys.argv = ["mlxinfer", "app"]
main()
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


def test_the_theme_that_was_chosen_is_there_at_the_next_start(surroundings, tmp_path):
    dark = "document.body.classList.contains('dark')"
    drawn = "document.querySelector('#composer textarea:not([disabled])') !== null"
    with started(APP, surroundings) as process:
        with page_of(process, surroundings) as page:
            until(lambda: page.evaluate(drawn), "the chat")
            systems = page.evaluate(dark)
            page.click("#theme")
            until((tmp_path / "data" / "theme.json").is_file, "the choice on disk")
            assert page.evaluate(dark) is not systems
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, process.log.read_text()
    with started(APP, surroundings) as process:
        with page_of(process, surroundings) as page:
            until(lambda: page.evaluate(drawn), "the chat")
            until(lambda: page.evaluate(dark) is not systems, "the theme")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, process.log.read_text()
    assert "Traceback" not in process.log.read_text()


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
