"""Errors in the words of the API they belong to: OpenAI's, Anthropic's or Ollama's, told by path and headers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer.server.anthropic.errors import as_anthropic, request_id_of
from mlxinfer.server.ollama.errors import as_ollama

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Scope

    from mlxinfer.errors import InvalidRequestError


def shaped(
    scope: Scope, status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """(body, headers) of an error answer as the client of this request reads it; `body` is OpenAI's error object."""
    found = dict(headers or {})
    path = scope.get("path", "")
    if path == "/api" or path.startswith("/api/"):
        return as_ollama(body), found
    if path.startswith("/v1/messages") or any(name == b"anthropic-version" for name, _ in scope.get("headers", ())):
        request_id = request_id_of(scope)
        return as_anthropic(status, body, request_id), {**found, "request-id": request_id}
    return body, found


def renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """The same error, with the field it names called as the client calls it: `names` maps our fields to its own."""
    ours, text = error.param or "", str(error)
    if ours not in names:
        return error
    theirs = names[ours]
    message = theirs + text.removeprefix(ours) if text.startswith(f"{ours} ") else f"{theirs}: {text}"
    return type(error)(message, param=theirs)
