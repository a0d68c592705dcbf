"""HTTP/1.1 on a connection: uvicorn's protocol with time limits and with OpenAI's error shape for broken requests."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from mlxinfer.server.errors import error_object
from mlxinfer.server.record import BROKEN_KEY

if TYPE_CHECKING:
    from asyncio import TimerHandle
    from collections.abc import Callable

log = logging.getLogger("mlxinfer.server")

STATUSES = (400, 431, 501)
"""What broken HTTP is answered with; h11 suggests one."""


def protocol(timeout_s: float, max_connections: int, refused: Callable[[str], None]) -> type[H11Protocol]:
    """A protocol that gives clients `timeout_s` to send a request's headers, and, when it was answered before it was
    read, the rest of its body. A body that is read has a limit of its own (body.py).

    Connections beyond `max_connections` get a 503, so that files can still be opened. `refused` hears the code of
    what never becomes a request.
    """

    class Protocol(H11Protocol):
        _due: TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                text = f"this server holds {max_connections} connections already; try again later"
                self._answer(503, text, "too_many_connections")
            else:
                self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            # What is left of a body is read and dropped, so that the client sees the answer and not a reset.
            self._arm()
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            if self.transport.is_closing():
                return
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.close()  # an answer is on its way; there is no room for another
                return
            error = sys.exc_info()[1]
            status = getattr(error, "error_status_hint", 400)
            status = status if status in STATUSES else 400
            if self.cycle is not None and not self.cycle.response_complete:
                # Its route may not care for the body, and would send a second answer.
                self.scope[BROKEN_KEY] = status  # pyright: ignore[reportGeneralTypeIssues]
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._answer(status, f"the request is not valid HTTP: {error or msg}", "invalid_http")

        def _answer(self, status: int, text: str, code: str) -> None:
            """An answer without a request, and the end of the connection."""
            log.warning("refused a connection of %s: %s", (self.client or ("?",))[0], ascii(text)[1:201])
            refused(code)
            body = json.dumps(error_object(status, text, code=code)).encode("ascii")
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _unsupported_upgrade_warning(self) -> None:
            """An upgrade that nobody offers is ignored, as HTTP has it."""

        def _arm(self) -> None:
            self._disarm()
            self._due = self.loop.call_later(timeout_s, self._overdue)

        def _disarm(self) -> None:
            if self._due is not None:
                self._due.cancel()
                self._due = None

        def _overdue(self) -> None:
            idle = self.cycle is None or self.cycle.response_complete
            if idle and not self.transport.is_closing():
                self.transport.close()

    return Protocol
