"""The outermost layer: gives each request its id, answers what nothing else caught, writes one line when it ends."""

from __future__ import annotations

import datetime
import json
import logging
import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders

from mlxinfer.server.errors import error_response
from mlxinfer.server.record import BROKEN_KEY, SCOPE_KEY, RequestRecord, note_error, request_id

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from mlxinfer.server.metrics import ServerMetrics

log = logging.getLogger("mlxinfer.access")

ID_HEADER = "x-request-id"
MAX_PATH_CHARS = 200


class AccessLog:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(request_id(Headers(scope=scope).get(ID_HEADER)))
        scope[SCOPE_KEY] = record
        answer = _counted(send, record)
        try:
            await self._app(scope, _watched(receive, record), answer)
        except Exception as error:
            # The HTTP edge: a failure nobody foresaw gets an answer too, with the headers that all have.
            note_error(scope, error)
            if record.status is not None:
                raise
            await error_response(error, scope)(scope, receive, answer)
        finally:
            if BROKEN_KEY in scope:
                # protocol.py has answered; what the route sent went nowhere.
                record.status, record.sent, record.error, record.left = scope[BROKEN_KEY], 0, "invalid_http", False
            self._metrics.observe_http(_route(scope), scope["method"], record)
            if log.isEnabledFor(logging.INFO):
                log.info(line(scope, record))


def _watched(receive: Receive, record: RequestRecord) -> Receive:
    async def watched() -> Message:
        message = await receive()
        if message["type"] == "http.disconnect" and not record.ended:
            record.left = True
        return message

    return watched


def _counted(send: Send, record: RequestRecord) -> Send:
    async def counted(message: Message) -> None:
        if message["type"] == "http.response.start":
            # A client that left gets no answer, whatever is made of its request.
            record.status = None if record.left else message["status"]
            MutableHeaders(scope=message)[ID_HEADER] = record.id
        elif record.status is None:
            pass
        else:
            record.sent += len(message.get("body", b""))
            record.ended = not message.get("more_body", False)
        await send(message)

    return counted


def _route(scope: Scope) -> str:
    """The route's template, never a path that a client made up."""
    return getattr(scope.get("route"), "path", "other")


def line(scope: Scope, record: RequestRecord) -> str:
    """One JSON object in printable ASCII: nothing in it can end the line or steer a terminal. What is None is left out.

    No query, no header but the id, and nothing of the bodies.
    """
    client = scope.get("client")
    now = datetime.datetime.now(datetime.UTC)
    fields = {
        "time": now.isoformat(timespec="milliseconds"),
        "id": record.id,
        "client": client[0] if client else None,
        "key": record.key.name if record.key else None,
        "method": scope["method"][:16],
        "path": scope["path"][:MAX_PATH_CHARS],
        "status": record.status,
        "bytes": record.sent,
        "ms": round((time.perf_counter() - record.start) * 1000, 1),
        "model": record.model,
        "prompt_tokens": record.prompt_tokens or None,
        "cached_tokens": record.cached_tokens or None,
        "completion_tokens": record.completion_tokens or None,
        "error": record.error,
        "allow": record.allow,
        "left": record.left or None,
    }
    kept = {name: value for name, value in fields.items() if value is not None}
    return json.dumps(kept, separators=(",", ":"))
