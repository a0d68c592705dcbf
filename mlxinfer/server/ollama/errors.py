"""Failures as Ollama's clients read them: {"error": message}."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA: dict[str, Any] = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    "default": {"description": "What was wrong.", "content": {"application/json": {"schema": SCHEMA}}}
}
"""For the routes' `responses`."""


def as_ollama(body: Mapping[str, Any]) -> dict[str, Any]:
    """Ollama's error object out of OpenAI's."""
    return {"error": body["error"]["message"]}
