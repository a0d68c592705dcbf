"""From the parts of a reply to Ollama's lines of JSON, and from those to a whole answer."""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
import time
from typing import TYPE_CHECKING, Any

from mlxinfer.server.chat import Finish, LogprobsPart
from mlxinfer.tokenizer.replies import ReasoningPart, TextPart, ToolCallArguments, ToolCallEnd, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from mlxinfer.server.chat import ChatPart
    from mlxinfer.server.openai.logprobs import TokenTexts
    from mlxinfer.types import Timings, Usage

Line = dict[str, Any]
NS = 1_000_000_000


def timestamp() -> str:
    """Now, as RFC 3339 writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


class Lines:
    """One reply: its parts in, lines out. A chat's text is in `message`, that of a prompt in `response`."""

    def __init__(
        self,
        *,
        model: str,
        is_chat: bool,
        begun: float = 0.0,
        load_s: float = 0.0,
        texts: TokenTexts | None = None,
        top_logprobs: int = 0,
    ) -> None:
        self._model = model
        self._is_chat = is_chat
        self._begun = begun
        self._load_s = load_s
        self._texts = texts
        self._top = top_logprobs
        self._names: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}
        self._logprobs: list[dict[str, Any]] = []

    def line(self, text: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None) -> Line:
        """A line of the answer; without anything it keeps the connection open."""
        body: dict[str, Any] = {"role": "assistant", "content": text} if self._is_chat else {"response": text}
        if thinking:
            body["thinking"] = thinking
        if calls:
            body["tool_calls"] = calls
        made = {"model": self._model, "created_at": timestamp(), **({"message": body} if self._is_chat else body)}
        made["done"] = False
        if self._logprobs:
            made["logprobs"], self._logprobs = self._logprobs, []
        return made

    def read(self, part: ChatPart) -> Iterator[Line]:
        """The lines of one part. A call comes when it is whole; one that was cut off never does."""
        match part:
            case TextPart():
                yield self.line(part.text)
            case ReasoningPart():
                yield self.line(thinking=part.text)
            case ToolCallStart():
                self._names[part.index], self._arguments[part.index] = part.name, []
            case ToolCallArguments():
                self._arguments[part.index].append(part.text)
            case ToolCallEnd():
                yield self.line(calls=[self._call(part.index)])
            case LogprobsPart():
                assert self._texts is not None, "a reply has a tokenizer"
                self._logprobs += self._texts.chat(part.tokens, self._top)
            case Finish():
                reason = "length" if part.reason == "length" else "stop"
                yield self.line() | {"done": True, "done_reason": reason} | self._figures(part.usage, part.timings)

    def only(self, reason: str) -> Line:
        """The answer to a request for nothing but the model."""
        return self.line() | {"done": True, "done_reason": reason}

    def _call(self, index: int) -> dict[str, Any]:
        arguments = json.loads("".join(self._arguments.pop(index)) or "{}")
        function = {"index": index, "name": self._names.pop(index), "arguments": arguments}
        return {"id": f"call_{secrets.token_hex(8)}", "function": function}

    def _figures(self, usage: Usage, timings: Timings | None) -> dict[str, int]:
        """Durations in nanoseconds, at least one: clients divide by them."""
        queue, first, total = (timings.queue_s, timings.ttft_s, timings.total_s) if timings else (0.0, 0.0, 0.0)
        return {
            "total_duration": _ns(time.monotonic() - self._begun),
            "load_duration": _ns(self._load_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(first - queue),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(total - first),
        }


def _ns(seconds: float) -> int:
    return max(1, round(seconds * NS))


async def whole_answer(lines: AsyncGenerator[Line | None], is_chat: bool) -> Line:
    """All lines as one: texts joined, calls and log probabilities in their order, and the figures of the last."""
    texts: dict[str, list[str]] = {}
    lists: dict[str, list[Any]] = {}
    last: Line = {}
    async with contextlib.aclosing(lines):
        async for line in lines:
            if line is not None:
                last = line
                body = {**line.get("message", line), "logprobs": line.get("logprobs", [])}
                for name in ("content", "response", "thinking"):
                    texts.setdefault(name, []).append(body.get(name, ""))
                for name in ("tool_calls", "logprobs"):
                    lists.setdefault(name, []).extend(body.get(name, ()))
    joined = {name: text for name, pieces in texts.items() if (text := "".join(pieces))}
    logprobs = lists.pop("logprobs", [])
    joined |= {name: items for name, items in lists.items() if items}
    if last and is_chat:
        last["message"] |= joined
    else:
        last |= joined
    return last | ({"logprobs": logprobs} if logprobs else {})
