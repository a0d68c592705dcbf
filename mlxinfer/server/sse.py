"""One answer as a stream of JSON objects, ended by a mark or by an error. By default server-sent events and [DONE]."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
    """An event without a name."""
    return f"data: {json.dumps(payload, separators=(',', ':'))}\n\n".encode("ascii")


def named_frame(payload: Mapping[str, Any]) -> bytes:
    """An event named by the payload's type."""
    return f"event: {payload['type']}\n".encode("ascii") + frame(payload)


@dataclass(frozen=True, slots=True)
class StreamStyle:
    """How an API frames its stream."""

    media_type: str = "text/event-stream"
    encode: Callable[[Mapping[str, Any]], bytes] = frame
    keepalive: bytes = KEEPALIVE
    """Sent in a silence; b"" sends nothing."""
    done: bytes = DONE
    """The end of a stream that went well; b"" for none."""
    error: Callable[[int, Mapping[str, Any]], bytes] | None = None
    """The end of one that didn't, from the status it would have had and OpenAI's error object: the status line is out
    by then. None: that object."""


OPENAI = StreamStyle()


class EventStream(Response):
    """Sends `objects` (None: silence so far) and stops them when the client leaves; `on_end` runs in any case.

    The first `head` objects come before anything is computed. They and the status line wait for what follows: until
    then a proxy may give the request to another server.
    """

    def __init__(
        self,
        objects: AsyncGenerator[Mapping[str, Any] | None],
        headers: Mapping[str, str],
        on_end: Callable[[], None],
        style: StreamStyle = OPENAI,
        head: int = 0,
    ) -> None:
        self.media_type = style.media_type
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]
        self._objects = objects
        self._on_end = on_end
        self._style = style
        self._head = head
        self._held: list[bytes] | None = []
        """None once the status line is out."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(scope, send))
        finally:
            self._on_end()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        style = self._style
        last = style.done
        try:
            async for item in self._objects:
                data = style.keepalive if item is None else style.encode(item)
                if self._head and self._held is not None:
                    self._head -= 1
                    self._held.append(data)
                    continue
                await self._begin(send)
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:  # the HTTP edge
            if self._held is not None:
                raise  # an answer of its own, with its status
            # The status line is out: what went wrong is the last event.
            note_error(scope, error)
            status, told, _ = describe(error, record_of(scope).id)
            last = style.error(status, told) if style.error else frame(told)
        finally:
            await self._objects.aclose()
        await self._begin(send)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _begin(self, send: Send) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for data in held:
            await send({"type": "http.response.body", "body": data, "more_body": True})
