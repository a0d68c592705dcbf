"""From a chat task to what the engine is given: the prompt's tokens, the grammar, and how the reply will be read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.tokenizer.replies import reply_format
from mlxinfer.tokenizer.schemas import for_grammar
from mlxinfer.types import Grammar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlxinfer.llm import LLM
    from mlxinfer.server.chat import ChatTask
    from mlxinfer.tokenizer import Tokenizer
    from mlxinfer.tokenizer.replies import ReplyFormat, ReplyParser
    from mlxinfer.types import SamplingParams

TAIL_TOKENS = 32
"""The prompt's last tokens tell whether the template opened the reasoning."""

_formats: weakref.WeakKeyDictionary[Tokenizer, ReplyFormat] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task for one model."""

    ids: list[int]
    params: SamplingParams
    keep: frozenset[int]
    """Special tokens whose text the parser needs."""
    one_call: bool
    """The reply ends with its first tool call."""
    only_calls: bool
    """Nothing but calls fits the grammar."""
    format: ReplyFormat
    prompt_tail: str
    tools: tuple[dict[str, Any], ...]
    stop: tuple[str, ...]
    """Stop strings of the text alone; those of `params` are the engine's, which can't tell text from calls."""

    def parser(self) -> ReplyParser:
        """A new parser, for one choice. Without tools nothing is read as a call."""
        return self.format.parser(prompt_tail=self.prompt_tail, tools=self.tools, parse_tools=bool(self.tools))


def prepare(llm: LLM, task: ChatTask) -> Prepared:
    """Render, tokenize and choose the grammar. Takes milliseconds to seconds: not for the event loop.

    Raises InvalidRequestError for a tool choice that can't be met, and what `LLM.prompt_ids` raises.
    """
    form = format_of(llm)
    # A model that sees tools may call them whatever it is told, so with "none" it sees none.
    tools = () if task.tool_choice == "none" else task.tools
    forced = _forced(task)
    messages, kwargs = task.messages, dict(task.template_kwargs)
    if tools and form.has_tools:
        kwargs["tools"] = list(tools)
    elif not form.has_tools:
        messages = _told(task.messages, tools)
    ids = llm.prompt_ids(messages, **kwargs)
    tail = llm.tokenizer.decode(ids[-TAIL_TOKENS:], skip_special_tokens=False)
    field = "tools" if forced else task.grammar_field
    with _naming(field):
        params = dataclasses.replace(task.params, grammar=_grammar(task, form, tail, forced))
    # Here and not when it is submitted: a grammar may take seconds.
    check_grammar(llm, params.grammar, field)
    if task.fit_max_tokens:
        params = fitted(params, llm.info.context_length - len(ids))
    stop = params.stop if tools or form.has_reasoning else ()
    return Prepared(
        ids=ids,
        params=dataclasses.replace(params, stop=()) if stop else params,
        keep=_marker_ids(llm.tokenizer, form) if tools or form.has_reasoning else frozenset(),
        one_call=bool(tools) and not task.parallel_tool_calls,
        only_calls=bool(forced),
        format=form,
        prompt_tail=tail,
        tools=tools,
        stop=stop,
    )


def format_of(llm: LLM) -> ReplyFormat:
    """How this model writes calls and reasoning; found once per tokenizer."""
    with _lock:
        form = _formats.get(llm.tokenizer)
        if form is None:
            form = _formats[llm.tokenizer] = reply_format(llm.tokenizer, llm.info.model_type)
        return form


def check_grammar(llm: LLM, grammar: Grammar | None, field: str) -> None:
    """Compile a grammar, for the submit that follows. Raises InvalidRequestError naming `field`."""
    if grammar is not None:
        with _naming(field):
            llm.compile(grammar)


@contextlib.contextmanager
def _naming(field: str) -> Iterator[None]:
    """What is wrong with a grammar is told of by the name that the client gave it."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param != "grammar":
            raise
        raise InvalidRequestError(f"{field}: {error}", param=field) from None


def fitted(params: SamplingParams, room: int) -> SamplingParams:
    """The parameters with max_tokens of at most `room`; where there is none, submitting them says so."""
    if params.max_tokens is None or room < 1:
        return params
    return dataclasses.replace(params, max_tokens=min(params.max_tokens, room))


