"""Server-sent events: one answer as a stream of JSON objects, ended by [DONE] or by an error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from mlxinfer.server.errors import describe
from mlxinfer.server.inflight import until_disconnect
from mlxinfer.server.record import note_error, record_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from starlette.types import Receive, Scope, Send

KEEPALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def frame(payload: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(payload, separators=(',', ':'))}\n\n".encode("ascii")


class EventStream(Response):
    """Sends `objects` (None: a comment that keeps the connection open) and stops them when the client leaves."""

    media_type = "text/event-stream"

    def __init__(
        self,
        objects: AsyncGenerator[Mapping[str, Any] | None],
        headers: Mapping[str, str],
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._objects = objects
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await until_disconnect(receive, self._send_all(scope, send))
        finally:
            self._on_end()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        last = DONE
        try:
            async for item in self._objects:
                data = KEEPALIVE if item is None else frame(item)
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:  # noqa: BLE001 (the HTTP edge) the status line is out: what went wrong is the last event
            note_error(scope, error)
            last = frame(describe(error, record_of(scope).id)[1])
        finally:
            await self._objects.aclose()
        await send({"type": "http.response.body", "body": last, "more_body": False})
