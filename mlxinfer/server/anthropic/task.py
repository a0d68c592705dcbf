"""From a request of Anthropic's to a chat task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.anthropic.messages import for_template
from mlxinfer.server.anthropic.schemas import MIN_THINKING_BUDGET, CountRequest, MessagesRequest
from mlxinfer.server.chat import ChatTask
from mlxinfer.server.openai.fields import parse
from mlxinfer.server.openai.structured import schema_grammar
from mlxinfer.server.shapes import renamed
from mlxinfer.types import SamplingParams

if TYPE_CHECKING:
    from mlxinfer.server.anthropic.schemas import Thinking
    from mlxinfer.types import Grammar

FORMAT = "output_config.format"
NAMES = {
    "stop": "stop_sequences",
    "grammar": FORMAT,
    "response_format": FORMAT,
}
"""What the rest of the server calls these fields, and Anthropic."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was checked as far as it can be without its model."""

    model: str | None
    task: ChatTask
    ignored: tuple[str, ...]
    stream: bool = False
    show_thinking: bool = True


def read_messages(body: dict[str, Any]) -> Asked:
    """A request of /v1/messages. Raises InvalidRequestError."""
    sent, ignored = parse(MessagesRequest, body)
    try:
        params = SamplingParams(
            max_tokens=sent.max_tokens,
            temperature=sent.temperature,
            top_p=sent.top_p,
            # More than any vocabulary is all of it; the arrays behind hold 32 bits.
            top_k=None if sent.top_k is None else min(sent.top_k, 2**31 - 1),
            stop=tuple(sent.stop_sequences or ()),
            grammar=_grammar(sent),
        )
    except InvalidRequestError as error:
        raise renamed(error, NAMES) from None
    kwargs, unread = _thinking(sent.thinking, sent.max_tokens)
    shown = sent.thinking is None or sent.thinking.display != "omitted"
    return Asked(sent.model, _task(sent, params, kwargs), (*ignored, *unread), bool(sent.stream), shown)


def read_count(body: dict[str, Any]) -> Asked:
    """A request of /v1/messages/count_tokens. Raises InvalidRequestError."""
    sent, ignored = parse(CountRequest, body)
    kwargs, unread = _thinking(sent.thinking, None)
    return Asked(sent.model, _task(sent, SamplingParams(), kwargs), (*ignored, *unread))


def _task(sent: CountRequest, params: SamplingParams, kwargs: dict[str, Any]) -> ChatTask:
    if sent.output_config is not None and sent.output_config.effort is not None:
        kwargs = {"reasoning_effort": sent.output_config.effort, **kwargs}
    choice = sent.tool_choice
    tools = tuple(tool.as_openai(i) for i, tool in enumerate(sent.tools or ()))
    if len({tool["function"]["name"] for tool in tools}) != len(tools):
        raise InvalidRequestError("tools has two tools of the same name", param="tools")
    return ChatTask(
        messages=for_template(sent.system, sent.messages),
        params=params,
        grammar_field=FORMAT,
        tools=tools,
        tool_choice=_tool_choice(sent),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        template_kwargs=kwargs,
        fit_max_tokens=True,
    )


def _tool_choice(sent: CountRequest) -> str:
    choice = sent.tool_choice
    if choice is None:
        return "auto"
    if (choice.type == "tool") != (choice.name is not None):
        raise InvalidRequestError('tool_choice.name belongs to the type "tool", and only there', param="tool_choice")
    return {"auto": "auto", "none": "none", "any": "required"}.get(choice.type) or f"function:{choice.name}"


def _grammar(sent: CountRequest) -> Grammar | None:
    config = sent.output_config
    wanted = sent.output_format if config is None or config.format is None else config.format
    return None if wanted is None else schema_grammar(FORMAT, wanted.json_schema)


def _thinking(thinking: Thinking | None, max_tokens: int | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(what the template is told, fields that nothing heeds)."""
    if thinking is None:
        return {}, ()
    budget = thinking.budget_tokens
    if thinking.type != "enabled":
        if budget is not None:
            raise InvalidRequestError(
                'thinking.budget_tokens belongs to the type "enabled"', param="thinking.budget_tokens"
            )
        return {"enable_thinking": thinking.type != "disabled"}, ()
    if budget is None or budget < MIN_THINKING_BUDGET or (max_tokens is not None and budget >= max_tokens):
        raise InvalidRequestError(
            f"thinking.budget_tokens must be an integer, at least {MIN_THINKING_BUDGET} and less than max_tokens",
            param="thinking.budget_tokens",
        )
    # Few templates read a budget; nothing else ends the thinking early.
    return {"enable_thinking": True, "thinking_budget": budget}, ("thinking.budget_tokens",)
