"""Responses that a client may go on from: bounded in number, bytes and time, and each client sees its own only."""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_COUNT = 1000
MAX_BYTES = 64 << 20
TTL_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Stored:
    """One response."""

    response: dict[str, Any]
    """As it was sent."""
    messages: tuple[dict[str, Any], ...]
    """The conversation up to its end, without instructions, as chat templates read it."""
    size: int
    expires: float


@dataclass(slots=True)
class ResponseStore:
    """In memory; of whoever keeps the most, the least recently stored goes first. Lives on the event loop."""

    max_count: int = MAX_COUNT
    max_bytes: int = MAX_BYTES
    ttl_s: float = TTL_S
    clock: Callable[[], float] = time.monotonic
    _bytes: int = 0
    _stored: OrderedDict[tuple[str, str], Stored] = field(default_factory=OrderedDict[tuple[str, str], Stored])

    def put(self, tenant: str, response: dict[str, Any], messages: tuple[dict[str, Any], ...]) -> None:
        """Keep it as long as there is room and time. One that is larger than everything allowed isn't kept."""
        # Text in memory takes up to this many bytes; messages that a later response shares count again.
        size = len(json.dumps(response)) + len(json.dumps(messages))
        self._drop_expired()
        if size > self.max_bytes:
            return
        self._stored[tenant, response["id"]] = Stored(response, messages, size, self.clock() + self.ttl_s)
        self._bytes += size
        while len(self._stored) > self.max_count or self._bytes > self.max_bytes:
            self._drop(self._next_to_go())

    def get(self, tenant: str, response_id: str) -> Stored | None:
        """None for one that is not there any more, never was, or is another's."""
        self._drop_expired()
        return self._stored.get((tenant, response_id))

    def delete(self, tenant: str, response_id: str) -> bool:
        """Whether it was there."""
        found = self.get(tenant, response_id) is not None
        if found:
            self._drop((tenant, response_id))
        return found

    def _next_to_go(self) -> tuple[str, str]:
        """The oldest of the client that keeps the most: one that floods drives out its own, not what others keep."""
        too_many = len(self._stored) > self.max_count
        kept: Counter[str] = Counter()
        for (tenant, _), one in self._stored.items():
            kept[tenant] += 1 if too_many else one.size
        largest = max(kept, key=kept.__getitem__)
        return next(key for key in self._stored if key[0] == largest)

    def _drop(self, key: tuple[str, str]) -> None:
        self._bytes -= self._stored.pop(key).size

    def _drop_expired(self) -> None:
        # In the order of their ends, for all live equally long.
        now = self.clock()
        while self._stored and next(iter(self._stored.values())).expires <= now:
            self._drop(next(iter(self._stored)))
