"""Items of a response's input, as clients send them and send them back, and the chat messages they make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.openai.fields import Strict, validated
from mlxinfer.server.openai.messages import arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
TEXTS = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"enum": [k for k in TEXT_PARTS if k != "refusal"]}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
"""For the OpenAPI document; `text_of` is what reads it."""
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Any, WithJsonSchema(TEXTS)]
    id: str | None = None
    status: Status | None = None
    phase: str | None = None


class FunctionCallItem(Strict):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Annotated[Any, WithJsonSchema(TEXTS)]
    id: str | None = None
    status: Status | None = None


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None
    """Another server's; nothing here can read it."""
    status: Status | None = None


ITEMS = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}


def messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Chat messages: reasoning, text and calls that follow each other are one turn of the assistant's.

    Raises InvalidRequestError naming the item that is wrong.
    """
    made: list[dict[str, Any]] = []
    for index, raw in enumerate(items):
        where = f"input[{index}]"
        item = _item(raw, where)
        match item:
            case MessageItem(role="assistant"):
                _add_text(_assistant(made), text_of(item.content, f"{where}.content"))
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                made.append({"role": role, "content": text_of(item.content, f"{where}.content")})
            case ReasoningItem():
                parts = item.content or item.summary or []
                if text := text_of(parts, f"{where}.content") if parts else "":
                    turn = _assistant(made, new=True)
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + text
            case FunctionCallItem():
                _assistant(made).setdefault("tool_calls", []).append(
                    {
                        "id": item.call_id,
                        "type": "function",
                        "function": {"name": item.name, "arguments": arguments(item.arguments)},
                    }
                )
            case FunctionOutputItem():
                output = text_of(item.output, f"{where}.output")
                made.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    return made


def text_of(content: Any, where: str) -> str:
    """A string, or text parts joined by newlines. Raises InvalidRequestError for anything else; nothing is fetched."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be a string or a list of text parts", param=where)
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            raise InvalidRequestError(
                f"{where} has a part of type {kind!r:.40}; this model reads text only", param=where
            )
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}: a text part must have a string as its text", param=where)
        texts.append(text)
    return "\n".join(texts)


def _item(raw: Any, where: str) -> Strict:
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{where} must be an object", param=where)
    kind = raw.get("type", "message")
    form = ITEMS.get(kind) if isinstance(kind, str) else None
    if form is None:
        message = f"{where} is of type {kind!r:.40}; this server reads {', '.join(ITEMS)}"
        raise InvalidRequestError(message, param=f"{where}.type")
    # Clients send items back with every field they know, most of them null.
    return validated(form, {k: v for k, v in raw.items() if v is not None}, where)


def _assistant(made: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    """The assistant's turn that is going on, or a new one; reasoning begins one, unless nothing but reasoning is in
    it."""
    last = made[-1] if made and made[-1]["role"] == "assistant" else None
    if last is None or (new and (last["content"] is not None or "tool_calls" in last)):
        made.append({"role": "assistant", "content": None})
    return made[-1]


def _add_text(turn: dict[str, Any], text: str) -> None:
    turn["content"] = text if turn["content"] is None else f"{turn['content']}\n{text}"
