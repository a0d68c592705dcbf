"""A text continued as it is, with the interface of a ChatRun."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

from mlxinfer.server.chat import Finish, LogprobsPart
from mlxinfer.server.inflight import merged, submit_all
from mlxinfer.server.prompting import check_grammar, fitted
from mlxinfer.server.state import priority_of
from mlxinfer.tokenizer.replies import TextPart
from mlxinfer.types import Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.requests import Request

    from mlxinfer.llm import LLM, Generation
    from mlxinfer.pool import Lease
    from mlxinfer.server.chat import ChatPart
    from mlxinfer.server.ollama.task import RawText
    from mlxinfer.server.state import ServerState
    from mlxinfer.types import SamplingParams


class RawRun:
    """A submitted text. It holds the model's lease: whoever has it calls `end` when the answer is over."""

    def __init__(self, state: ServerState, lease: Lease, generation: Generation) -> None:
        self.model = lease.name
        self.tokenizer = lease.llm.tokenizer
        self._state = state
        self._lease = lease
        self._generation = generation
        self._tokens = 0
        self._ended = False

    async def parts(self) -> AsyncGenerator[tuple[int, ChatPart] | None]:
        """As ChatRun.parts: all text, no reasoning and no calls."""
        events = merged([self._generation], self._state.inflight, self._state.options.keepalive_s)
        async with contextlib.aclosing(events):
            async for event in events:
                if event is None:
                    yield None
                    continue
                _, delta = event
                self._tokens += len(delta.token_ids)
                if delta.logprobs:
                    yield 0, LogprobsPart(delta.logprobs)
                if delta.text:
                    yield 0, TextPart(delta.text)
                if delta.finish_reason is not None:
                    reason = "length" if delta.finish_reason == "length" else "stop"
                    usage = delta.usage or Usage()
                    self._ended = True
                    self._state.ended(self.model, usage, delta.timings, reason)
                    yield 0, Finish(reason, delta.stop_string, usage, delta.timings)

    def end(self) -> None:
        """Cancel what still runs and let the model go. Harmless when it has ended."""
        self._generation.cancel()
        if not self._ended:
            # One that an error or a departure cut short used tokens too.
            self._ended = True
            self._state.ended(self.model, Usage(self._generation.prompt_tokens, self._tokens), None, "cancelled")
        self._lease.release()


async def start_raw(request: Request, state: ServerState, model: str | None, task: RawText) -> RawRun:
    """Have the model loaded, tokenize off the event loop, and submit. Raises what `start_chat` raises."""
    state.check_open()
    priority = priority_of(request)
    lease = await state.lease(state.served_name(model), request.receive)
    try:
        ids, params = await state.in_pool(functools.partial(_prepare, lease.llm, task))
        state.check_open()
        options = {"priority": priority, "tenant": state.tenant}
        (generation,) = submit_all(lease.llm, [ids], [params], **options)
    except BaseException:
        lease.release()
        raise
    return RawRun(state, lease, generation)


def _prepare(llm: LLM, task: RawText) -> tuple[list[int], SamplingParams]:
    context = llm.info.context_length
    # Here and not when it is submitted: a grammar may take seconds.
    check_grammar(llm, task.params.grammar, "format")
    ids = llm.tokenizer.encode(task.text, max_tokens=context)
    return ids, fitted(task.params, context - len(ids))
