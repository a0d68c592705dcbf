"""Brings idle prefixes to disk when there has been no work for a while; without polling, and not beside work."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.engine.prefix_store import PrefixStore

WRITE_AFTER_S = 3.0
"""Seconds without work before idle prefixes are written."""


class IdleWriter:
    """Told by the engine, on the MLX thread, when it works and when it rests. `post` comes back to that thread."""

    def __init__(
        self, post: Callable[[Callable[[], None]], None], idle: Callable[[], bool], prefixes: PrefixStore | None
    ) -> None:
        self._post = post
        self._idle = idle
        self._prefixes = prefixes if prefixes is not None and prefixes.disk is not None else None
        self._timer: threading.Timer | None = None
        self._unwritten = False
        """There was work since prefixes were last brought to disk."""
        self._last_work = 0.0

    def worked(self) -> None:
        self._unwritten = True
        self._last_work = time.perf_counter()

    def rests(self) -> None:
        """Write later, if there is something; one timer at a time."""
        if self._prefixes is None or not self._unwritten or self._timer is not None:
            return
        self._timer = threading.Timer(WRITE_AFTER_S, self._post, [self._write])
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        self._prefixes = None
        if self._timer is not None:
            self._timer.cancel()

    def _write(self) -> None:
        self._timer = None
        if self._prefixes is None or not self._idle():
            return
        if time.perf_counter() - self._last_work < WRITE_AFTER_S:
            self.rests()
            return
        self._unwritten = False
        self._prefixes.write_idle(self._post, self._may_go_on)

    def _may_go_on(self) -> bool:
        if self._prefixes is None or not self._idle():
            # What is left is written after the next pause.
            self._unwritten = True
            return False
        return True
