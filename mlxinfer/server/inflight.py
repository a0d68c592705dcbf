"""The generations behind one HTTP request, as one stream of deltas that a departure or a shutdown ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from mlxinfer.errors import EngineClosedError, MlxinferError
from mlxinfer.server.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Coroutine, Sequence

    from starlette.types import Receive

    from mlxinfer.llm import LLM, Generation
    from mlxinfer.types import Delta, SamplingParams

T = TypeVar("T")


class Inflight:
    """Every request that is being answered. Lives on the event loop."""

    def __init__(self) -> None:
        self.draining = False
        self._enders: set[Callable[[MlxinferError], None]] = set()
        self._starting: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._enders)

    @contextlib.contextmanager
    def registered(self, end: Callable[[MlxinferError], None]):
        self._enders.add(end)
        try:
            yield
        finally:
            self._enders.discard(end)

    async def unless_draining(self, work: Awaitable[T]) -> T:
        """The result of `work`, what comes before a request is queued. Raises HttpError 503 when a shutdown begins."""
        task = asyncio.ensure_future(work)
        ended = asyncio.get_running_loop().create_future()
        self._starting.add(ended)
        try:
            if not self.draining:
                await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
            if self.draining:
                raise shutting_down()
            return task.result()
        finally:
            self._starting.discard(ended)
            ended.cancel()
            await _end((task,))

    async def ended(self, work: Coroutine[None, None, T]) -> T:
        """The result of `work`, which a shutdown ends after its grace. Raises EngineClosedError then."""
        task = asyncio.create_task(work)
        errors: list[MlxinferError] = []

        def end(error: MlxinferError) -> None:
            errors.append(error)
            task.cancel()

        try:
            with self.registered(end):
                return await task
        except asyncio.CancelledError:
            if errors:
                raise errors[0] from None
            raise
        finally:
            await _end((task,))

    def drain(self) -> None:
        """From now on nothing is queued; what would have been gets its answer at once."""
        self.draining = True
        for ended in self._starting:
            if not ended.done():
                ended.set_result(None)

    def end_all(self) -> None:
        """Every open request gets an error as its last event."""
        for end in tuple(self._enders):
            end(EngineClosedError("the server is shutting down"))


def shutting_down() -> HttpError:
    headers = {"retry-after": "5", "connection": "close"}
    return HttpError(503, "the server is shutting down", code="shutting_down", headers=headers)


def seeded(params: SamplingParams, n: int) -> list[SamplingParams]:
    """One per choice; with a seed, choice i samples with seed + i."""
    if params.seed is None:
        return [params] * n
    return [dataclasses.replace(params, seed=_wrapped(params.seed + i)) for i in range(n)]


def _wrapped(seed: int) -> int:
    return seed if seed < 2**64 else seed - 2**64


def submit_all(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **options: Any
) -> list[Generation]:
    """One generation per prompt and params, prompts outermost; all or none. `options` and errors are LLM.submit's."""
    for ids in prompts:
        llm.check(ids, params[0])
    made: list[Generation] = []
    try:
        for ids in prompts:
            for one in params:
                made.append(llm.submit(ids, one, **options))
    except MlxinferError:
        for generation in made:
            generation.cancel()
        raise
    return made


async def merged(
    generations: Sequence[Generation], inflight: Inflight, keepalive_s: float, cancelled: Container[int] = ()
) -> AsyncGenerator[tuple[int, Delta] | None]:
    """(index, delta) of all generations as they come, None after each `keepalive_s` of silence.

    Ends when each has had its last delta. Raises the first error of any; those whose index is in `cancelled`, which may
    grow meanwhile, may end so. Leaving early cancels all.
    """
    events: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    tasks = [asyncio.create_task(_pump(i, g, events)) for i, g in enumerate(generations)]
    try:
        with inflight.registered(events.put_nowait):
            left = len(generations)
            while left:
                # A timer costs less than wait_for, which makes a task for every token.
                timer = loop.call_later(keepalive_s, events.put_nowait, None)
                try:
                    event = await events.get()
                finally:
                    timer.cancel()
                if event is None:
                    yield None
                    continue
                if isinstance(event, Exception):
                    raise event
                reason = event[1].finish_reason
                if reason == "error" or (reason == "cancelled" and event[0] not in cancelled):
                    raise EngineClosedError("the request was ended by the server")
                left -= reason is not None
                yield event
    finally:
        for generation in generations:
            generation.cancel()
        await _end(tasks)


async def _pump(
    index: int, generation: Generation, events: asyncio.Queue[tuple[int, Delta] | Exception | None]
) -> None:
    try:
        async for delta in generation:
            events.put_nowait((index, delta))
    except Exception as error:  # noqa: BLE001 (the HTTP edge) whatever it is, the client must hear of it
        events.put_nowait(error)


async def until_disconnect(receive: Receive, work: Coroutine[None, None, T]) -> T | None:
    """The result of `work`, or None when the client left first; `work` is cancelled then."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _end((task, gone))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(tasks: Sequence[asyncio.Future]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
