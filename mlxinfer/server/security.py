"""Who may talk to the server: Host, Origin, API key and content type, before any route runs.

A web page can make a browser send requests to 127.0.0.1. Host stops pages whose domain was pointed at us, Origin stops
foreign pages, and the content type makes every cross-site POST one that the browser must ask about first. Every refusal
is logged with the flag that would allow it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from mlxinfer.server.errors import HttpError, error_response
from mlxinfer.server.keys import ApiKey, Keyring
from mlxinfer.server.record import note_error, record_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from mlxinfer.server.keys import Allowance
    from mlxinfer.server.metrics import ServerMetrics
    from mlxinfer.server.options import ServerOptions

log = logging.getLogger("mlxinfer.server")

PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
    "access-control-max-age": "600",
}
ALLOWED_HEADERS = "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta"
EXPOSED_HEADERS = "x-request-id, x-mlxinfer-ignored, retry-after"
MAX_HEADER_ECHO = 80
_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9._-]{1,253}))(?::[0-9]{1,5})?")
_ABSOLUTE = re.compile(r"https?://([^/?#]*)(.*)", re.IGNORECASE | re.DOTALL)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9, _-]{1,1000}")


class RefusedError(HttpError):
    """A request that is turned away before its route; `allow` says what would let it in."""

    def __init__(self, status: int, message: str, *, code: str, allow: str, headers: dict[str, str] | None = None):
        super().__init__(status, message, code=code, headers=headers)
        self.allow = allow


class Guard:
    """ASGI middleware in front of every route."""

    def __init__(self, app: ASGIApp, options: ServerOptions, metrics: ServerMetrics) -> None:
        self._app = app
        self._options = options
        self._metrics = metrics
        own = () if options.api_key is None else (ApiKey.of("default", options.api_key),)
        self._keys = Keyring((*own, *options.keys))
        self.working = 0
        """Requests with a body that has arrived and an answer that has not ended. Bodies that stall are none."""
        self._turnstile = asyncio.Lock()
        self._open = {"/health", "/ready"} | ({"/metrics"} if options.metrics_open else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        entered, refused = None, False
        try:
            self._check_target(scope)
            self._check_host(headers)
            self._check_origin(headers)
            app = self._app
            if scope["method"] == "OPTIONS" and origin is not None:
                app = Response(status_code=204, headers=_preflight(headers))
            else:
                self._check_content_type(scope, headers)
                allowance = self._known(scope, headers)
                self._check_room(scope["method"], self.working)
                if allowance is not None:
                    allowance.enter()
                    entered = allowance
        except HttpError as error:
            app = error_response(error, scope)
            refused = error.code in ("wrong_host", "foreign_origin")
            self._note(scope, error)
        work = _Work(self, receive)
        try:
            if app is self._app and scope["method"] == "POST":
                app = await self._queued(scope, work)
            await app(scope, work.receive, send if origin is None or refused else _with_cors(send, origin))
        finally:
            self.working -= work.counted
            work.end()
            if entered is not None:
                entered.leave()

    def _note(self, scope: Scope, error: HttpError) -> None:
        record = record_of(scope)
        record.allow = getattr(error, "allow", None)
        note_error(scope, error)
        self._metrics.refused(error.code)
        who = (scope.get("client") or ("?",))[0]
        log.warning(
            "refused %s %a of %s (%s): %s%s",
            scope["method"][:16],
            scope["path"][:MAX_HEADER_ECHO],
            who,
            record.id,
            str(error).encode("ascii", "backslashreplace").decode(),
            f" [allowed by: {record.allow}]" if record.allow else "",
        )

    def _check_target(self, scope: Scope) -> None:
        """`GET http://host/path`: that host counts, as HTTP has it (RFC 9112, 3.2.2), and has to be ours."""
        match = _ABSOLUTE.fullmatch(scope["path"])
        if match is None:
            return
        self._check_name(match[1])
        scope["path"] = match[2] or "/"
        scope["raw_path"] = scope["path"].encode("utf-8", "replace")

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        self._check_name(hosts[0] if len(hosts) == 1 else ", ".join(hosts))

    def _check_name(self, host: str) -> None:
        name = host_name(host)
        if name is None or not self._options.answers_to(name):
            raise RefusedError(
                421,
                f"this server does not answer to the host {host[:MAX_HEADER_ECHO]!r}; "
                "start it with that name among the allowed hosts if it is yours",
                code="wrong_host",
                allow=f"--allow-host {name or 'NAME'}"[:MAX_HEADER_ECHO],
            )

    def _check_origin(self, headers: Headers) -> None:
        host = headers["host"].lower()
        for origin in headers.getlist("origin"):
            own = origin.lower() in (f"http://{host}", f"https://{host}")
            if not own and origin.lower() not in self._options.allowed_origins:
                named = origin if "://" in origin else "URL (not possible for a page without an address)"
                raise RefusedError(
                    403,
                    f"web pages of origin {origin[:MAX_HEADER_ECHO]!r} may not call this server",
                    code="foreign_origin",
                    allow=f"--allow-origin {named.encode('ascii', 'replace').decode()}"[:MAX_HEADER_ECHO],
                )
        # What <img> and <script> of a foreign page ask for comes without an Origin; browsers say so here.
        embedded = headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate"
        if embedded and "origin" not in headers:
            raise RefusedError(
                403,
                "a web page of another site may not embed what this server sends",
                code="foreign_origin",
                allow="a request with CORS, and --allow-origin",
            )

    def _known(self, scope: Scope, headers: Headers) -> Allowance | None:
        """What is left to the request's key; None: it needs none. Raises 401 without one that is known."""
        if not self._keys or scope["path"] in self._open or self._options.in_page(scope["path"]):
            return None
        allowance = self._keys.find(_secret(headers))
        if allowance is None:
            raise RefusedError(
                401,
                "this server needs its API key: send Authorization: Bearer … or x-api-key",
                code="invalid_api_key",
                allow="a key of MLXINFER_API_KEY or --keys",
                headers={"www-authenticate": "Bearer"},
            )
        record_of(scope).allowance = allowance
        return allowance

    def _check_room(self, method: str, before: int) -> None:
        """Beyond the queue a request costs its headers only, and hears so at once. `before`: how many are in front."""
        limit = self._options.max_requests
        if method == "POST" and limit is not None and before >= limit:
            raise RefusedError(
                429,
                f"{limit} requests run or wait already; try again in a moment",
                code="queue_full",
                allow="max_queue",
                headers={"retry-after": "1"},
            )

    async def _queued(self, scope: Scope, work: _Work) -> ASGIApp:
        """One by one: of many who come at once, those beyond the queue hear so before the others are worked on."""
        await work.peek()
        if not work.counted:
            return self._app
        try:
            self._check_room("POST", self.working - 1)
        except HttpError as error:
            self._note(scope, error)
            return error_response(error, scope)
        async with self._turnstile:
            await asyncio.sleep(0)
        return self._app

    def _check_content_type(self, scope: Scope, headers: Headers) -> None:
        # Without an Origin it is no browser; curl's examples send a form type.
        if scope["method"] != "POST" or "origin" not in headers:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        # Browsers ask nobody before they upload: the Origin, which was checked, and the page's door keep others out.
        uploads = kind == "multipart/form-data" and self._options.in_page(scope["path"])
        if kind != "application/json" and not uploads:
            raise RefusedError(
                415,
                f"the content type is {kind[:MAX_HEADER_ECHO]!r}; send application/json",
                code="content_type",
                allow="content-type: application/json",
            )


