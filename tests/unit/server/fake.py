"""A model that repeats letters: LLM's interface without arrays, deterministic in prompt, seed and parameters."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.errors import ContextLengthError, EngineClosedError, InvalidRequestError, MlxinferError, QueueFullError
from mlxinfer.tokenizer import StopMatcher, Tokenizer
from mlxinfer.types import Delta, ModelInfo, SamplingParams, Usage
from tests.unit.tokenizer import tiny

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

CONTEXT = 4096
NATURAL_LENGTH = 6


class FakeGeneration:
    """Emits one letter per token, then ends; slow ones wait between tokens."""

    def __init__(self, llm: FakeLLM, ids: Sequence[int], params: SamplingParams) -> None:
        self.id = f"fake-{id(self)}"
        self.prompt_tokens = len(ids)
        self.params = params
        self.cancelled = threading.Event()
        self._llm = llm
        self._start = zlib.crc32(repr((tuple(ids), params.seed or 0, sorted(params.logit_bias.items()))).encode())

    def cancel(self) -> None:
        self.cancelled.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        matcher = StopMatcher(self.params.stop)
        limit = min(self.params.max_tokens or NATURAL_LENGTH, 10_000 if self._llm.endless else NATURAL_LENGTH)
        count = 0
        for count in range(1, limit + 1):
            await asyncio.sleep(self._llm.delay_s)
            if self._llm.fail_after is not None and count > self._llm.fail_after:
                raise self._llm.failure
            if self.cancelled.is_set():
                yield Delta(finish_reason="cancelled", usage=self._usage(count))
                return
            text, stopped = matcher.feed(chr(97 + (self._start + count) % 26))
            if stopped:
                yield Delta(text=text, finish_reason="stop", usage=self._usage(count))
                return
            yield Delta(text=text, token_ids=(count,))
        reason = "length" if self.params.max_tokens is not None and limit == self.params.max_tokens else "stop"
        yield Delta(text=matcher.flush(), finish_reason=reason, usage=self._usage(count))

    def _usage(self, count: int) -> Usage:
        return Usage(prompt_tokens=self.prompt_tokens, completion_tokens=count)


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
        self.fail_after: int | None = None
        self.failure: Exception = MlxinferError("the engine broke")
        self.full_from: int | None = None
        self.made: list[FakeGeneration] = []
        self.rendered: list[list[dict[str, Any]]] = []
        self.kwargs: dict[str, Any] = {}

    def prompt_ids(self, messages: Any, *, system: str | None = None, **kwargs: Any) -> list[int]:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            pytest.fail("a chat template was rendered on the event loop")
        self.rendered.append(messages)
        self.kwargs = kwargs
        return self.tokenizer.chat_ids(messages, CONTEXT, **kwargs)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, *, priority: int = 0) -> FakeGeneration:
        if not self.alive:
            raise EngineClosedError("the model was unloaded")
        self.check(prompt_ids, params)
        if self.full_from is not None and len(self.made) >= self.full_from:
            raise QueueFullError("too many requests are waiting", retry_after=2.5)
        generation = FakeGeneration(self, prompt_ids, params)
        self.made.append(generation)
        return generation

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
