"""From a request of Ollama's to a chat task, or to a text that is continued as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.chat import ChatTask
from mlxinfer.server.ollama.options import keep_seconds, sampling, think_kwargs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.server.ollama.schemas import ChatRequest, GenerateRequest, Message
    from mlxinfer.types import SamplingParams


@dataclass(frozen=True, slots=True)
class RawText:
    """A prompt without a chat template."""

    text: str
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was checked as far as it can be without its model."""

    model: str | None
    task: ChatTask | RawText | None
    """None: the model is to be loaded, or unloaded, and nothing else."""
    keep_s: float | None
    ignored: tuple[str, ...]
    stream: bool
    top_logprobs: int


def read_chat(body: ChatRequest) -> Asked:
    """Raises InvalidRequestError."""
    params, ignored = sampling(body.options or {}, body.format, body.wanted_logprobs())
    task = None
    if body.messages:
        task = ChatTask(
            messages=messages_for_template(body.messages),
            params=params,
            grammar_field="format",
            tools=tuple(tool.model_dump(exclude_none=True) for tool in body.tools or ()),
            template_kwargs=think_kwargs(body.think),
            fit_max_tokens=True,
        )
    return Asked(body.model, task, keep_seconds(body.keep_alive), ignored, body.streams, body.top_logprobs or 0)


def read_generate(body: GenerateRequest) -> Asked:
    """Raises InvalidRequestError."""
    params, ignored = sampling(body.options or {}, body.format, body.wanted_logprobs())
    task = None
    if body.prompt and body.raw:
        if body.system:
            raise InvalidRequestError("a raw prompt has no system text; put it into the prompt", param="system")
        task = RawText(body.prompt, params)
    elif body.prompt:
        system = ({"role": "system", "content": body.system},) if body.system else ()
        task = ChatTask(
            messages=(*system, {"role": "user", "content": body.prompt}),
            params=params,
            grammar_field="format",
            template_kwargs=think_kwargs(body.think),
            fit_max_tokens=True,
        )
    return Asked(body.model, task, keep_seconds(body.keep_alive), ignored, body.streams, body.top_logprobs or 0)


def messages_for_template(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Ollama's calls have no ids and its results name the tool: results are given to the calls in their order."""
    made: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []
    for i, message in enumerate(messages):
        one: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.role == "assistant":
            if message.thinking:
                one["reasoning_content"] = message.thinking
            if message.tool_calls:
                one["tool_calls"] = [
                    {
                        "id": call.id or f"call_{i}_{j}",
                        "type": "function",
                        "function": {"name": call.function.name, "arguments": call.function.arguments},
                    }
                    for j, call in enumerate(message.tool_calls)
                ]
                open_calls = [(call["id"], call["function"]["name"]) for call in one["tool_calls"]]
        elif message.tool_calls:
            raise InvalidRequestError(
                f"messages[{i}].tool_calls belong to the assistant", param=f"messages[{i}].tool_calls"
            )
        elif message.role == "tool":
            call_id, name = _answered(message, open_calls)
            one |= {"tool_call_id": call_id} | ({"name": name} if name else {})
        made.append(one)
    return tuple(made)


def _answered(message: Message, open_calls: list[tuple[str, str]]) -> tuple[str, str]:
    """(id, name) of the call that a tool message answers; it is open no more."""
    name = message.tool_name or message.name
    for i, (call_id, called) in enumerate(open_calls):
        if (call_id == message.tool_call_id) if message.tool_call_id else (name in (None, called)):
            del open_calls[i]
            return call_id, called
    return message.tool_call_id or "", name or ""
