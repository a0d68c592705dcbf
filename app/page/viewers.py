"""Which of a session's callbacks may still write to its page: the one that began last; and what the page shows."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict

MAX_SESSIONS = 1000
"""Tabs that are remembered; a session has no certain end."""


class Viewers:
    """A callback takes a ticket; an earlier one of the same session is worth nothing from then on. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._held: OrderedDict[str, tuple[int, str]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, session: str, key: str = "") -> int:
        """`key`: the conversation that the session looks at from now on."""
        with self._lock:
            number = next(self._numbers)
            self._held[session] = (number, key)
            self._held.move_to_end(session)
            while len(self._held) > MAX_SESSIONS:
                self._held.popitem(last=False)
            return number

    def holds(self, session: str, number: int) -> bool:
        return self._held.get(session, (-1, ""))[0] == number

    def shows(self, session: str, key: str) -> bool:
        """Whether it is the conversation that was opened last; of a session that isn't known nothing is."""
        held = self._held.get(session)
        return held is not None and held[1] == key
