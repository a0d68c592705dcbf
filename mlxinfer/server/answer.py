"""From generations to OpenAI's objects: whole, or chunk by chunk. Chat and text completions differ in a few keys."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxinfer import __version__
from mlxinfer.server.errors import json_response
from mlxinfer.server.inflight import merged, until_disconnect
from mlxinfer.server.schemas import IGNORED_HEADER
from mlxinfer.server.sse import EventStream
from mlxinfer.types import Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from mlxinfer.llm import Generation
    from mlxinfer.pool import Lease
    from mlxinfer.server.schemas import SamplingFields
    from mlxinfer.server.state import ServerState
    from mlxinfer.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Kind:
    """The names of one kind of answer."""

    id_prefix: str
    whole: str
    chunk: str
    is_chat: bool

    def choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """A choice of a whole answer."""
        body = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
        return {"index": index, **body, "logprobs": None, "finish_reason": reason}

    def delta(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """A choice of a chunk."""
        body = {"delta": {"content": text} if text else {}} if self.is_chat else {"text": text}
        return {"index": index, **body, "logprobs": None, "finish_reason": reason}

    def opening(self, index: int) -> dict[str, Any]:
        body = {"delta": {"role": "assistant", "content": ""}}
        return {"index": index, **body, "logprobs": None, "finish_reason": None}


CHAT = Kind("chatcmpl-", "chat.completion", "chat.completion.chunk", is_chat=True)
TEXT = Kind("cmpl-", "text_completion", "text_completion", is_chat=False)


@dataclass(slots=True)
class Answer:
    """One answer on its way: the generations of all its choices and what frames them."""

    kind: Kind
    model: str
    generations: Sequence[Generation]
    n: int
    """Choices per prompt; a prompt is counted once in the usage."""
    state: ServerState
    lease: Lease
    """Of the model; ends with the answer."""
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    usages: dict[int, Usage] = field(default_factory=dict)

    def _frame(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.kind.id_prefix + self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"mlxinfer-{__version__}",
            "choices": choices,
        }

    def _merged(self):
        return merged(self.generations, self.state.inflight, self.state.options.keepalive_s)

    async def whole(self) -> dict[str, Any]:
        texts: list[list[str]] = [[] for _ in self.generations]
        reasons: list[str | None] = [None] * len(texts)
        async with contextlib.aclosing(self._merged()) as events:
            async for event in events:
                if event is not None:
                    index, delta = event
                    texts[index].append(delta.text)
                    if delta.finish_reason is not None:
                        reasons[index], self.usages[index] = delta.finish_reason, delta.usage or Usage()
        choices = [self.kind.choice(i, "".join(t), reasons[i]) for i, t in enumerate(texts)]
        return self._frame(self.kind.whole, choices) | {"usage": self.usage()}

    async def chunks(self, include_usage: bool) -> AsyncGenerator[dict[str, Any] | None]:
        blank: dict[str, Any] = {"usage": None} if include_usage else {}
        async with contextlib.aclosing(self._merged()) as events:
            if self.kind.is_chat:
                for index in range(len(self.generations)):
                    yield self._frame(self.kind.chunk, [self.kind.opening(index)]) | blank
            async for event in events:
                if event is None:
                    yield None
                    continue
                index, delta = event
                if delta.text:
                    yield self._frame(self.kind.chunk, [self.kind.delta(index, delta.text, None)]) | blank
                if delta.finish_reason is not None:
                    self.usages[index] = delta.usage or Usage()
                    yield self._frame(self.kind.chunk, [self.kind.delta(index, "", delta.finish_reason)]) | blank
        if include_usage:
            yield self._frame(self.kind.chunk, []) | {"usage": self.usage()}

    def end(self) -> None:
        """Cancel what still runs and let go of the model. Harmless when it has ended."""
        for generation in self.generations:
            generation.cancel()
        self.lease.release()

    def usage(self) -> dict[str, Any]:
        """Token counts of all choices; each prompt once."""
        firsts = [u for i, u in self.usages.items() if i % self.n == 0]
        prompt = sum(u.prompt_tokens for u in firsts)
        completion = sum(u.completion_tokens for u in self.usages.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in firsts)},
        }


def seeded(params: SamplingParams, n: int) -> list[SamplingParams]:
    """One per choice; with a seed, choice i samples with seed + i."""
    if params.seed is None:
        return [params] * n
    return [dataclasses.replace(params, seed=_wrapped(params.seed + i)) for i in range(n)]


def _wrapped(seed: int) -> int:
    return seed if seed < 2**64 else seed - 2**64


async def respond(request: Request, body: SamplingFields, ignored: tuple[str, ...], answer: Answer) -> Response:
    """The HTTP response; a client that leaves, or anything that goes wrong, cancels the generations."""
    headers = {IGNORED_HEADER: ", ".join(ignored)} if ignored else {}
    if body.stream:
        options = body.stream_options
        return EventStream(answer.chunks(bool(options and options.include_usage)), headers, answer.end)
    try:
        whole = await until_disconnect(request.receive, answer.whole())
    finally:
        answer.end()
    # Nobody reads the answer to a client that left.
    return json_response(whole or {}, headers=headers)