class _Work:
    """Counts a request as work once its body has arrived."""

    def __init__(self, guard: Guard, receive: Receive) -> None:
        self._guard = guard
        self._receive = receive
        self._first: asyncio.Future[Message] | None = None
        self.counted = False

    async def peek(self) -> None:
        """Count it now if its body is here already; waits for none."""
        self._first = asyncio.ensure_future(self._receive())
        await asyncio.sleep(0)
        if self._first.done():
            self._note(self._first.result())

    async def receive(self) -> Message:
        first, self._first = self._first, None
        message = await (self._receive() if first is None else first)
        self._note(message)
        return message

    def _note(self, message: Message) -> None:
        if not self.counted and message["type"] == "http.request" and not message.get("more_body", False):
            self.counted = True
            self._guard.working += 1

    def end(self) -> None:
        """Nobody receives any more."""
        if self._first is not None:
            self._first.cancel()


def _secret(headers: Headers) -> str:
    """The key as OpenAI's clients send it, or as Anthropic's do."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


def host_name(header: str) -> str | None:
    """The name in a Host header: lower case, without port, brackets and the root's dot. None: it is no such header."""
    match = _HOST.fullmatch(header.lower())
    if match is None:
        return None
    if match[1] is None:
        return match[2].removesuffix(".")
    try:
        return ipaddress.IPv6Address(match[1]).compressed
    except ValueError:
        return None


def _preflight(headers: Headers) -> dict[str, str]:
    """What an allowed page may send. Clients add headers of their own, so those it asks for are granted."""
    asked = headers.get("access-control-request-headers", "")
    granted = {"access-control-allow-headers": asked if _HEADER_NAMES.fullmatch(asked) else ALLOWED_HEADERS}
    if headers.get("access-control-request-private-network") == "true":
        granted["access-control-allow-private-network"] = "true"
    return PREFLIGHT | granted


def _with_cors(send: Send, origin: str) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = EXPOSED_HEADERS
            headers.add_vary_header("origin")
        await send(message)

    return wrapped
