"""Messages of content blocks, as chat templates read them. Nothing is fetched, and what is not text is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mlxinfer.server.anthropic.schemas import Message

BILLING = "x-anthropic-billing-header:"
"""How Claude Code begins a system block that is for Anthropic's accounting; it differs in each request, so that no
prompt would share the tokens that follow it."""

_HINTS = frozenset({"cache_control", "caller", "citations", "parsed_output", "signature"})
_BLOCKS: dict[str, dict[str, type]] = {
    "text": {"text": str},
    "thinking": {"thinking": str},
    "redacted_thinking": {"data": str},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
}
"""What a block must have; the _HINTS may stand beside it."""
_OPTIONAL = {"tool_result": frozenset({"content", "is_error"})}
_ROLES = {
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "redacted_thinking", "tool_use"}),
    "system": frozenset({"text"}),
}


def for_template(system: str | list[dict[str, Any]] | None, messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Messages of role system, user, assistant and tool. Raises InvalidRequestError naming the block that is wrong."""
    made: list[dict[str, Any]] = []
    if texts := _system(system):
        made.append({"role": "system", "content": _content(texts)})
    names: dict[str, str] = {}
    for i, message in enumerate(messages):
        where = f"messages[{i}].content"
        blocks = _blocks(message.content, message.role, where)
        if message.role == "assistant":
            _append(made, _assistant(blocks, names))
        elif message.role == "system":
            made.append({"role": "system", "content": _content(_texts(blocks))})
        else:
            for one in _user(blocks, names, where):
                _append(made, one)
    if messages[-1].role == "assistant":
        raise InvalidRequestError(
            "the last message is the assistant's; replies can't be prefilled here, so end with a user message "
            "(output_config.format gives an answer a form)",
            param=f"messages[{len(messages) - 1}]",
        )
    return tuple(made)


def _system(system: str | list[dict[str, Any]] | None) -> list[str]:
    texts = _texts(_blocks(system or [], "system", "system"))
    return [text for text in texts if text and not text.startswith(BILLING)]


def _blocks(content: str | list[dict[str, Any]], role: str, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for i, block in enumerate(content):
        _check_block(block, _ROLES[role], f"{where}[{i}]")
    return content


def _check_block(block: Mapping[str, Any], allowed: frozenset[str], where: str) -> None:
    kind = block.get("type")
    if not isinstance(kind, str):
        raise InvalidRequestError(f"{where}.type is missing", param=f"{where}.type")
    if kind not in _BLOCKS:
        raise InvalidRequestError(f"{where} is of type {kind!r:.40}; this server reads text only", param=where)
    if kind not in allowed:
        raise InvalidRequestError(f"{where} is of type {kind!r}, which does not belong in this role", param=where)
    wanted = _BLOCKS[kind]
    for name, of in wanted.items():
        if not isinstance(block.get(name), of):
            noun = "an object" if of is dict else "a string"
            raise InvalidRequestError(f"{where}.{name} must be {noun}", param=f"{where}.{name}")
    optional = _OPTIONAL.get(kind, frozenset[str]()) | _HINTS
    for name, value in block.items():
        if name != "type" and name not in wanted and name not in optional and value is not None:
            param = ascii(f"{where}.{name}"[:120])[1:-1]
            raise InvalidRequestError(f"{where} has an unknown field {name!r:.80}", param=param)


def _assistant(blocks: Iterable[Mapping[str, Any]], names: dict[str, str]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block["type"]:
            case "text":
                texts.append(block["text"])
            case "thinking":
                thoughts.append(block["thinking"])
            case "tool_use":
                names[block["id"]] = block["name"]
                function = {"name": block["name"], "arguments": block["input"]}
                calls.append({"id": block["id"], "type": "function", "function": function})
            # redacted_thinking holds what only its maker can read.
    message: dict[str, Any] = {"role": "assistant", "content": _content(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(blocks: Iterable[Mapping[str, Any]], names: Mapping[str, str], where: str) -> Iterable[dict[str, Any]]:
    """The results among the blocks as messages of their own, and the text between them."""
    texts: list[str] = []
    for i, block in enumerate(blocks):
        if block["type"] == "text":
            texts.append(block["text"])
            continue
        if texts:
            yield {"role": "user", "content": _content(texts)}
            texts = []
        yield _result(block, names, f"{where}[{i}]")
    if texts:
        yield {"role": "user", "content": _content(texts)}


def _result(block: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    call = block["tool_use_id"]
    if call not in names:
        raise InvalidRequestError(
            f"{where}.tool_use_id is {call!r:.80}, and no tool_use block before it has that id",
            param=f"{where}.tool_use_id",
        )
    content, is_error = block.get("content"), block.get("is_error")
    blocks = content if isinstance(content, list) else []
    if not isinstance(content, str | list | None) or not all(isinstance(b, dict) for b in blocks):
        raise InvalidRequestError(f"{where}.content must be a string or a list of blocks", param=f"{where}.content")
    if not isinstance(is_error, bool | None):
        raise InvalidRequestError(f"{where}.is_error must be true or false", param=f"{where}.is_error")
    texts = _texts(_blocks(content or "", "system", f"{where}.content"))
    if is_error:
        # Templates have no other place to tell the model.
        texts = ["Error: " + (texts[0] if texts else ""), *texts[1:]]
    return {"role": "tool", "tool_call_id": call, "name": names[call], "content": _content(texts)}


def _append(made: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message; turns of one role that follow each other are one turn, as Anthropic has it."""
    if not made or made[-1]["role"] != message["role"] or message["role"] == "tool":
        made.append(message)
        return
    last = made[-1]
    last["content"] = _content([*_texts_of(last), *_texts_of(message)])
    if thoughts := message.get("reasoning_content"):
        last["reasoning_content"] = last.get("reasoning_content", "") + thoughts
    if calls := message.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *calls]


def _texts(blocks: Iterable[Mapping[str, Any]]) -> list[str]:
    return [block["text"] for block in blocks]


def _texts_of(message: Mapping[str, Any]) -> list[str]:
    content = message["content"]
    if isinstance(content, str):
        return [content] if content else []
    return _texts(content)


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """A string for one text, else parts."""
    if len(texts) <= 1:
        return texts[0] if texts else ""
    return [{"type": "text", "text": text} for text in texts]
