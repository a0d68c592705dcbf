"""Every failure as OpenAI's error object: {"error": {"message", "type", "param", "code"}}; see shapes.py for others."""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from mlxinfer.errors import MlxinferError
from mlxinfer.server.record import note_error, record_of
from mlxinfer.server.shapes import shaped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.types import Scope

log = logging.getLogger("mlxinfer.server")

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class HttpError(MlxinferError):
    """A refusal that only exists over HTTP: a foreign host, a body that is too large, …"""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


def error_object(status: int, message: str, *, code: str, param: str | None = None) -> dict[str, Any]:
    """The body of an error response, and the payload of an error event in a stream."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: BaseException, request_id: str = "?") -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) for any exception. What isn't ours is logged, with the request's id, and not shown."""
    if isinstance(error, MlxinferError):
        headers = dict(getattr(error, "headers", {}))
        if (retry := getattr(error, "retry_after", None)) is not None:
            headers["retry-after"] = str(max(1, math.ceil(retry)))
        body = error_object(error.status, str(error), code=error.code, param=getattr(error, "param", None))
        return error.status, body, headers
    log.error("request %s: unexpected error", request_id, exc_info=error)
    return 500, error_object(500, "internal error; the server's log has the details", code="internal_error"), {}


def json_response(body: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in pure ASCII: text from a client or a model may hold what UTF-8 cannot encode."""
    text = json.dumps(body, allow_nan=False, separators=(",", ":"))
    return Response(text, status_code=status, headers=dict(headers or {}), media_type="application/json")


def error_response(error: BaseException, scope: Scope) -> Response:
    """The answer to a request that failed, in the words of the API it was made to."""
    status, body, headers = describe(error, record_of(scope).id)
    return _answer(scope, status, body, headers)


def _answer(scope: Scope, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None) -> Response:
    body, headers = shaped(scope, status, body, headers)
    return json_response(body, status=status, headers=headers)


def install(app: FastAPI) -> None:
    """Send our exceptions and the router's through `error_response`; access.py answers what is left."""

    async def ours(request: Request, error: Exception) -> Response:
        note_error(request.scope, error)
        return error_response(error, request.scope)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {
            404: f"there is nothing at {request.url.path!r:.200}",
            405: f"{request.method} is not possible here",
        }.get(error.status_code, str(error.detail))
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        body = error_object(error.status_code, message, code=code)
        record_of(request.scope).error = code
        return _answer(request.scope, error.status_code, body, error.headers)

    app.add_exception_handler(MlxinferError, ours)
    app.add_exception_handler(HTTPException, http)
