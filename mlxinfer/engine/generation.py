"""One request in flight, on the consumer's side: events from the MLX thread become text."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxinfer.errors import MlxinferError
from mlxinfer.tokenizer import StopMatcher, Tokenizer
from mlxinfer.types import Delta, FinishReason, Reply, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from mlxinfer.engine.engine import Engine, Event, Request
    from mlxinfer.types import Timings, TokenLogprob


class Mailbox:
    """Where the MLX thread leaves a request's events. It doesn't know its Generation, so that one can be collected."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.notify: Callable[[], object] | None = None

    def sink(self, event: Event) -> None:
        """Called on the MLX thread. Raises RuntimeError when the consumer's event loop is closed."""
        self.events.put(event)
        if (notify := self.notify) is not None:
            notify()


class Generation:
    """Iterate it once, sync or async, for Deltas. The last one, and only that, has a finish_reason.

    Leaving the iteration early, or dropping the object, cancels the request. Errors of the engine are raised from the
    iteration. `owner` is kept alive as long as this is.
    """

    def __init__(
        self,
        request: Request,
        engine: Engine,
        tokenizer: Tokenizer,
        stop: tuple[str, ...],
        model: str,
        owner: object,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """`keep`: special tokens that show in the text."""
        self.id = request.spec.request_id
        self.prompt_tokens = len(request.spec.prompt_token_ids)
        self.model = model
        self.owner = owner
        self._eos = request.eos_token_ids
        self._engine = engine
        self._mailbox = Mailbox()
        self._text = _TextAssembly(tokenizer, stop, keep)
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        """From the first delta on, when they were asked for."""
        self._ended = False
        self._iterated = False
        engine.submit(request, self._mailbox.sink)
        self._dropped = weakref.finalize(self, engine.cancel, self.id)
        self._dropped.atexit = False

    def cancel(self) -> None:
        """End the request; the row is free within one step. Harmless when it has ended."""
        if not self._ended:
            self._engine.cancel(self.id)

    def _end(self) -> None:
        self._ended = True
        self._dropped.detach()

    def __iter__(self) -> Iterator[Delta]:
        self._start()
        try:
            while not self._ended:
                delta = self._take(self._mailbox.events.get())
                if delta is not None:
                    yield delta
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        self._start()
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()
        self._mailbox.notify = lambda: loop.call_soon_threadsafe(wake.set)
        try:
            while not self._ended:
                try:
                    event = self._mailbox.events.get_nowait()
                except queue.Empty:
                    await wake.wait()
                    wake.clear()
                    continue
                delta = self._take(event)
                if delta is not None:
                    yield delta
        finally:
            self._mailbox.notify = None
            self.cancel()

    def _start(self) -> None:
        if self._iterated:
            raise RuntimeError("a Generation can be iterated only once")
        self._iterated = True

    def _take(self, event: Event) -> Delta | None:
        if event.error is not None:
            self._end()
            raise event.error
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs
        if event.token is not None and not self._text.stopped:
            self._text.add(event.token, is_eos=event.token in self._eos, logprob=event.logprob)
            if self._text.stopped and event.finished is None:
                # The terminal event follows within a step and brings the figures.
                self._engine.cancel(self.id, "stop")
        if event.finished is None:
            return self._text.take()
        self._end()
        reason: FinishReason = "stop" if self._text.finish() else event.finished
        usage = replace(event.usage or Usage(), completion_tokens=self._text.num_tokens)
        rest = self._text.rest()
        return replace(
            rest, finish_reason=reason, usage=usage, timings=event.timings, stop_string=self._text.stop_string
        )

    def result(self) -> Reply:
        """Wait for the whole reply."""
        collected = _Collected(self.model)
        for delta in self:
            collected.add(delta)
        return collected.reply()

    async def aresult(self) -> Reply:
        """`result` for an event loop."""
        collected = _Collected(self.model)
        async for delta in self:
            collected.add(delta)
        return collected.reply()


class _TextAssembly:
    """Tokens in, text out: partial characters and possible beginnings of stop strings are held back."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], keep: frozenset[int]) -> None:
        self._detokenizer = tokenizer.detokenizer(keep)
        self._matcher = StopMatcher(stop)
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self.num_tokens = 0
        self.stopped = False

    @property
    def stop_string(self) -> str | None:
        return self._matcher.found

    def add(self, token: int, *, is_eos: bool, logprob: TokenLogprob | None = None) -> None:
        """Take a token in; the end-of-sequence token counts and is not part of the text."""
        self.num_tokens += 1
        if not is_eos:
            self._ids.append(token)
            if logprob is not None:
                self._logprobs.append(logprob)
            self._feed(self._detokenizer.add(token))

    def _feed(self, piece: str) -> None:
        if piece and not self.stopped:
            text, self.stopped = self._matcher.feed(piece)
            self._text.append(text)

    def finish(self) -> bool:
        """Flush what was held; True when the text ended at a stop string."""
        if not self.stopped:
            self._feed(self._detokenizer.flush())
        if not self.stopped:
            self._text.append(self._matcher.flush())
        return self.stopped

    def take(self) -> Delta | None:
        """What is ready to go out, or None."""
        text = "".join(self._text)
        if not text:
            return None
        return self.rest()

    def rest(self) -> Delta:
        """Everything that is ready; token ids that gave no text too. With a stop string, the ids reach to its end."""
        delta = Delta(text="".join(self._text), token_ids=tuple(self._ids), logprobs=tuple(self._logprobs))
        self._ids, self._text, self._logprobs = [], [], []
        return delta


class _Collected:
    def __init__(self, model: str) -> None:
        self.model = model
        self.text: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.reason: FinishReason = "cancelled"
        self.usage: Usage | None = None
        self.timings: Timings | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.reason, self.usage, self.timings = delta.finish_reason, delta.usage, delta.timings

    def reply(self) -> Reply:
        return Reply(
            "".join(self.text),
            usage=self.usage,
            timings=self.timings,
            finish_reason=self.reason,
            token_ids=self.ids,
            logprobs=self.logprobs,
            model=self.model,
        )


class Stream:
    """A reply as it is made: iterate it for pieces of text. `reply` is the whole, complete after the last piece.

    `close`, or leaving the `with` block, cancels what is left and keeps the text so far; any thread may call it.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._collected = _Collected(generation.model)
        self._deltas = iter(generation)
        self._reading = threading.Lock()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        with self._reading:
            for delta in self._deltas:
                self._collected.add(delta)
                if delta.text:
                    return delta.text
        raise StopIteration

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except MlxinferError:
            # An error that is on its way already says more.
            if kind is None:
                raise

    def close(self) -> None:
        """Cancel the request if it still runs, and take in what it had made."""
        self._generation.cancel()
        # Another thread that waits in __next__ gets the cancelled request's last delta and lets go.
        with self._reading:
            for delta in self._deltas:
                self._collected.add(delta)

    @property
    def reply(self) -> Reply:
        """The reply so far; `finish_reason` is "cancelled" until the end is reached."""
        return self._collected.reply()
