"""One response, whole or event by event."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

from mlxinfer.server.chat import Finish
from mlxinfer.server.openai.logprobs import TokenTexts
from mlxinfer.server.openai.messages import arguments
from mlxinfer.server.openai.responses.output import Output

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from mlxinfer.server.chat import ChatRun
    from mlxinfer.server.openai.responses.request import ResponseRequest
    from mlxinfer.types import Usage

    Messages = tuple[dict[str, Any], ...]


class ResponseAnswer:
    """A run as a response object. `keep` is called with it and with the conversation when it has ended well."""

    def __init__(
        self,
        run: ChatRun,
        body: ResponseRequest,
        conversation: Messages,
        keep: Callable[[dict[str, Any], Messages], None] | None,
    ) -> None:
        self._run = run
        self._conversation = conversation
        self._keep = keep
        self._output = Output(TokenTexts(run.tokenizer), body.top_logprobs or 0)
        self._sequence = 0
        self._head = _head(run, body)

    @property
    def id(self) -> str:
        return self._head["id"]

    async def whole(self) -> dict[str, Any]:
        """Raises the first error."""
        last: dict[str, Any] = {}
        async with contextlib.aclosing(self.events()) as events:
            async for event in events:
                last = event or last
        return last["response"]

    async def events(self) -> AsyncGenerator[dict[str, Any] | None]:
        """Every event in its order, None in a silence. The last one's `response` is the whole."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        finish: Finish | None = None
        async with contextlib.aclosing(self._run.parts()) as parts:
            async for item in parts:
                if item is None:
                    yield None
                    continue
                _, part = item
                for event in self._output.take(part):
                    yield self._numbered(event)
                if isinstance(part, Finish):
                    finish = part
        assert finish is not None, "a run ends with a Finish or an error"
        response = self._ended(finish)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """The last event of a stream in which something went wrong: `told` is the error object."""
        error = told["error"]
        response = self._response("failed") | {"error": {"code": error["code"], "message": error["message"]}}
        return self._event("response.failed", response=response)

    def _ended(self, finish: Finish) -> dict[str, Any]:
        cut = finish.reason == "length"
        response = self._response("incomplete" if cut else "completed") | {
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": _usage(finish.usage),
        }
        if self._keep is not None:
            self._keep(response, (*self._conversation, *_turn(self._output.items)))
        return response

    def _response(self, status: str) -> dict[str, Any]:
        return self._head | {"status": status, "output": list(self._output.items)}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._numbered({"type": kind, **fields})

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        numbered = event | {"sequence_number": self._sequence}
        self._sequence += 1
        return numbered


def _turn(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The assistant's message that these output items make; none when there are none."""
    if not items:
        return []
    texts = {kind: [i["content"][0]["text"] for i in items if i["type"] == kind] for kind in ("message", "reasoning")}
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts["message"])}
    if texts["reasoning"]:
        message["reasoning_content"] = "".join(texts["reasoning"])
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": arguments(item["arguments"])},
        }
        for item in items
        if item["type"] == "function_call"
    ]
    if calls:
        message |= {"tool_calls": calls, "content": message["content"] or None}
    return [message]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _head(run: ChatRun, body: ResponseRequest) -> dict[str, Any]:
    """What stays the same from the first event to the last."""

    def sent(value: Any) -> Any:
        return None if value is None else value.model_dump(by_alias=True, exclude_none=True)

    reasoning = sent(body.reasoning) or {}
    return {
        "id": f"resp_{run.id}",
        "object": "response",
        "created_at": run.created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": run.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None} | reasoning,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": {"format": {"type": "text"}} | (sent(body.text) or {}),
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else sent(body.tool_choice) or "auto",
        "tools": [{"parameters": None, "strict": None} | sent(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": None,
    }
