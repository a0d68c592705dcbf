"""The messages of a chat, as clients send them and as chat templates read them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema, field_validator

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.openai.fields import Strict

_TEXTS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
        "additionalProperties": False,
    },
}
CONTENT = {"anyOf": [{"type": ["string", "null"]}, _TEXTS]}
"""For the OpenAPI document; `_check_content` is what reads it, with better messages."""
WITH_CONTENT: dict[str, Any] = {
    "anyOf": [
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
        {
            "required": ["tool_calls"],
            "properties": {"role": {"const": "assistant"}, "tool_calls": {"type": "array", "minItems": 1}},
        },
    ]
}
"""For the OpenAPI document; `for_template` is what checks it."""


class FunctionCall(Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    parsed_arguments: Any = None
    """As `parsed` of a message: what openai's helpers add to an answer, and send back with it."""


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = None


class ChatMessage(Strict):
    model_config = ConfigDict(json_schema_extra=WITH_CONTENT)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, WithJsonSchema(CONTENT)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    parsed: Any = None
    # What a client that sends an answer back may leave in it, empty.
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @field_validator("content")
    @classmethod
    def _check_content(cls, content: Any) -> Any:
        if content is None or isinstance(content, str):
            return content
        if not isinstance(content, list) or not content:
            raise ValueError("must be a string or a list of text parts")
        for part in content:
            if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
                raise ValueError("each part must be an object with a type")
            if kind != "text":
                raise ValueError(f"a part is of type {kind!r:.40}; this model reads text only")
            if set(part) != {"type", "text"} or not isinstance(part["text"], str):
                raise ValueError("a text part must have a string as its text, and nothing else")
        return content

    def for_template(self, index: int) -> dict[str, Any]:
        """The message as chat templates read it: without absent keys, tool arguments as objects."""
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise InvalidRequestError(
                f"messages[{index}].content is missing; only an assistant message with tool_calls may have none",
                param=f"messages[{index}].content",
            )
        message = self.model_dump(
            exclude_none=True, include={"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
        )
        if self.role == "developer":
            message["role"] = "system"
        message.setdefault("content", None)
        for call in message.get("tool_calls", ()):
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
            call["function"]["arguments"] = arguments(call["function"]["arguments"])
        return message


def arguments(text: str) -> Any:
    """Templates print a tool call's arguments as an object; what is not one stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
