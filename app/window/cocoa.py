"""macOS: what pywebview's Cocoa window is given before it is shown, and what is read from it when it closes.

Only a Mac can show that this works; where it was run is said in docs/packaging.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mlxinfer.app.window.address import stays
from mlxinfer.app.window.frame import Frame, can_be_grasped, nearest, zoomed

if TYPE_CHECKING:
    from collections.abc import Callable

GUI = None
"""pywebview's choice, which is Cocoa."""
PYWEBVIEW_LOADS = True
PYWEBVIEW_DOWNLOADS = True
"""By a panel that stands in the Downloads folder."""
TICK_S = 0.25
"""How often Python gets the main thread, to see signals."""
_COMMAND = 1 << 20
_KEY_DOWN = 1 << 10
_CANCEL, _LINK = 0, 0
"""NSTerminateCancel and WKNavigationActionPolicyCancel; WKNavigationTypeLinkActivated."""
_STEPS = {"+": 1, "=": 1, "-": -1, "0": 0}

_held: list[Any] = []
"""Cocoa's delegates are weak: the window is one per process, and these live as long."""


def dress(window: Any, url: str, frame: Frame) -> Callable[[], None]:
    """Keep the window at home, give it its keys and its place. Before pywebview loads `url`, on the main thread."""
    kit, helper = importlib.import_module("AppKit"), importlib.import_module("PyObjCTools.AppHelper")
    platform = importlib.import_module("webview.platforms.cocoa")
    view = platform.BrowserView.instances[window.uid]
    guards = _navigation(platform, url), _application(helper, view)
    view.webview.setNavigationDelegate_(guards[0])
    platform.BrowserView.app.setDelegate_(guards[1])
    # No way from the page's scripts to Python.
    scripts = view.webview.configuration().userContentController()
    for name in ("jsBridge", "browserDelegate"):
        scripts.removeScriptMessageHandlerForName_(name)
    view.webview.setPageZoom_(frame.zoom)
    keys = kit.NSEvent.addLocalMonitorForEventsMatchingMask_handler_(_KEY_DOWN, lambda event: _zoom(view, event))
    _held.extend((*guards, keys))
    _stand(kit, view.window, frame)
    _tick(helper)
    return _held.clear


def _navigation(platform: Any, home: str) -> Any:
    objc = importlib.import_module("objc")
    base: Any = platform.BrowserView.BrowserDelegate

    class MlxinferNavigation(base):
        def webView_decidePolicyForNavigationAction_decisionHandler_(self, view: Any, action: Any, decide: Any) -> None:  # noqa: N802
            target = str(action.request().URL().absoluteString())
            if stays(target, home, clicked=action.navigationType() == _LINK):
                objc.super(MlxinferNavigation, self).webView_decidePolicyForNavigationAction_decisionHandler_(
                    view, action, decide
                )
            else:
                decide(_CANCEL)

        def webView_createWebViewWithConfiguration_forNavigationAction_windowFeatures_(  # noqa: N802
            self, view: Any, configuration: Any, action: Any, features: Any
        ) -> None:
            stays(str(action.request().URL().absoluteString()), home, clicked=action.navigationType() == _LINK)

    return MlxinferNavigation.alloc().init()


def _application(helper: Any, view: Any) -> Any:
    kit = importlib.import_module("AppKit")

    class MlxinferApplication(kit.NSObject):
        def applicationShouldTerminate_(self, application: Any) -> int:  # noqa: N802
            """Quit closes the window. Cocoa's own way ends the process here, with replies half written."""
            helper.callAfter(view.window.performClose_, None)
            return _CANCEL

        def applicationSupportsSecureRestorableState_(self, application: Any) -> bool:  # noqa: N802
            return True

    return MlxinferApplication.alloc().init()


def _zoom(view: Any, event: Any) -> Any:
    key = event.charactersIgnoringModifiers()
    if not event.modifierFlags() & _COMMAND or key not in _STEPS or view.webview is None:
        return event
    view.webview.setPageZoom_(zoomed(view.webview.pageZoom(), _STEPS[key]))
    return None


def _stand(kit: Any, native: Any, frame: Frame) -> None:
    """Where it stood. Cocoa counts y upwards from the main screen's lower edge; the top of the window is looked for."""
    if frame.box is None:
        return
    x, y, width, height = frame.box
    screens = []
    for screen in kit.NSScreen.screens():
        seen = screen.visibleFrame()
        screens.append((seen.origin.x, -seen.origin.y - seen.size.height, seen.size.width, seen.size.height))
    if can_be_grasped((x, -y - height, width, height), screens):
        native.setFrame_display_(kit.NSMakeRect(x, y, width, height), False)


def _tick(helper: Any) -> None:
    helper.callLater(TICK_S, _tick, helper)


def frame_of(window: Any) -> Frame:
    platform = importlib.import_module("webview.platforms.cocoa")
    view, box = platform.BrowserView.instances[window.uid], window.native.frame()
    x, y, width, height = (round(value) for value in (box.origin.x, box.origin.y, box.size.width, box.size.height))
    return Frame(width, height, x, y, nearest(view.webview.pageZoom()))
