"""Failures as Anthropic's clients read them: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer.server.record import record_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Scope

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    "default": {"description": "What was wrong.", "content": {"application/json": {"schema": SCHEMA}}}
}
"""For the routes' `responses`."""


def as_anthropic(status: int, body: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """Anthropic's error object out of OpenAI's."""
    kind = TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": body["error"]["message"]},
        "request_id": request_id,
    }


def request_id_of(scope: Scope) -> str:
    """The one that the access log has."""
    return record_of(scope).id
