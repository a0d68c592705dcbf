"""Who may talk to the server: Host, Origin, bearer key and content type, before any route runs.

A web page can make a browser send requests to 127.0.0.1. Host stops pages whose domain was pointed at us, Origin stops
foreign pages, and the content type makes every cross-site POST one that the browser must ask about first.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from mlxinfer.server.errors import HttpError, error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from mlxinfer.server.options import ServerOptions

PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "authorization, content-type",
    "access-control-max-age": "600",
}
MAX_HEADER_ECHO = 80


class Guard:
    """ASGI middleware in front of everything."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        try:
            self._check_host(headers)
            self._check_origin(headers)
            if scope["method"] == "OPTIONS" and origin is not None:
                response = Response(status_code=204, headers=PREFLIGHT)
            else:
                self._check_key(scope["path"], headers)
                self._check_content_type(scope["method"], headers)
                response = self._app
        except HttpError as error:
            response = error_response(error)
        await response(scope, receive, _with_cors(send, origin) if origin is not None else send)

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not self._options.answers_to(name):
            raise HttpError(
                421,
                f"this server does not answer to the host {', '.join(hosts)!r:.{MAX_HEADER_ECHO}}; "
                "start it with that name among the allowed hosts if it is yours",
                code="wrong_host",
            )

    def _check_origin(self, headers: Headers) -> None:
        for origin in headers.getlist("origin"):
            own = origin.lower() in (f"http://{headers['host'].lower()}", f"https://{headers['host'].lower()}")
            if not own and origin.lower() not in self._options.allowed_origins:
                raise HttpError(
                    403,
                    f"web pages of origin {origin!r:.{MAX_HEADER_ECHO}} may not call this server",
                    code="foreign_origin",
                )

    def _check_key(self, path: str, headers: Headers) -> None:
        key = self._options.api_key
        if key is None or path in ("/health", "/ready"):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Latin-1 is how header bytes were decoded; compare_digest takes the same time wherever they differ.
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
            raise HttpError(
                401,
                "this server needs its API key: send Authorization: Bearer …",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_content_type(self, method: str, headers: Headers) -> None:
        # Without an Origin it is no browser; curl's examples send a form type.
        if method != "POST" or "origin" not in headers:
            return
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(
                415, f"the content type is {kind!r:.{MAX_HEADER_ECHO}}; send application/json", code="content_type"
            )


def _host_name(header: str) -> str | None:
    """The name in a Host header, lower case, without port and brackets."""
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port
    except ValueError:
        return None
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return None
    return parts.hostname


def _with_cors(send: Send, origin: str) -> Send:
    async def wrapped(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] not in (403, 421):
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers.add_vary_header("origin")
        await send(message)

    return wrapped
