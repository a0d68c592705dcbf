"""What a request to /v1/messages may hold."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.openai.fields import RequestFields, Strict
from mlxinfer.types import MAX_GRAMMAR_BYTES

MAX_TOOLS = 256
MIN_THINKING_BUDGET = 1024
"""Anthropic's own."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    name: str | None = None


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None
    """Accepted: an advice to a model that was trained to read it."""


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Tool(Strict):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    # Hints that ask for nothing here: prompts are cached anyway, arguments are streamed anyway, all tools are loaded.
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: list[dict[str, Any]] | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _TOOL_NAME.fullmatch(name):
            raise ValueError(f"{name!r:.80} must be 1 to 128 letters, digits, _ or -")
        return name

    @field_validator("type")
    @classmethod
    def _check_type(cls, kind: str | None) -> str | None:
        if kind not in (None, "custom"):
            raise ValueError(f"{kind!r:.80} is a tool of Anthropic's own; this server has none of them")
        return kind

    @field_validator("input_schema")
    @classmethod
    def _check_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and (size := len(json.dumps(schema))) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"the schema has {size:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are read")
        return schema

    def as_openai(self, index: int) -> dict[str, Any]:
        """The tool in the shape templates read."""
        if self.input_schema is None or self.input_schema.get("type", "object") != "object":
            where = f"tools[{index}].input_schema"
            raise InvalidRequestError(f'{where} must be a JSON schema of "type": "object"', param=where)
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.input_schema
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class CountRequest(RequestFields):
    """The fields that make up a prompt."""

    # Prompts are cached without being asked; the edits of context_management only shorten what a client sent in full.
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "billing_policy", "cache_control", "context_management", "diagnostics", "fallback_credit_token",
            "fallbacks", "inference_geo", "metadata", "service_tier", "speed", "user_profile_id", "workspace_id",
        }
    )  # fmt: skip
    off: ClassVar[dict[str, tuple[Any, ...]]] = {"compaction": (), "container": (), "mcp_servers": ([],), "thread": ()}

    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The earlier place of output_config.format."""


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stream: bool | None = None
