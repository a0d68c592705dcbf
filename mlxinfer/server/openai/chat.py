"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import functools
import secrets
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import Response  # noqa: TC002

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.chat import ChatRun, ChatTask, Finish, LogprobsPart, start_chat
from mlxinfer.server.openai.fields import CompletionFields
from mlxinfer.server.openai.logprobs import TokenTexts
from mlxinfer.server.openai.messages import ChatMessage  # noqa: TC001 (pydantic reads the annotations)
from mlxinfer.server.openai.respond import completion_frame, read, streamed, usage_object, whole
from mlxinfer.server.openai.structured import StructuredFields
from mlxinfer.server.openai.template import checked_kwargs, effort_kwargs
from mlxinfer.server.openai.tools import ToolFields
from mlxinfer.server.openapi import reads
from mlxinfer.server.state import state_of
from mlxinfer.tokenizer.replies import ReasoningPart, TextPart, ToolCallArguments, ToolCallEnd, ToolCallStart
from mlxinfer.types import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from mlxinfer.server.chat import ChatPart, Collected
    from mlxinfer.types import Usage

router = APIRouter()
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatRequest(CompletionFields, StructuredFields, ToolFields):
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
            "safety_identifier", "service_tier", "store", "user", "verbosity",
        }
    )  # fmt: skip
    off: ClassVar[dict[str, tuple[Any, ...]]] = {
        "audio": (),
        "best_of": (1,),
        "echo": (False,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "suffix": ("",),
        "web_search_options": (),
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    """Handed to the chat template, where those that know it read it."""

    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().token_limit()
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens {self.max_completion_tokens}; send one",
                param="max_tokens",
            )
        return "max_completion_tokens", self.max_completion_tokens

    def task(self) -> ChatTask:
        """Raises InvalidRequestError for fields that don't go together or are out of range."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        tools, choice = self.chosen_tools()
        field, grammar = self.form()
        return ChatTask(
            messages=tuple(message.for_template(i) for i, message in enumerate(self.messages)),
            params=self.sampling(logprobs=(self.top_logprobs or 0) if self.logprobs else None, grammar=grammar),
            grammar_field=field,
            n=self.n or 1,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            template_kwargs=effort_kwargs(self.reasoning_effort) | checked_kwargs(self.chat_template_kwargs or {}),
            priority=self.priority,
        )


@router.post("/v1/chat/completions", openapi_extra=reads(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Messages in, the assistant's reply out."""
    state = state_of(request)
    body, task, ignored = await read(request, state, ChatRequest, ChatRequest.task)
    run = await start_chat(request, state, body.model, task)
    answer = ChatAnswer(run, body.top_logprobs or 0)
    if body.stream:
        return streamed(answer.chunks(body.include_usage()), ignored, run.end, head=run.n)
    return await whole(request, answer.whole(), ignored, run.end, is_large=bool(body.logprobs))


class ChatAnswer:
    """A run as chat.completion, whole or in chunks."""

    def __init__(self, run: ChatRun, top_logprobs: int) -> None:
        self._run = run
        self._top = top_logprobs
        self._texts = TokenTexts(run.tokenizer)
        self._frame = functools.partial(completion_frame, id=f"chatcmpl-{run.id}", created=run.created, model=run.model)

    async def whole(self) -> dict[str, Any]:
        """Raises the first error of any choice."""
        found = await self._run.collect()
        choices = [self._choice(i, c) for i, c in enumerate(found)]
        usages = [c.finish.usage for c in found]
        return self._frame("chat.completion", choices=choices) | {"usage": usage_object(usages[:1], usages)}

    def _choice(self, index: int, found: Collected) -> dict[str, Any]:
        calls = [
            {"id": call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in found.tool_calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": found.text or (None if calls else "")}
        message["refusal"] = None
        if found.reasoning:
            message["reasoning_content"] = found.reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = self._logprobs(LogprobsPart(tuple(found.logprobs))) if found.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": found.finish.reason}

    def _logprobs(self, part: LogprobsPart | None) -> dict[str, Any] | None:
        return None if part is None else {"content": self._texts.chat(part.tokens, self._top), "refusal": None}

    async def chunks(self, include_usage: bool) -> AsyncGenerator[dict[str, Any] | None]:
        """chat.completion.chunk objects, None in a silence."""
        blank: dict[str, Any] = {"usage": None} if include_usage else {}
        usages: dict[int, Usage] = {}
        held: dict[int, LogprobsPart] = {}
        async with contextlib.aclosing(self._run.parts()) as parts:
            for index in range(self._run.n):
                yield self._chunk(index, {"role": "assistant", "content": ""}) | blank
            async for item in parts:
                if item is None:
                    yield None
                    continue
                index, part = item
                match part:
                    case LogprobsPart():
                        # Text that may begin a stop string comes later, with what follows it.
                        held[index] = LogprobsPart((*held[index].tokens, *part.tokens)) if index in held else part
                    case Finish():
                        usages[index] = part.usage
                        yield self._chunk(index, {}, held.pop(index, None), part.reason) | blank
                    case TextPart():
                        yield self._chunk(index, {"content": part.text}, held.pop(index, None)) | blank
                    case _:
                        if delta := _delta(part):
                            yield self._chunk(index, delta) | blank
        if include_usage:
            yield self._frame("chat.completion.chunk", choices=[]) | {
                "usage": usage_object([usages[0]], list(usages.values()))
            }

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: LogprobsPart | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(logprobs), "finish_reason": reason}
        return self._frame("chat.completion.chunk", choices=[choice])


def _delta(part: ChatPart) -> dict[str, Any]:
    match part:
        case ReasoningPart():
            return {"reasoning_content": part.text}
        case ToolCallStart():
            function: dict[str, Any] = {"name": part.name, "arguments": ""}
            call = {"index": part.index, "id": call_id(), "type": "function", "function": function}
        case ToolCallArguments():
            call = {"index": part.index, "function": {"arguments": part.text}}
        case ToolCallEnd():
            return {}
        case _:
            raise AssertionError(part)
    return {"tool_calls": [call]}


def call_id() -> str:
    """Of one tool call; a client sends it back with the result."""
    return f"call_{secrets.token_hex(12)}"
