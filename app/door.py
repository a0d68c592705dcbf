"""The door of the page: who has the key of this start may come in, through what the page needs and nothing else.

127.0.0.1 is open to every user of the machine, and conversations are private. The link that `mlxinfer app` prints holds
a random key; it becomes a cookie. Host and Origin were looked at before, by the server's Guard.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from mlxinfer.app import theme
from mlxinfer.app.attachments import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

PATH = "/app"
MAX_UPLOAD_BYTES = MAX_BYTES + (1 << 20)
"""Of one upload with what multipart puts around it."""
MAX_CALL_BYTES = 8 << 20
"""Of one event of the page: a message that was typed or pasted."""
_LANGUAGE = re.compile(r"(en|ja)/(.*)", re.DOTALL)
_OPEN = {
    "GET": re.compile(
        r"(?:|config|theme\.css|favicon\.ico|(?:assets|static)/[\w./-]+"
        r"|gradio_api/(?:queue/data|startup-events|upload_progress|heartbeat/[\w-]+))"
    ),
    "POST": re.compile(r"gradio_api/(?:queue/join|upload|cancel|reset|component_server/?|run/predict)"),
}
"""What the page asks for; its panels call their events without the queue (run/predict) and functions of their own
(component_server). Gradio has more: file routes, a proxy, calls by name, editors of its own code."""
_OURS = {
    "GET": re.compile(r"export/[0-9a-f]{32}\.(?:md|json)"),
    "POST": re.compile(r"stop/[0-9a-f]{32}|theme/(?:light|dark)"),
}
"""Routes of our own (app/mount.py)."""
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
"""Nothing a reply says can make the browser ask another machine, whatever the page's sanitizer lets through."""
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def new_key() -> str:
    return secrets.token_urlsafe(32)


class Door:
    """ASGI middleware: guards everything below PATH, and leaves the rest alone."""

    def __init__(self, app: ASGIApp, key: str, languages: Sequence[str], chosen: Callable[[], str]) -> None:
        """`chosen` gives the theme that the page is to have, "" for the system's."""
        self._app, self._key, self._languages, self._chosen = app, key.encode(), tuple(languages), chosen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (scope["path"] == PATH or scope["path"].startswith(f"{PATH}/")):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = cookie_name(scope)
        rest = scope["path"].removeprefix(PATH).removeprefix("/")
        if not rest and (given := parse_qs(scope["query_string"].decode("latin-1")).get("key")):
            answer = self._welcome(name, given[0], headers)
        elif not self._is(_cookie(headers, name)):
            answer = _told(401, "This is a private page. Open the link that `mlxinfer app` printed.")
        elif not rest:
            answer = RedirectResponse(f"{PATH}/{self._language(headers)}/", 303, HEADERS)
        else:
            answer = self._refusal(scope["method"], rest, headers)
        if answer is not None:
            await answer(scope, receive, send)
            return
        limit = MAX_UPLOAD_BYTES if rest.endswith("/upload") else MAX_CALL_BYTES
        exchange = _Exchange(receive, send, limit)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            # The HTTP edge. Callbacks run in Gradio's queue: what fails here is what it makes of such a request.
            if not exchange.refused:
                raise
            log.debug("refused %s %a", scope["method"], rest, exc_info=True)
        if exchange.too_large:
            await _told(413, f"the body has more than {limit:,} bytes")(scope, receive, send)
        elif exchange.failed:
            await _told(400, "the page can make nothing of this request")(scope, receive, send)

    def _welcome(self, name: str, given: str, headers: Headers) -> Response:
        if not self._is(given):
            return _told(401, "This link is of an earlier start. Open the one that `mlxinfer app` printed last.")
        answer = RedirectResponse(f"{PATH}/{self._language(headers)}/", 303, HEADERS)
        answer.set_cookie(name, self._key.decode(), path=PATH, httponly=True, samesite="strict")
        if chosen := self._chosen():
            answer.set_cookie(theme.COOKIE, chosen, path=PATH, samesite="strict")  # for the page's script
        return answer

    def _refusal(self, method: str, rest: str, headers: Headers) -> Response | None:
        """None for what the page needs."""
        length = headers.get("content-length", "0")
        if not length.isdigit() or len(length) > 15 or int(length) > MAX_UPLOAD_BYTES:
            return _told(413, f"the body has more than {MAX_UPLOAD_BYTES:,} bytes")
        if method in _OURS and _OURS[method].fullmatch(rest):
            return None
        if rest in self._languages:
            return RedirectResponse(f"{PATH}/{rest}/", 303, HEADERS)
        below = _LANGUAGE.fullmatch(rest)
        asked = _OPEN.get("GET" if method == "HEAD" else method)
        if below is None or below[1] not in self._languages:
            return _told(404, "there is no such page")
        if asked is None or ".." in below[2] or not asked.fullmatch(below[2]):
            return _told(404, "the page has nothing there")
        return None

    def _is(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._key)

    def _language(self, headers: Headers) -> str:
        return preferred(headers.get("accept-language", ""), self._languages)


def preferred(header: str, languages: Sequence[str]) -> str:
    """The one of `languages` that a browser would rather have, the first of them where it says nothing of any."""
    best, weight = languages[0], 0.0
    for part in header.split(","):
        tag, _, parameters = part.strip().partition(";")
        found = re.fullmatch(r"\s*q=([01](?:\.[0-9]{1,3})?)\s*", parameters)
        value = float(found[1]) if found else 1.0
        language = tag.strip().lower().partition("-")[0]
        if language in languages and value > weight:
            best, weight = language, value
    return best


def cookie_name(scope: Scope) -> str:
    """Cookies of one host are shared by all its ports; two apps at a time don't take each other's away."""
    server = scope.get("server")
    return f"mlxinfer_app_{server[1] if server else 0}"


def _cookie(headers: Headers, name: str) -> str:
    try:
        morsel = SimpleCookie("; ".join(headers.getlist("cookie"))).get(name)
    except CookieError:
        return ""
    return "" if morsel is None else morsel.value


def _told(status: int, text: str) -> Response:
    return PlainTextResponse(f"{text}\n", status, HEADERS)


class _Exchange:
    """One request and its answer: counts what arrives, puts the headers on what goes."""

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive, self._send, self._left = receive, send, limit
        self.failed = False
        """Gradio wanted to answer with a 5xx, which was kept back."""

    @property
    def too_large(self) -> bool:
        return self._left < 0

    @property
    def refused(self) -> bool:
        return self.too_large or self.failed

    async def receive(self) -> Message:
        if self.too_large:
            return {"type": "http.disconnect"}
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        return {"type": "http.disconnect"} if self.too_large else message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.failed = message["status"] >= 500
        if self.refused:
            return
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            # Gradio names the origin that asks, with credentials; nobody else's page is to be let in.
            for name in [name for name in headers if name.startswith("access-control-")]:
                del headers[name]
        await self._send(message)
