"""From a conversation to what the model is asked."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.chat import ChatTask
from mlxinfer.types import Grammar, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlxinfer.app.store import Conversation, Message
    from mlxinfer.llm import LLM
    from mlxinfer.server.prompting import Prepared

PARAMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "stop")
"""Settings of a conversation that go to SamplingParams; beside them there are `schema`, a JSON schema as text, and
`thinking`, a bool for templates that know `enable_thinking`."""


def task_of(chat: Conversation, branch: Sequence[Message]) -> ChatTask:
    """The conversation up to the last message of `branch`. Raises InvalidRequestError for settings that can't be."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": chat.system}] if chat.system else []
    for message in branch:
        if message.role == "assistant" and not (message.content or message.extra.get("tool_calls")):
            continue  # stopped before its first word
        messages.append({"role": message.role, "content": content_of(message)})
    settings = chat.settings
    thinking = {"enable_thinking": settings["thinking"]} if "thinking" in settings else {}
    return ChatTask(tuple(messages), params_of(settings), "schema", template_kwargs=thinking, fit_max_tokens=True)


def params_of(settings: Mapping[str, Any]) -> SamplingParams:
    """Raises InvalidRequestError that names the setting."""
    values: dict[str, Any] = {name: settings[name] for name in PARAMS if settings.get(name) is not None}
    if isinstance(stop := values.get("stop"), list):
        values["stop"] = tuple(stop)
    if schema := settings.get("schema"):
        values["grammar"] = Grammar("json_schema", checked_schema(schema))
    return SamplingParams(**values)


def checked_schema(text: str) -> str:
    """A JSON schema as it was typed. Raises InvalidRequestError with line and column."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidRequestError(f"the JSON schema is no JSON: {error}", param="schema") from None
    except RecursionError:
        raise InvalidRequestError("the JSON schema is nested too deeply", param="schema") from None
    if not isinstance(found, dict):
        raise InvalidRequestError("the JSON schema must be an object", param="schema")
    return text


def content_of(message: Message) -> str:
    """What the model reads of it: attached files come before the words about them."""
    parts = [f'<file name="{one["name"]}">\n{one["text"]}\n</file>' for one in message.extra.get("attachments", ())]
    return "\n\n".join([*parts, message.content] if message.content or not parts else parts)


def continued(llm: LLM, prepared: Prepared, text: str, reasoning: str) -> Prepared:
    """The same prompt with the beginning of its answer. A grammar would begin anew, so it is refused."""
    if prepared.params.grammar is not None:
        raise InvalidRequestError("a reply of a JSON schema can't be gone on with; try it again instead")
    think = prepared.format.think
    begun = text
    if reasoning and think is not None:
        opened = "" if think.is_open(prepared.prompt_tail) else think.start
        begun = f"{opened}{reasoning}{f'{think.end}{text}' if text else ''}"
    ids = [*prepared.ids, *llm.tokenizer.encode(begun, add_special_tokens=False)]
    return dataclasses.replace(prepared, ids=ids, prompt_tail=prepared.prompt_tail + begun)
