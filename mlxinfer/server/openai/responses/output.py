"""From the parts of a reply to a response's output items and the events that tell of them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxinfer.server.chat import Finish, LogprobsPart
from mlxinfer.server.openai.chat import call_id
from mlxinfer.tokenizer.replies import ReasoningPart, TextPart, ToolCallArguments, ToolCallEnd, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlxinfer.server.chat import ChatPart
    from mlxinfer.server.openai.logprobs import TokenTexts

Event = dict[str, Any]


@dataclass(slots=True)
class _Open:
    """The item that is being written."""

    kind: str
    item: dict[str, Any]
    text: list[str] = field(default_factory=list[str])
    logprobs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class Output:
    """One reply's items. `take` turns a part into events; `items` are those that are whole."""

    def __init__(self, texts: TokenTexts, top_logprobs: int) -> None:
        self.items: list[dict[str, Any]] = []
        self._texts = texts
        self._top = top_logprobs
        self._open: _Open | None = None
        self._begun = 0
        self._held: list[dict[str, Any]] = []

    def take(self, part: ChatPart) -> Iterator[Event]:
        """The events of one part, without sequence numbers."""
        match part:
            case LogprobsPart():
                self._held += self._texts.chat(part.tokens, self._top)
            case TextPart():
                yield from self._text("message", part.text)
            case ReasoningPart():
                yield from self._text("reasoning", part.text)
            case ToolCallStart():
                yield from self._close()
                yield from self._begin(
                    "function_call", {"call_id": call_id(), "name": part.name, "arguments": ""}, "fc"
                )
            case ToolCallArguments():
                open_ = self._current("function_call")
                open_.text.append(part.text)
                yield self._event("response.function_call_arguments.delta", delta=part.text)
            case ToolCallEnd():
                yield from self._close(call_is_whole=True)
            case Finish():
                yield from self._close(complete=part.reason != "length")

    def _current(self, kind: str) -> _Open:
        assert self._open is not None, f"a part of a {kind} before its beginning"
        assert self._open.kind == kind
        return self._open

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            more = {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
            yield from self._begin(kind, more, "msg" if kind == "message" else "rs")
            yield self._event("response.content_part.added", content_index=0, part=_part(kind, "", []))
        open_ = self._current(kind)
        open_.text.append(text)
        if kind == "message":
            open_.logprobs += self._held
            yield self._event("response.output_text.delta", content_index=0, delta=text, logprobs=self._held)
            self._held = []
        else:
            yield self._event("response.reasoning_text.delta", content_index=0, delta=text)

    def _begin(self, kind: str, more: dict[str, Any], prefix: str) -> Iterator[Event]:
        item = {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress", **more}
        self._open = _Open(kind, item)
        self._begun += 1
        yield self._item_event("response.output_item.added", item)

    def _close(self, *, complete: bool = True, call_is_whole: bool = False) -> Iterator[Event]:
        """End the item that is open. A call that isn't whole is told of as incomplete and kept out of the output."""
        open_ = self._open
        if open_ is None:
            return
        text = "".join(open_.text)
        if open_.kind == "function_call":
            item = open_.item | {"arguments": text, "status": "completed" if call_is_whole else "incomplete"}
            if call_is_whole:
                yield self._event("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            open_.logprobs += self._held
            self._held = []
            part = _part(open_.kind, text, open_.logprobs)
            item = open_.item | {"content": [part], "status": "completed" if complete else "incomplete"}
            if open_.kind == "message":
                yield self._event("response.output_text.done", content_index=0, text=text, logprobs=open_.logprobs)
            else:
                yield self._event("response.reasoning_text.done", content_index=0, text=text)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield self._item_event("response.output_item.done", item)
        if open_.kind != "function_call" or call_is_whole:
            self.items.append(item)
        self._open = None

    def _event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        return {"type": kind, "item_id": self._open.item["id"], "output_index": self._begun - 1, **fields}

    def _item_event(self, kind: str, item: dict[str, Any]) -> Event:
        return {"type": kind, "output_index": self._begun - 1, "item": item}


def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
