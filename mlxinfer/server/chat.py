"""One chat, whatever API it came by: a task goes in, and the parts of its replies come out as they are made."""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxinfer.server.inflight import merged, seeded, submit_all
from mlxinfer.server.prompting import prepare
from mlxinfer.server.reader import Finish, LogprobsPart, Reader
from mlxinfer.server.state import priority_of
from mlxinfer.tokenizer.replies import ReasoningPart, TextPart, ToolCallArguments, ToolCallEnd, ToolCallStart
from mlxinfer.types import SamplingParams, TokenLogprob, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from starlette.requests import Request

    from mlxinfer.llm import Generation
    from mlxinfer.pool import Lease
    from mlxinfer.server.prompting import Prepared
    from mlxinfer.server.reader import ChatPart
    from mlxinfer.server.state import ServerState


@dataclass(frozen=True, slots=True)
class ChatTask:
    """What a client asks for, in no API's words."""

    messages: tuple[dict[str, Any], ...]
    """As chat templates read them: role system, user, assistant or tool; content a string or text parts; tool_calls
    with their arguments as objects; reasoning_content."""
    params: SamplingParams
    """With a grammar when the text has to have a form."""
    grammar_field: str = "grammar"
    """What the client calls the field that the grammar came in; errors name it."""
    n: int = 1
    tools: tuple[dict[str, Any], ...] = ()
    """In OpenAI's shape."""
    tool_choice: str = "auto"
    """"auto", "none", "required" or "function:" and a name."""
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    priority: int | None = None
    """None: what the request's header says, else 0."""
    fit_max_tokens: bool = False
    """A max_tokens beyond the context is cut to what is left of it; else it is an error."""


@dataclass(slots=True)
class Collected:
    """A whole choice. A call that was cut off is left out."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """(name, arguments as JSON text)."""
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    finish: Finish = field(default_factory=lambda: Finish("stop", None, Usage(), None))


class ChatRun:
    """A submitted task. It holds the model's lease: whoever has it calls `end` when the answer is over."""

    def __init__(self, state: ServerState, lease: Lease, prepared: Prepared, generations: Sequence[Generation]) -> None:
        self.model = lease.name
        self.id = secrets.token_hex(12)
        self.created = int(time.time())
        self.n = len(generations)
        self.tokenizer = lease.llm.tokenizer
        self.prompt_tokens = len(prepared.ids)
        self._state = state
        self._lease = lease
        self._generations = generations
        self._readers = [Reader(prepared) for _ in generations]
        self._open = set(range(self.n))

    async def parts(self) -> AsyncGenerator[tuple[int, ChatPart] | None]:
        """(choice, part) of all choices as they come, None after each `keepalive_s` of silence; once only.

        Each choice's last part is its Finish. Raises the first error of any; leaving early cancels all.
        """
        cancelled: set[int] = set()
        events = merged(self._generations, self._state.inflight, self._state.options.keepalive_s, cancelled)
        async with contextlib.aclosing(events):
            async for event in events:
                if event is None:
                    yield None
                    continue
                index, delta = event
                reader = self._readers[index]
                for part in reader.read(delta):
                    if isinstance(part, Finish):
                        self._open.discard(index)
                        self._record(part, with_prompt=index == 0)
                    yield index, part
                if reader.enough and index not in cancelled and delta.finish_reason is None:
                    cancelled.add(index)
                    self._generations[index].cancel()

    def _record(self, part: Finish, *, with_prompt: bool) -> None:
        self._state.ended(self.model, part.usage, part.timings, part.reason, with_prompt=with_prompt)

    async def collect(self) -> list[Collected]:
        """All choices, whole. Raises the first error of any."""
        choices = [_Collector() for _ in self._generations]
        async with contextlib.aclosing(self.parts()) as parts:
            async for item in parts:
                if item is not None:
                    choices[item[0]].add(item[1])
        return [choice.collected() for choice in choices]

    def end(self) -> None:
        """Cancel what still runs and let the model go. Harmless when it has ended."""
        for generation in self._generations:
            generation.cancel()
        # Those that an error or a departure cut short used tokens too.
        while self._open:
            index = self._open.pop()
            usage = Usage(self.prompt_tokens, self._readers[index].tokens)
            self._state.ended(self.model, usage, None, "cancelled", with_prompt=index == 0)
        self._lease.release()


async def start_chat(request: Request, state: ServerState, model: str | None, task: ChatTask) -> ChatRun:
    """Have the model loaded, render and tokenize off the event loop, and submit; nothing has been sent yet.

    Raises what `ServerState.lease`, the chat template and `LLM.submit` raise, and HttpError 503 at a shutdown.
    """
    state.check_open()
    priority = priority_of(request) if task.priority is None else task.priority
    lease = await state.lease(state.served_name(model), request.receive)
    try:
        prepared = await state.in_pool(functools.partial(prepare, lease.llm, task))
        state.check_open()
        options: dict[str, Any] = {"priority": priority, "tenant": state.tenant}
        if prepared.keep:
            options["keep"] = prepared.keep
        generations = submit_all(lease.llm, [prepared.ids], seeded(prepared.params, task.n), **options)
    except BaseException:
        lease.release()
        raise
    return ChatRun(state, lease, prepared, generations)


async def count_prompt(request: Request, state: ServerState, model: str | None, task: ChatTask) -> int:
    """The number of tokens the task's prompt has. Raises what `start_chat` raises before it submits."""
    state.check_open()
    lease = await state.lease(state.served_name(model), request.receive)
    with lease:
        return len((await state.in_pool(functools.partial(prepare, lease.llm, task))).ids)


class _Collector:
    def __init__(self) -> None:
        self._found = Collected()
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._names: dict[int, str] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, part: ChatPart) -> None:
        match part:
            case TextPart():
                self._text.append(part.text)
            case ReasoningPart():
                self._reasoning.append(part.text)
            case ToolCallStart():
                self._names[part.index], self._arguments[part.index] = part.name, []
            case ToolCallArguments():
                self._arguments[part.index].append(part.text)
            case ToolCallEnd():
                self._found.tool_calls.append((self._names[part.index], "".join(self._arguments[part.index])))
            case LogprobsPart():
                self._found.logprobs += part.tokens
            case Finish():
                self._found.finish = part

    def collected(self) -> Collected:
        self._found.text, self._found.reasoning = "".join(self._text), "".join(self._reasoning)
        return self._found
