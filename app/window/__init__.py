"""The window of `mlxinfer app`: one page in a window of its own, by pywebview (extra `desktop`)."""

from __future__ import annotations

from mlxinfer.app.window.opening import available, open_window, run_beside

__all__ = ["available", "open_window", "run_beside"]
