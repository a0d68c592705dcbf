"""Linux: what pywebview's Qt window is given before it is shown, and what is read from it when it closes.

The page inside it is replaced by one of ours, so that none of pywebview's scripts and no channel to Python is in it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from mlxinfer.app.window.address import stays
from mlxinfer.app.window.frame import Frame, can_be_grasped, nearest, zoomed

if TYPE_CHECKING:
    from collections.abc import Callable

GUI = "qt"
PYWEBVIEW_LOADS = False
PYWEBVIEW_DOWNLOADS = False
TOLD_MS = 8000
"""How long the status bar says where a file went."""


def dress(window: Any, url: str, frame: Frame) -> Callable[[], None]:
    """Give the window our page, its keys and its place, and have it load `url`. On Qt's thread.

    What is returned takes it apart when it is closed.
    """
    core, qt = importlib.import_module("qtpy.QtCore"), importlib.import_module("qtpy.QtWidgets")
    native = window.native
    page, profile = _page_of_ours(native.webview, url)
    theirs = native.webview.page()
    theirs.loadFinished.disconnect(native.on_load_finished)  # or else it writes its scripts into ours
    native.webview.setPage(page)
    theirs.nav_handler.deleteLater()
    theirs.deleteLater()
    profile.downloadRequested.connect(lambda download: _save(native, download, url))
    _zoom_by_keys(native, frame.zoom)
    screens = [_box(screen.availableGeometry()) for screen in qt.QApplication.screens()]
    if frame.box is not None and can_be_grasped(frame.box, screens):
        native.setGeometry(*frame.box)
    if frame.maximized:
        window.maximized = True  # shown that way by pywebview, right after this
    page.setUrl(core.QUrl(url))

    def undress() -> None:
        # Qt wants pages gone before their profiles, and these before the interpreter; it ends with a crash otherwise.
        for left in ((profile, native.profile), (native,)):
            core.QCoreApplication.sendPostedEvents(None, core.QEvent.Type.DeferredDelete)
            for thing in left:
                thing.deleteLater()
        core.QCoreApplication.sendPostedEvents(None, core.QEvent.Type.DeferredDelete)

    return undress


def _page_of_ours(view: Any, home: str) -> tuple[Any, Any]:
    """A page of `view`, and its profile, which has to outlive it."""
    engine: Any = importlib.import_module("qtpy.QtWebEngineCore")

    class Page(engine.QWebEnginePage):
        """Stays at home. Asks for no camera, no place: Qt denies what nobody answers."""

        def acceptNavigationRequest(self, url: Any, kind: Any, is_main_frame: bool) -> bool:  # noqa: N802 - Qt's name
            # For Qt a script that sets the location has clicked, too; the page's own scripts are the only ones in it.
            clicked = kind == engine.QWebEnginePage.NavigationType.NavigationTypeLinkClicked
            return stays(url.toString(), home, clicked=clicked)

        def createWindow(self, kind: Any) -> None:  # noqa: N802 - Qt's name
            """There is one window."""
            return None

    class Fence(engine.QWebEngineUrlRequestInterceptor):
        """Nothing that a page loads may come from elsewhere, whatever it holds."""

        def interceptRequest(self, info: Any) -> None:  # noqa: N802 - Qt's name
            url = info.requestUrl()
            if url.scheme() != "data" and not stays(url.toString(), home, clicked=False):
                info.block(True)

    profile = engine.QWebEngineProfile()  # without a name: nothing of it is written to disk
    profile.setUrlRequestInterceptor(Fence(profile))
    page = Page(profile, view)
    page.newWindowRequested.connect(
        lambda request: stays(request.requestedUrl().toString(), home, clicked=request.isUserInitiated())
    )
    page.settings().setAttribute(engine.QWebEngineSettings.WebAttribute.JavascriptCanAccessClipboard, True)
    return page, profile


def _save(native: Any, download: Any, home: str) -> None:
    """Into the Downloads folder, under a name that is free there."""
    url, folder = download.url(), Path(platformdirs.user_downloads_dir())
    if url.scheme() != "data" and not stays(url.toString(), home, clicked=False):
        download.cancel()
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        native.statusBar().showMessage(f"{folder}: {error.strerror}", TOLD_MS)
        download.cancel()
        return
    download.setDownloadDirectory(str(folder))
    done = folder / download.downloadFileName()

    def tell() -> None:
        broken = download.state() == type(download).DownloadState.DownloadInterrupted
        native.statusBar().showMessage(f"{done}: {download.interruptReasonString()}" if broken else str(done), TOLD_MS)

    download.isFinishedChanged.connect(tell)
    download.accept()


def _zoom_by_keys(native: Any, zoom: float) -> None:
    gui = importlib.import_module("qtpy.QtGui")
    view = native.webview

    def turn(step: int) -> None:
        view.setZoomFactor(zoomed(view.zoomFactor(), step))

    view.setZoomFactor(zoom)
    standard = gui.QKeySequence.StandardKey
    wanted = [(standard.ZoomIn, 1), ("Ctrl+=", 1), (standard.ZoomOut, -1), ("Ctrl+0", 0)]
    for keys, step in wanted:
        shortcut = gui.QShortcut(gui.QKeySequence(keys), native)
        shortcut.activated.connect(lambda step=step: turn(step))


def _box(rectangle: Any) -> tuple[int, int, int, int]:
    return rectangle.x(), rectangle.y(), rectangle.width(), rectangle.height()


def frame_of(window: Any) -> Frame:
    native = window.native
    x, y, width, height = _box(native.normalGeometry() if native.isMaximized() else native.geometry())
    return Frame(width, height, x, y, nearest(native.webview.zoomFactor()), native.isMaximized())
