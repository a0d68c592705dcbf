"""What POST /v1/responses may hold."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.chat import ChatTask
from mlxinfer.server.openai.fields import SamplingFields, Strict
from mlxinfer.server.openai.responses.items import ITEMS, messages_of
from mlxinfer.server.openai.structured import Schema, schema_grammar
from mlxinfer.server.openai.template import checked_kwargs, effort_kwargs
from mlxinfer.server.openai.tools import (
    MAX_TOOLS,
    AllowedTools,
    Function,
    NamedTool,
    ToolChoice,
    ToolName,
    choose,
)
from mlxinfer.types import MAX_TOP_LOGPROBS, Grammar

LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip
"""Only the log probabilities are ever there; the others ask for parts of what this server does not make."""

INPUT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"anyOf": [item.model_json_schema() for item in ITEMS.values()]}},
    ]
}
"""For the OpenAPI document; `messages_of` is what reads it."""


class FunctionTool(Function):
    """A function, flat; other kinds of tools would run on OpenAI's machines."""

    type: Literal["function"]


class _Choice(Strict):
    type: Literal["function"]
    name: ToolName


class _AllowedChoice(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[_Choice], Field(min_length=1, max_length=MAX_TOOLS)]


class PlainFormat(Strict):
    type: Literal["text", "json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[Schema, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None
    """Obeyed either way."""


class TextConfig(Strict):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted; a template knows of none."""

    def grammar(self) -> Grammar | None:
        """Raises InvalidRequestError for a schema that is too large."""
        if isinstance(self.format, SchemaFormat):
            return schema_grammar("text.format.schema", self.format.schema_)
        if self.format is not None and self.format.type == "json_object":
            return Grammar("json_object")
        return None


class Reasoning(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Accepted; the reasoning itself is in the answer."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = None


class ResponseRequest(SamplingFields):
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "max_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
            "safety_identifier", "service_tier", "user",
        }
    )  # fmt: skip
    off: ClassVar[dict[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "prompt": (),
    }

    input: Annotated[Any, WithJsonSchema(INPUT)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    include: list[Includable] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[_Choice | _AllowedChoice, Field(discriminator="type")] | None
    ) = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def token_limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens

    def own_messages(self) -> tuple[dict[str, Any], ...]:
        """Of the input alone. Raises InvalidRequestError."""
        if isinstance(self.input, str):
            return ({"role": "user", "content": self.input},)
        if not isinstance(self.input, list):
            raise InvalidRequestError("input must be a string or a list of items", param="input")
        found = tuple(messages_of(self.input))
        if not found and self.previous_response_id is None:
            raise InvalidRequestError("input has no items that make a message", param="input")
        return found

    def with_logprobs(self) -> bool:
        """Whether log probabilities are asked for."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def task(self) -> ChatTask:
        """With the input's messages only. Raises InvalidRequestError."""
        tools, choice = self._chosen_tools()
        text = self.text or TextConfig()
        return ChatTask(
            messages=self.own_messages(),
            params=self.sampling(
                logprobs=(self.top_logprobs or 0) if self.with_logprobs() else None, grammar=text.grammar()
            ),
            grammar_field="text.format",
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            template_kwargs=effort_kwargs(self.reasoning.effort if self.reasoning else None)
            | checked_kwargs(self.chat_template_kwargs or {}),
            priority=self.priority,
        )

    def _chosen_tools(self) -> tuple[tuple[dict[str, Any], ...], str]:
        specs = [
            {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
            for tool in self.tools or ()
        ]
        return choose(specs, _as_chat_choice(self.tool_choice))


def _as_chat_choice(choice: Any) -> ToolChoice:
    """The same in the shape of chat completions, which puts names one level deeper."""
    if isinstance(choice, _Choice):
        return _named(choice)
    if isinstance(choice, _AllowedChoice):
        allowed = {"mode": choice.mode, "tools": [_named(one).model_dump() for one in choice.tools]}
        return AllowedTools.model_validate({"type": "allowed_tools", "allowed_tools": allowed})
    return choice


def _named(choice: _Choice) -> NamedTool:
    return NamedTool.model_validate({"type": "function", "function": {"name": choice.name}})
