"""What a row means: its format by its keys, its values checked and brought to one shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxinfer.lora.data.options import Kind

Message = dict[str, Any]
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
MAX_MESSAGES = 1000
"""Of a row: the chat is rendered once for each answer, a quarter of a minute for so many."""
_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_REASONING = ("reasoning_content", "thinking", "reasoning")


class RowError(ValueError):
    """What is wrong with a row; whoever knows its place adds it."""


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and the tools that were on offer."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text: a prompt that is only read (may be empty), and what is learnt."""

    prompt: str
    learnt: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `second` is the rejected one of a preference, `wanted` the label of a judged one."""

    format: str
    kind: Kind
    first: Chat | Text
    second: Chat | Text | None = None
    wanted: bool | None = None


def parse_row(value: Mapping[str, Any], *, as_chat: bool) -> Row:
    """The row that `value` is. `as_chat`: a prompt and a completion that are strings are a chat of two messages.

    Raises RowError with the key and the value.
    """
    keys = {key for key, item in value.items() if item is not None}
    if "chosen" in keys or "rejected" in keys:
        chosen, rejected = (_answered(value, key, as_chat) for key in ("chosen", "rejected"))
        return Row("preference", "preference", chosen, rejected)
    if "label" in keys and "completion" in keys:
        first = _answered(value, "completion", as_chat)
        return Row("judged", "judged", first, wanted=_label(value["label"]))
    if "messages" in keys or "conversations" in keys:
        messages = _messages(value["messages"]) if "messages" in keys else _sharegpt(value["conversations"])
        if all(m["role"] != "assistant" for m in messages):
            raise RowError("'messages' has no assistant turn, so there is nothing to learn")
        tools = _tools(value)
        return Row(
            "tools" if tools or any("tool_calls" in m for m in messages) else "chat", "sft", Chat(messages, tools)
        )
    if "completion" in keys:
        return Row("completions", "sft", _answered(value, "completion", as_chat))
    if "text" in keys:
        if not (text := _string(value, "text")):
            raise RowError("'text' is empty")
        return Row("text", "sft", Text("", text))
    raise RowError(
        f"the keys {sorted(map(str, value))!r:.160} are no known format; a row has 'messages', 'prompt' and "
        "'completion', 'text', or 'prompt', 'chosen' and 'rejected' (with 'label' beside 'completion' it is judged)"
    )


def _answered(value: Mapping[str, Any], key: str, as_chat: bool) -> Chat | Text:
    """A prompt with the answer under `key`; the prompt may already stand in a list of messages."""
    answer, prompt = _decoded(_present(value, key)), _decoded(value.get("prompt"))
    if isinstance(answer, list):
        before = [] if prompt is None else _user(prompt) if isinstance(prompt, str) else _messages(prompt, "prompt")
        after = _messages(answer, key)
        if before and after[: len(before)] == before:
            before = []
        if after[-1]["role"] != "assistant":
            raise RowError(f"{key!r} must end with an assistant message, not with one of {after[-1]['role']!r}")
        return Chat([*before, *after], _tools(value))
    if not isinstance(answer, str):
        raise RowError(f"{key!r} is {answer!r:.80}; it is a string or a list of messages")
    if not answer:
        raise RowError(f"{key!r} is empty")
    if isinstance(prompt, list):
        return Chat([*_messages(prompt, "prompt"), {"role": "assistant", "content": answer}], _tools(value))
    prompt = _string(value, "prompt")
    if not as_chat:
        return Text(prompt, answer)
    return Chat([*_user(prompt), {"role": "assistant", "content": answer}], _tools(value))


def _user(prompt: str) -> list[Message]:
    return [{"role": "user", "content": prompt}]


def _present(value: Mapping[str, Any], key: str) -> Any:
    if value.get(key) is None:
        raise RowError(f"the key {key!r} is missing; the row has {sorted(map(str, value))!r:.160}")
    return value[key]


def _string(value: Mapping[str, Any], key: str) -> str:
    text = _present(value, key)
    if not isinstance(text, str):
        raise RowError(f"{key!r} is {text!r:.80}; it must be a string")
    return text


def _decoded(value: Any) -> Any:
    """Lists of messages are JSON text in a cell of a CSV file."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _messages(value: Any, key: str = "messages") -> list[Message]:
    value = _decoded(value)
    if not isinstance(value, list) or not value:
        raise RowError(f"{key!r} is {value!r:.80}; it must be a list of at least one message")
    if len(value) > MAX_MESSAGES:
        raise RowError(f"{key!r} has {len(value):,} messages; at most {MAX_MESSAGES:,}: cut the row into several")
    return [_message(item, f"{key}[{index}]") for index, item in enumerate(value)]


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"{name} is {item!r:.80}; a message is an object with 'role' and 'content'")
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(f"{name}.role is {role!r:.40}; it is one of {', '.join(sorted(ROLES))}")
    message: Message = {k: v for k, v in item.items() if v is not None and k not in _REASONING}
    message["content"] = _content(item.get("content"), name)
    reasoning = [item[k] for k in _REASONING if item.get(k) is not None]
    if reasoning:
        if not isinstance(reasoning[0], str) or role != "assistant":
            raise RowError(f"{name}: reasoning is a string, in an assistant message; here it is {reasoning[0]!r:.60}")
        if reasoning[0]:
            # Families differ in the name: Harmony's template reads `thinking`, the others `reasoning_content`.
            message |= {"reasoning_content": reasoning[0], "thinking": reasoning[0]}
    calls = message.pop("tool_calls", None)
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise RowError(f"{name}.tool_calls must be a list, in an assistant message; here it is {calls!r:.60}")
        message["tool_calls"] = [_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif role == "assistant" and not message["content"] and not any(reasoning):
        raise RowError(f"{name} is an assistant message with neither content nor tool calls")
    return message


def _content(content: Any, name: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "\n".join(part["text"] for part in content)
    raise RowError(f"{name}.content is {content!r:.80}; it must be a string or a list of text parts")


def _call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError(f"{name} is {call!r:.80}; it is an object with a function's 'name' and 'arguments'")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            # Templates expect the object, as the server hands it over; JSON text would be quoted twice.
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise RowError(f"{name}: 'arguments' is not JSON: {arguments!r:.80}") from error
    if not isinstance(arguments, dict):
        raise RowError(f"{name}: 'arguments' is {arguments!r:.80}; it must be an object")
    rest = {k: v for k, v in call.items() if k in ("id", "index") and v is not None}
    return {**rest, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(value: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = _decoded(value.get("tools"))
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError(f"'tools' is {tools!r:.80}; it must be a list of objects")
    return tools


def _sharegpt(value: Any) -> list[Message]:
    """{"from": "human", "value": …} messages, an older habit."""
    value = _decoded(value)
    if isinstance(value, list) and all(isinstance(m, Mapping) and _speaker(m) in _SHAREGPT for m in value):
        value = [{"role": _SHAREGPT[m["from"]], "content": m.get("value")} for m in value]
    return _messages(value, "conversations")


def _speaker(message: Mapping[str, Any]) -> str:
    return found if isinstance(found := message.get("from"), str) else ""


def _label(label: Any) -> bool:
    if isinstance(label, str) and label.strip().lower() in ("true", "false", "1", "0"):
        return label.strip().lower() in ("true", "1")
    if isinstance(label, bool) or (isinstance(label, int) and label in (0, 1)):
        return bool(label)
    raise RowError(f"'label' is {label!r:.60}; it must be true or false")
