"""What callers of the Python API hand in, checked before anything runs."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.types import Message, SamplingParams

Prompt = str | Sequence[Message]


def checked_ids(prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """Token ids as plain ints, numpy's included. Raises InvalidRequestError for anything else."""
    try:
        ids = tuple(operator.index(t) for t in prompt_ids)
    except TypeError as error:
        raise InvalidRequestError(f"the prompt must be a list of integers: {error}", param="prompt") from error
    if any(isinstance(t, bool) for t in prompt_ids):
        raise InvalidRequestError("the prompt holds a bool; token ids are integers", param="prompt")
    return ids


def checked_messages(messages: Prompt) -> list[Message]:
    """Messages as a list; a string is one user message. Raises InvalidRequestError that names what is wrong."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping | bytes) or not isinstance(messages, Iterable):
        raise InvalidRequestError("messages must be a string or a list of messages", param="messages")
    chat = list(messages)
    if not chat:
        raise InvalidRequestError("messages is empty; at least one message is needed", param="messages")
    for index, message in enumerate(chat):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"{where} is {message!r:.80}; a message has a role and content", param=where)
        if not isinstance(role := message.get("role"), str) or not role:
            raise InvalidRequestError(f"{where}.role is {role!r:.80}; a string is needed", param=f"{where}.role")
        if message.get("content") is None and not message.get("tool_calls"):
            raise InvalidRequestError(f"{where} has no content", param=f"{where}.content")
    return chat


def sampling_params(params: SamplingParams | None, changes: dict[str, Any]) -> SamplingParams:
    """`params` with keyword changes; a single `stop` string is taken too. An unknown keyword is an error."""
    known = SamplingParams.__dataclass_fields__
    if unknown := [name for name in changes if name not in known]:
        raise InvalidRequestError(
            f"unknown sampling parameter {unknown[0]!r}; known: {', '.join(known)}", param=unknown[0]
        )
    stop = changes.get("stop", ())
    if isinstance(stop, str):
        changes = changes | {"stop": (stop,)}
    elif stop is None or isinstance(stop, list | tuple):
        changes = changes | {"stop": tuple(stop or ())}
    return dataclasses.replace(params or SamplingParams(), **changes)
