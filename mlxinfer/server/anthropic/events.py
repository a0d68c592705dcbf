"""From the parts of a reply to Anthropic's stream of events, and from those to a whole message."""

from __future__ import annotations

import contextlib
import json
import secrets
from typing import TYPE_CHECKING, Any

from mlxinfer.server.chat import Finish, LogprobsPart
from mlxinfer.tokenizer.replies import ReasoningPart, TextPart, ToolCallArguments, ToolCallEnd, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from mlxinfer.server.chat import ChatPart
    from mlxinfer.types import Usage

Event = dict[str, Any]
PING: Event = {"type": "ping"}
SIGNATURE = "mlxinfer"
"""Clients want a thinking block to be signed and send the signature back; nothing here is proved by it."""


class Blocks:
    """One reply: its parts in, events out. Blocks come one after another and each is closed."""

    def __init__(
        self, *, model: str, message_id: str, prompt_tokens: int, max_tokens: int, show_thinking: bool
    ) -> None:
        self._model = model
        self._id = message_id
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._show_thinking = show_thinking
        self.void: list[int] = []
        """The blocks of calls that the reply's end cut off, or that turned out to be none after they had begun."""
        self._index = -1
        self._open: str | None = None
        self._blank = ""
        """White space that waits for the text it may belong to: a block of nothing else is not worth one."""

    def start(self) -> Iterator[Event]:
        """The events that come before the first part."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0} | _CACHE
        message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield {"type": "message_start", "message": message}
        yield PING

    def read(self, part: ChatPart) -> Iterator[Event]:
        """The events of one part."""
        match part:
            case TextPart():
                yield from self._text(part.text)
            case ReasoningPart():
                yield from self._reasoning(part.text)
            case ToolCallStart():
                yield from self._close()
                block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": part.name, "input": {}}
                yield self._begin("tool_use", block)
            case ToolCallArguments():
                yield self._delta({"type": "input_json_delta", "partial_json": part.text})
            case ToolCallEnd():
                yield from self._close(call_is_whole=True)
            case Finish():
                yield from self._finish(part)
            case LogprobsPart():
                pass

    def _text(self, text: str) -> Iterator[Event]:
        if self._open != "text":
            self._blank += text
            if self._blank.isspace() or not self._blank:
                return
            text, self._blank = self._blank, ""
            yield from self._close()
            yield self._begin("text", {"type": "text", "text": ""})
        if text:
            yield self._delta({"type": "text_delta", "text": text})

    def _reasoning(self, text: str) -> Iterator[Event]:
        if self._open != "thinking":
            yield from self._close()
            yield self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        if text and self._show_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _begin(self, kind: str, block: dict[str, Any]) -> Event:
        self._index += 1
        self._open = kind
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self, *, call_is_whole: bool = False) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open == "tool_use" and not call_is_whole:
            self.void.append(self._index)
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        self._open, self._blank = None, ""
        yield {"type": "content_block_stop", "index": self._index}

    def _finish(self, finish: Finish) -> Iterator[Event]:
        yield from self._close()
        if self._index < 0 and self._blank:
            # White space is all there is.
            yield self._begin("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": self._blank})
            yield from self._close()
        reason = self._stop_reason(finish)
        delta = {"stop_reason": reason, "stop_sequence": finish.stop_string if reason == "stop_sequence" else None}
        yield {"type": "message_delta", "delta": delta, "usage": usage_object(finish.usage)}
        yield {"type": "message_stop"}

    def _stop_reason(self, finish: Finish) -> str:
        if finish.reason == "tool_calls":
            return "tool_use"
        if finish.reason == "length":
            cut = finish.usage.completion_tokens < self._max_tokens
            return "model_context_window_exceeded" if cut else "max_tokens"
        return "end_turn" if finish.stop_string is None else "stop_sequence"


_CACHE = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Anthropic counts the tokens that were read from the cache apart from the input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


async def whole_message(events: AsyncGenerator[Event | None], blocks: Blocks) -> dict[str, Any]:
    """The message that the events of `blocks` build. A call that isn't whole is left out."""
    message: dict[str, Any] = {}
    pieces: list[str] = []
    async with contextlib.aclosing(events):
        async for event in events:
            match event or PING:
                case {"type": "message_start", "message": begun}:
                    message = begun
                case {"type": "content_block_start", "content_block": block}:
                    message["content"].append(block)
                    pieces = []
                case {"type": "content_block_delta", "delta": delta}:
                    _add(message["content"][-1], delta, pieces)
                case {"type": "content_block_stop"}:
                    _seal(message["content"][-1], "".join(pieces))
                case {"type": "message_delta", "delta": delta, "usage": usage}:
                    message |= {**delta, "usage": usage}
    for index in reversed(blocks.void):
        del message["content"][index]
    return message


def _add(block: dict[str, Any], delta: Mapping[str, Any], pieces: list[str]) -> None:
    if delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
    else:
        pieces.append(delta[{"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"], "partial_json")])


def _seal(block: dict[str, Any], text: str) -> None:
    if block["type"] == "tool_use":
        # The reply's parser vouches for a whole call; any other goes anyway.
        with contextlib.suppress(ValueError):
            block["input"] = json.loads(text or "{}")
    else:
        block[block["type"]] = text
