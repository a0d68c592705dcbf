"""Conversations as files: JSON with every branch, Markdown of one branch for people. Both can be read again."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from mlxinfer.app.store.records import Conversation, Message
    from mlxinfer.app.store.store import Store

FORMAT, VERSION = "mlxinfer-chat", 1
ROLES = ("user", "assistant", "tool")
STATUSES = ("streaming", "done", "stopped", "failed")
MAX_BYTES = 64 << 20
_MARK = re.compile(r"^<!-- (user|assistant|tool|reasoning|system) -->$", re.MULTILINE)
_HEAD = re.compile(r"\A# (?P<title>[^\n]*)\n\n<!-- mlxinfer chat, model: (?P<model>[^\n]*) -->\n")
_LIKE_A_MARK = re.compile(r"^(\\*)(?=<!-- (?:user|assistant|tool|reasoning|system) -->$)", re.MULTILINE)
_ESCAPED = re.compile(r"^\\(?=\\*<!-- (?:user|assistant|tool|reasoning|system) -->$)", re.MULTILINE)


def to_json(store: Store, key: str) -> str:
    """The whole tree, as text."""
    chat = store.conversation(key)
    head = {"title": chat.title, "model": chat.model, "created": chat.created, "system": chat.system}
    whole = head | {"settings": chat.settings, "leaf": chat.leaf, "messages": _listed(store.messages(chat.id))}
    return json.dumps({"format": FORMAT, "version": VERSION, **whole}, ensure_ascii=False, indent=1) + "\n"


def _listed(messages: list[Message]) -> list[dict[str, Any]]:
    names = ("id", "parent", "role", "content", "reasoning", "status", "extra", "created")
    return [{name: getattr(message, name) for name in names} for message in messages]


def from_json(store: Store, text: str) -> Conversation:
    """A new conversation like the one that was written. Raises InvalidRequestError, and then nothing was added."""
    whole = _parsed(text)
    messages: list[dict[str, Any]] = _kind(whole, "messages", list)
    for number, message in enumerate(messages):
        _check_message(message, number, {one["id"] for one in messages[:number]})
    title, model, system = (_kind(whole, name, str) for name in ("title", "model", "system"))
    settings = _kind(whole, "settings", dict)
    with store.transaction():
        chat = store.create(model, title=title, system=system, **settings)
        new: dict[str | None, str] = {}
        for message in messages:
            parent = new.get(message["parent"])
            made = store.add(
                chat.id, message["role"], message["content"], parent=parent, root=parent is None,
                reasoning=message["reasoning"], status=message["status"], **message["extra"],
            )  # fmt: skip
            new[message["id"]] = made.id
        if leaf := new.get(whole.get("leaf")):
            store.show(leaf)
    return store.conversation(chat.id)


def _parsed(text: str) -> dict[str, Any]:
    if len(text) > MAX_BYTES:
        raise InvalidRequestError(f"the file has {len(text):,} characters; at most {MAX_BYTES:,} are read")
    try:
        whole: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the file is no JSON: {error}") from error
    if not isinstance(whole, dict) or whole.get("format") != FORMAT or whole.get("version") != VERSION:
        raise InvalidRequestError(f'the file is no conversation ("format": "{FORMAT}", "version": {VERSION})')
    return whole


def _kind(held: dict[str, Any], name: str, kind: type) -> Any:
    value = held.get(name)
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{name} is {value!r:.80}; {kind.__name__} is expected")
    return value


def _check_message(message: Any, number: int, before: set[str]) -> None:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"messages[{number}] is {message!r:.80}; an object is expected")
    for name, kind in (("id", str), ("content", str), ("reasoning", str), ("extra", dict)):
        if not isinstance(message.get(name), kind):
            raise InvalidRequestError(f"messages[{number}].{name} is {message.get(name)!r:.80}")
    for name, known in (("role", ROLES), ("status", STATUSES)):
        if message.get(name) not in known:
            raise InvalidRequestError(f"messages[{number}].{name} is {message.get(name)!r:.80}: {', '.join(known)}")
    parent = message.get("parent")
    if parent is not None and parent not in before:
        raise InvalidRequestError(f"messages[{number}].parent is {parent!r:.80}, which is no message before it")
    if message["id"] in before:
        raise InvalidRequestError(f"messages[{number}].id {message['id']!r:.80} is there twice")


def to_markdown(store: Store, key: str) -> str:
    """The shown branch."""
    chat = store.conversation(key)
    title = " ".join(chat.title.split()) or "Conversation"
    parts = [f"# {title}\n\n<!-- mlxinfer chat, model: {' '.join(chat.model.split())} -->\n"]
    if chat.system:
        parts.append(_part("system", chat.system))
    for message in store.branch(chat.id):
        if message.reasoning:
            parts.append(_part("reasoning", message.reasoning))
        parts.append(_part(message.role, message.content))
    return "\n".join(parts)


def _part(kind: str, text: str) -> str:
    return f"<!-- {kind} -->\n\n{_LIKE_A_MARK.sub(lambda m: chr(92) + m[1], text)}\n"


def from_markdown(store: Store, text: str) -> Conversation:
    """A conversation of the one branch. Raises InvalidRequestError for other Markdown."""
    head = _HEAD.match(text)
    if head is None:
        raise InvalidRequestError("the file is no conversation: it doesn't begin as an exported one does")
    marks = list(_MARK.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text) + 1]
    system = reasoning = ""
    with store.transaction():
        chat = store.create(head["model"], title=head["title"])
        for mark, end in zip(marks, ends, strict=True):
            content = _ESCAPED.sub("", text[mark.end() + 2 : end - 2])
            if mark[1] == "system":
                system = content
            elif mark[1] == "reasoning":
                reasoning = content
            else:
                role: Any = mark[1]
                store.add(chat.id, role, content, reasoning=reasoning)
                reasoning = ""
        if system:
            store.change(chat.id, system=system)
    return store.conversation(chat.id)