def _marker_ids(tokenizer: Tokenizer, form: ReplyFormat) -> frozenset[int]:
    return frozenset(i for marker in form.markers if (i := tokenizer.special_id(marker)) is not None)


def _forced(task: ChatTask) -> Sequence[dict[str, Any]]:
    """The tools of which one has to be called."""
    if task.tool_choice in ("auto", "none"):
        return ()
    if not task.tools:
        raise InvalidRequestError("tool_choice asks for a call and there are no tools", param="tool_choice")
    if task.tool_choice == "required":
        return task.tools
    name = task.tool_choice.removeprefix("function:")
    chosen = [tool for tool in task.tools if tool["function"]["name"] == name]
    if not chosen:
        raise InvalidRequestError(f"tool_choice names {name!r:.80}, which is not among the tools", param="tool_choice")
    return chosen


def _grammar(task: ChatTask, form: ReplyFormat, tail: str, forced: Sequence[dict[str, Any]]) -> Grammar | None:
    """What the reply must be: a call where one is forced (no text comes then), else text of the form that is asked for,
    or calls too where they are left to the model. Reasoning may come first."""
    if forced:
        parallel = task.tool_choice == "required" and task.parallel_tool_calls
        return form.calls_constrained(forced, tail, parallel=parallel)
    wanted = task.params.grammar
    if wanted is None:
        return None
    if task.tools and task.tool_choice == "auto":
        return _text_or_calls(wanted, task, form, tail)
    if wanted.kind == "lark" and form.think is not None and form.think.is_open(tail):
        raise InvalidRequestError(
            "this model's reply begins inside its reasoning, and a Lark grammar says all of a reply; turn the "
            "reasoning off, or use another kind of grammar",
            param="grammar",
        )
    return form.constrained(wanted, tail)


def _text_or_calls(wanted: Grammar, task: ChatTask, form: ReplyFormat, tail: str) -> Grammar:
    """JSON of the form that is asked for, or calls of the tools, whichever the model begins."""
    if wanted.kind not in ("json_schema", "json_object"):
        raise InvalidRequestError(
            f"a {wanted.kind} with tools needs a tool_choice: 'none' for text of that form, 'required' for a call",
            param="tool_choice",
        )
    text = form.constrained(wanted, tail, reasons=False)
    if text.kind != "lark":
        # Read and written again: nothing but one JSON value gets into the grammar.
        schema = json.loads(wanted.text) if wanted.kind == "json_schema" else {"type": "object"}
        text = Grammar("lark", f"start: text\ntext: %json {json.dumps(for_grammar(schema))}\n")
    calls = form.calls_constrained(task.tools, tail, parallel=task.parallel_tool_calls, reasons=False)
    of_text, of_calls = (grammar.text.removeprefix("start: ").split("\n", 1) for grammar in (text, calls))
    prefix = form.reasoning_prefix(tail)
    either = f"(({of_text[0]}) | ({of_calls[0]}))"
    start = f"reasoning {either}" if prefix else either
    return Grammar("lark", f"start: {start}\n{of_text[1]}\n{of_calls[1]}\n{prefix or ''}")


def _told(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The messages for a template that knows no tools: what they are and how to call them goes into the system message,
    and calls and results of earlier turns become text."""
    told: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        made = _as_text(message)
        if i and message["role"] == "tool" == messages[i - 1]["role"]:
            # Many templates want the user and the assistant to take turns.
            told[-1]["content"] = f"{told[-1]['content']}\n{made['content']}"
        else:
            told.append(made)
    if tools:
        head = _texts(told.pop(0)) if told and told[0]["role"] == "system" else []
        told.insert(0, {"role": "system", "content": "\n".join([*head, "", _tool_text(tools)]).lstrip("\n")})
    return tuple(told)


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": "\n".join(_texts(message))}
    if not message.get("tool_calls"):
        return message
    calls = [
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False)
        for call in message["tool_calls"]
    ]
    return {"role": message["role"], "content": "\n".join([*_texts(message), *calls])}


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content") or ()
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _tool_text(tools: Sequence[dict[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions:\n{lines}\nTo call one, reply with nothing but a JSON object: "
        '{"name": the function\'s name, "arguments": an object of its parameters}'
    )
