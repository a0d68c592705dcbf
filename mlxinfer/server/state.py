"""What the routes share: the pool of models, options, requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from mlxinfer.errors import (
    EngineError,
    InvalidRequestError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from mlxinfer.server.errors import HttpError
from mlxinfer.server.inflight import Inflight, shutting_down, until_disconnect
from mlxinfer.server.record import record_of
from mlxinfer.server.store import ResponseStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from starlette.requests import Request
    from starlette.types import Receive

    from mlxinfer.pool import Lease, ModelPool, ModelStatus
    from mlxinfer.server.metrics import ServerMetrics
    from mlxinfer.server.options import ServerOptions
    from mlxinfer.server.record import RequestRecord
    from mlxinfer.types import Timings, Usage


log = logging.getLogger("mlxinfer.server")

T = TypeVar("T")
WORKERS = 4
"""Threads that check, render and tokenize; what waits for one is dropped at shutdown."""


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="mlxinfer-prompt")


@dataclass(frozen=True, slots=True)
class ServerState:
    """`state_of` gives a route the view of its request: models its key may not use do not exist there."""

    models: ModelPool
    options: ServerOptions
    metrics: ServerMetrics
    inflight: Inflight = field(default_factory=Inflight)
    pool: ThreadPoolExecutor = field(default_factory=_pool)
    started: int = field(default_factory=lambda: int(time.time()))
    responses: ResponseStore = field(default_factory=ResponseStore)
    """What /v1/responses may be asked to go on from."""
    record: RequestRecord | None = None
    """Of the request whose view this is."""

    @property
    def tenant(self) -> str:
        """Whose cached prefixes a request may use: `tenant` of LLM.submit."""
        return self.record.key.name if self.record and self.record.key else ""

    def names(self) -> list[str]:
        """The registered models that exist for this request; each with an adapter is one more, after the plain ones."""
        key = self.record.key if self.record else None
        return [name for name in (*self.models, *self.models.adapted()) if key is None or key.allows(name)]

    def statuses(self) -> dict[str, ModelStatus]:
        """Of `names`. A model's with an adapter is that of the model."""
        found, adapted = self.models.status(), self.models.adapted()
        return {name: found[adapted.get(name, name)] for name in self.names()}

    def ended(
        self, model: str, usage: Usage, timings: Timings | None, reason: str, *, with_prompt: bool = True
    ) -> None:
        """`observe` a choice; of several choices of a prompt, one is told of with it."""
        usage = usage if with_prompt else dataclasses.replace(usage, prompt_tokens=0, cached_tokens=0)
        self.observe(model, usage, timings, reason)

    def observe(self, model: str, usage: Usage, timings: Timings | None, reason: str) -> None:
        """A choice ended; to be called once for each, also for those cut short. Feeds the metrics, the access log and
        the key's limits. A prompt counts once: for its later choices `usage.prompt_tokens` is 0."""
        self.metrics.observe_request(model, usage, timings, reason)
        if self.record is not None:
            self.record.add(model, usage)

    def served_name(self, name: str | None) -> str:
        """The name of a registered model. None is the only one; a name is compared and never opened as a path or an id.

        Raises InvalidRequestError or HttpError 404.
        """
        names = self.names()
        listed = ", ".join(names)
        if name is None:
            plain = [one for one in names if one not in self.models.adapted()] or names
            if len(plain) == 1:
                return plain[0]
            raise InvalidRequestError(f"model is missing; this server has: {listed}", param="model")
        if name not in names:
            message = f"no model {name!r:.80} here; this server has: {listed}"
            raise HttpError(404, message, code="model_not_found", param="model")
        return name

    async def lease(self, name: str, receive: Receive) -> Lease:
        """A registered model, loaded if need be; it stays until the lease is released.

        Raises what loading raises, HttpError 503 when the server shuts down first, 400 when the client leaves.
        """
        name = self.served_name(name)
        future: Future[Lease] | None = None
        try:
            future = self.models.request(name)
            if not future.done():
                arrived, loop = asyncio.Event(), asyncio.get_running_loop()

                def tell(_: object) -> None:
                    with contextlib.suppress(RuntimeError):  # the loop is closed, and with it who waited
                        loop.call_soon_threadsafe(arrived.set)

                future.add_done_callback(tell)
                await self.inflight.unless_draining(until_disconnect(receive, arrived.wait()))
                if not future.done():
                    raise HttpError(400, "the client left while the model was loading", code="disconnected")
            return future.result()
        except (EngineError, ModelFileError, ModelNotFoundError, UnsupportedModelError) as error:
            # Where its files are, and what is wrong with them, is the owner's to know.
            log.error("%s could not be loaded: %s", name, error)
            message = f"the model {name} could not be loaded; the server's log says why"
            raise HttpError(500, message, code="model_load_failed", param="model") from error
        except BaseException:
            if future is not None:
                self.models.abandon(future)
            raise

    def check_open(self) -> None:
        if self.inflight.draining:
            raise shutting_down()

    async def in_pool(self, work: Callable[[], T]) -> T:
        """Run `work` off the event loop. Raises HttpError 503 when the server shuts down first."""
        self.check_open()
        return await self.inflight.unless_draining(asyncio.get_running_loop().run_in_executor(self.pool, work))


PRIORITIES = 10
"""A client may raise or lower its requests' priority by so much."""


def priority_of(request: Request) -> int:
    """Of the header x-mlxinfer-priority, 0 without it. Raises InvalidRequestError."""
    text = request.headers.get("x-mlxinfer-priority")
    if text is None:
        return 0
    if not re.fullmatch(r"[+-]?[0-9]{1,3}", text) or abs(int(text)) > PRIORITIES:
        message = f"x-mlxinfer-priority is {text!r:.40}; it must be an integer between -{PRIORITIES} and {PRIORITIES}"
        raise InvalidRequestError(message, param="x-mlxinfer-priority")
    return int(text)


def state_of(request: Request) -> ServerState:
    """The server as this request may see it."""
    return dataclasses.replace(request.app.state.server, record=record_of(request.scope))
