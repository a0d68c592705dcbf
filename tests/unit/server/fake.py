"""A model that repeats letters, or says what it is told to: LLM's interface without arrays, deterministic in prompt,
seed and parameters."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import pytest

# A real model has imported it on a thread that stays; on one that ends, mlx aborts the process at its exit.
import mlxinfer.upstream  # noqa: F401
from mlxinfer.errors import ContextLengthError, EngineClosedError, InvalidRequestError, MlxinferError, QueueFullError
from mlxinfer.tokenizer import StopMatcher, Tokenizer
from mlxinfer.types import Delta, Grammar, ModelInfo, SamplingParams, Timings, TokenLogprob, Usage
from tests.unit.tokenizer import tiny

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

CONTEXT = 4096
NATURAL_LENGTH = 6


def logprob_of(token_id: int, top: int) -> TokenLogprob:
    """A made-up value that tells tokens apart, and alternatives that begin with the token itself."""
    value = -token_id / 8
    return TokenLogprob(token_id, value, tuple((token_id + i, value - i) for i in range(top)))


class FakeGeneration:
    """Emits one letter per token (or the model's `says`, piece by piece), then ends; slow ones wait between tokens."""

    def __init__(
        self, llm: FakeLLM, ids: Sequence[int], params: SamplingParams, options: dict[str, Any] | None = None
    ) -> None:
        self.id = f"fake-{id(self)}"
        self.prompt_tokens = len(ids)
        self.params = params
        self.options = options or {}
        self.cancelled = threading.Event()
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        if (top := self.options.get("prompt_logprobs")) is not None:
            self.prompt_logprobs = (None, *(logprob_of(token, top) for token in ids[1:]))
        self._llm = llm
        self._start = zlib.crc32(repr((tuple(ids), params.seed or 0, sorted(params.logit_bias.items()))).encode())

    def cancel(self) -> None:
        self.cancelled.set()

    def _pieces(self) -> list[str]:
        if self._llm.says is not None:
            return list(self._llm.says)
        length = 10_000 if self._llm.endless else NATURAL_LENGTH
        return [chr(97 + (self._start + count) % 26) for count in range(1, length + 1)]

    async def __aiter__(self) -> AsyncIterator[Delta]:
        matcher = StopMatcher(self.params.stop)
        pieces = self._pieces()
        limit = min(self.params.max_tokens or len(pieces), len(pieces))
        count = 0
        for count in range(1, limit + 1):
            await asyncio.sleep(self._llm.delay_s)
            if self._llm.fail_after is not None and count > self._llm.fail_after:
                raise self._llm.failure
            if self.cancelled.is_set():
                yield Delta(finish_reason="cancelled", usage=self._usage(count))
                return
            text, stopped = matcher.feed(pieces[count - 1])
            logprobs = self._logprobs(pieces[count - 1])
            if stopped:
                yield Delta(text=text, logprobs=logprobs, finish_reason="stop", usage=self._usage(count))
                return
            yield Delta(text=text, token_ids=(count,), logprobs=logprobs)
        reason = "length" if self.params.max_tokens is not None and limit == self.params.max_tokens else "stop"
        yield Delta(text=matcher.flush(), finish_reason=reason, usage=self._usage(count), timings=Timings(total_s=1.0))

    def _logprobs(self, piece: str) -> tuple[TokenLogprob, ...]:
        if self.params.logprobs is None:
            return ()
        return (logprob_of(self._llm.tokenizer.encode(piece, add_special_tokens=False)[0], self.params.logprobs),)

    def _usage(self, count: int) -> Usage:
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=count, cached_tokens=self._llm.cached)


class FakeLLM:
    """What the server uses of LLM."""

    def __init__(self, name: str = "tiny") -> None:
        self.tokenizer = Tokenizer.from_parts(
            tokenizer_json=tiny.byte_level(), chat_template=tiny.CHATML, bos_token="<s>", eos_token="</s>"
        )
        self.info = ModelInfo(
            name, "fake", "nowhere", CONTEXT, self.tokenizer.vocab_size, 1, 1, "float32", "none", "ragged", True
        )
        self.alive = True
        self.delay_s = 0.0
        self.endless = False
        self.says: Sequence[str] | None = None
        """A reply, in the pieces it comes in."""
        self.cached = 0
        self.fail_after: int | None = None
        self.failure: Exception = MlxinferError("the engine broke")
        self.full_from: int | None = None
        self.made: list[FakeGeneration] = []
        self.compiled: list[Grammar] = []
        self.rendered: list[Sequence[dict[str, Any]]] = []
        self.kwargs: dict[str, Any] = {}

    def prompt_ids(self, messages: Any, *, system: str | None = None, **kwargs: Any) -> list[int]:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            pytest.fail("a chat template was rendered on the event loop")
        self.rendered.append(messages)
        self.kwargs = kwargs
        return self.tokenizer.chat_ids(messages, CONTEXT, **kwargs)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, **options: Any) -> FakeGeneration:
        unknown = set(options) - {"priority", "tenant", "keep", "prompt_logprobs"}
        assert not unknown, f"LLM.submit does not take {unknown}"
        if not self.alive:
            raise EngineClosedError("the model was unloaded")
        self.check(prompt_ids, params)
        if self.full_from is not None and len(self.made) >= self.full_from:
            raise QueueFullError("too many requests are waiting", retry_after=2.5)
        assert params.grammar is None or params.grammar in self.compiled, "submit would compile on the event loop"
        generation = FakeGeneration(self, prompt_ids, params, options)
        self.made.append(generation)
        return generation

    def compile(self, grammar: Grammar) -> None:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            pytest.fail("a grammar was compiled on the event loop")
        self.compiled.append(grammar)
        if "no such thing" in grammar.text:
            raise InvalidRequestError("the grammar cannot be used", param="grammar")

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        if not prompt_ids:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        for field, ids in (("prompt", prompt_ids), ("logit_bias", params.logit_bias)):
            if any(not 0 <= token < self.info.vocab_size for token in ids):
                raise InvalidRequestError(f"{field}: an id is outside the vocabulary", param=field)
        if len(prompt_ids) + (params.max_tokens or 1) > CONTEXT:
            raise ContextLengthError(f"max_tokens: more than the context of {CONTEXT}", param="max_tokens")

    def stats(self) -> dict[str, int]:
        return {"running": 1, "waiting": 2}


def wait_for(condition: Any, timeout_s: float = 10) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False
