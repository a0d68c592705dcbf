"""Opens the window, closes it on a signal or when the server ends, and remembers what it was like.

The window has the main thread, as every system wants it; the server another (`run_beside`). There is no bridge from the
page's scripts to Python: the page talks to the server, as in a browser.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxinfer.app.window import frame as frames
from mlxinfer.config import load_settings
from mlxinfer.errors import MlxinferError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = "window.json"
ICON = Path(__file__).parent.parent / "packaging" / "icon.png"
INSTALL = "pip install 'mlxinfer[desktop]'"
_XCB = "libxcb.so.1"
_X_LIBRARIES = ("libxcb-cursor.so.0", "libxcb-icccm.so.4", "libxcb-keysyms.so.1", "libxkbcommon-x11.so.0")
"""What Qt's plug-in for X links to and doesn't bring; it ends the process where one of them is missing."""
_APT = "apt install libegl1 libxcb-cursor0 libxcb-icccm4 libxcb-keysyms1 libxkbcommon-x11-0"
_NO_SANDBOX = "--no-sandbox"


def available() -> str:
    """What a window is missing here, in one line; "" when it can be opened.

    Says it beforehand: Qt ends the process where it finds no display, and Chromium where it runs as root.
    """
    if importlib.util.find_spec("webview") is None:
        return f"pywebview is not installed: {INSTALL}"
    return "" if sys.platform == "darwin" else _qt_is_missing()


def _qt_is_missing() -> str:
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("QT_QPA_PLATFORM")):
        return "there is no display: neither DISPLAY nor WAYLAND_DISPLAY is set"
    try:
        importlib.import_module("qtpy.QtWebEngineWidgets")
    except (ImportError, RuntimeError) as error:  # qtpy's own errors are both
        return f"Qt's browser cannot be loaded ({error}): {INSTALL}"
    if not os.environ.get("WAYLAND_DISPLAY") and os.environ.get("QT_QPA_PLATFORM", "xcb") == "xcb":
        missing = _x_is_missing()
        if missing:
            return missing
    sandboxed = not os.environ.get("QTWEBENGINE_DISABLE_SANDBOX") and _NO_SANDBOX not in os.environ.get(
        "QTWEBENGINE_CHROMIUM_FLAGS", ""
    )
    if sandboxed and os.geteuid() == 0:
        return "Chromium's sandbox does not run as root: start the app as a user"
    return ""


def _x_is_missing() -> str:
    try:
        xcb = ctypes.CDLL(_XCB)
        for library in _X_LIBRARIES:
            ctypes.CDLL(library)
    except OSError as error:
        return f"Qt needs a library of the system ({error}): {_APT}"
    xcb.xcb_connect.restype = ctypes.c_void_p
    xcb.xcb_connect.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    xcb.xcb_connection_has_error.argtypes = xcb.xcb_disconnect.argtypes = (ctypes.c_void_p,)
    connection = xcb.xcb_connect(None, None)
    try:
        refused = xcb.xcb_connection_has_error(connection)
    finally:
        xcb.xcb_disconnect(connection)
    return f"the display {os.environ.get('DISPLAY')} cannot be reached" if refused else ""


def open_window(url: str, title: str, *, until: threading.Event | None = None, file: Path | None = None) -> int | None:
    """Show `url` until the window is closed, by hand, by SIGINT or SIGTERM, whose number is returned, or by `until`.

    Main thread only. Size, position and zoom are kept in `file` (by default window.json in the data folder). Raises
    UnsupportedModelError where no window can be opened; `available` says that before.
    """
    missing = available()
    if missing:
        raise UnsupportedModelError(f"no window can be opened: {missing}")
    file = file or load_settings().data_dir / FILE
    until = until or threading.Event()
    webview: Any = importlib.import_module("webview")
    platform: Any = importlib.import_module(f"mlxinfer.app.window.{'cocoa' if sys.platform == 'darwin' else 'qt'}")
    frame = frames.read(file)
    webview.settings["OPEN_EXTERNAL_LINKS_IN_BROWSER"] = True
    webview.settings["ALLOW_DOWNLOADS"] = platform.PYWEBVIEW_DOWNLOADS
    webview.settings["ALLOW_FILE_URLS"] = False
    window = webview.create_window(
        title,
        url=url if platform.PYWEBVIEW_LOADS else None,
        html="" if platform.PYWEBVIEW_LOADS else "<!doctype html>",
        width=frame.width,
        height=frame.height,
        min_size=frames.SMALLEST,
        text_select=True,
    )
    ended_by, undress = list[int](), list[Callable[[], None]]()

    def interrupted(number: int, _: Any) -> None:
        ended_by.append(number)
        until.set()

    def dress() -> None:
        # pywebview has set handlers of its own by now, which leave the window's loop without closing it.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, interrupted)
        undress.append(platform.dress(window, url, frame))

    window.events.before_show += dress
    window.events.closing += lambda: frames.write(file, platform.frame_of(window))
    with _signals_restored(), _closed_by(until, window):
        webview.start(gui=platform.GUI, icon=str(ICON) if ICON.is_file() else None)
    for take_apart in undress:
        take_apart()
    return ended_by[0] if ended_by else None


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _closed_by(until: threading.Event, window: Any) -> Iterator[None]:
    """Close `window` when `until` is set. It may be closed by hand before."""

    def wait() -> None:
        until.wait()
        if not window.events.closed.is_set():
            window.destroy()

    closing = threading.Thread(target=wait, name="mlxinfer-window", daemon=True)
    closing.start()
    try:
        yield
    finally:
        until.set()
        closing.join()


def run_beside(serve: Callable[[threading.Event, Callable[[str], None]], Any], title: str) -> int | None:
    """Run `serve(until, started)` on another thread and show the page it starts with; returns as `open_window`.

    `serve` calls `started(url)` once it accepts connections, and ends when `until` is set: that is when the window is
    closed. When it ends by itself the window closes. Returns when it has ended; raises the MlxinferError it ended with.
    """
    until, ready = threading.Event(), threading.Event()
    url, failed = list[str](), list[MlxinferError]()

    def started(address: str) -> None:
        url.append(address)
        ready.set()

    def run() -> None:
        try:
            serve(until, started)
        except MlxinferError as error:
            failed.append(error)
        finally:
            until.set()
            ready.set()

    server = threading.Thread(target=run, name="mlxinfer-server")
    server.start()
    try:
        ready.wait()
        number = open_window(url[0], title, until=until) if url else None
    finally:
        until.set()
        server.join()
    if failed:
        raise failed[0]
    return number
