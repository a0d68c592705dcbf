"""Tools a chat may call, and which of them it must."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.openai.fields import Strict
from mlxinfer.types import MAX_GRAMMAR_BYTES

MAX_TOOLS = 128
MAX_DESCRIPTION = 1 << 16
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Strict):
    name: ToolName
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Arguments obey the schema wherever a call is forced, whatever this says."""

    @field_validator("parameters")
    @classmethod
    def _bounded(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        size = len(json.dumps(schema).encode())
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"the schema has {size:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are read")
        return schema


class Tool(Strict):
    type: Literal["function"]
    function: Function


class _Name(Strict):
    name: ToolName


class NamedTool(Strict):
    type: Literal["function"]
    function: _Name


class _Allowed(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


ToolChoice = (
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")] | None
)


class ToolFields(Strict):
    """Mixed into a request that may offer tools."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    def chosen_tools(self) -> tuple[tuple[dict[str, Any], ...], str]:
        """(tools, choice) as ChatTask has them. Raises InvalidRequestError for a choice that can't be met."""
        specs = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return choose(specs, self.tool_choice)


def choose(tools: list[dict[str, Any]], choice: ToolChoice) -> tuple[tuple[dict[str, Any], ...], str]:
    """(tools that may be called, choice as ChatTask has it). Raises InvalidRequestError."""
    for tool in tools:
        # Templates print it and fail where it is missing.
        tool["function"].setdefault("parameters", {"type": "object", "properties": {}})
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise InvalidRequestError(f"tools has the name {twice} twice", param="tools")
    if isinstance(choice, AllowedTools):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        _check_known(allowed, names)
        return tuple(t for t in tools if t["function"]["name"] in allowed), choice.allowed_tools.mode
    if isinstance(choice, NamedTool):
        _check_known([choice.function.name], names)
        return tuple(tools), f"function:{choice.function.name}"
    if choice == "required" and not tools:
        raise InvalidRequestError("tool_choice asks for a call and there are no tools", param="tool_choice")
    return tuple(tools), choice or "auto"


def _check_known(wanted: list[str], names: list[str]) -> None:
    for name in wanted:
        if name not in names:
            raise InvalidRequestError(f"tool_choice names {name}, which is not among the tools", param="tool_choice")
