"""What the routes share: the pool of models, options, requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from mlxinfer.errors import InvalidRequestError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from mlxinfer.server.errors import HttpError
from mlxinfer.server.inflight import Inflight, shutting_down, until_disconnect

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import Receive

    from mlxinfer.pool import Lease, ModelPool
    from mlxinfer.server.options import ServerOptions


log = logging.getLogger("mlxinfer.server")

T = TypeVar("T")
WORKERS = 4
"""Threads that check, render and tokenize; what waits for one is dropped at shutdown."""


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="mlxinfer-prompt")


@dataclass(frozen=True, slots=True)
class ServerState:
    models: ModelPool
    options: ServerOptions
    inflight: Inflight = field(default_factory=Inflight)
    pool: ThreadPoolExecutor = field(default_factory=_pool)
    started: int = field(default_factory=lambda: int(time.time()))

    def served_name(self, name: str | None) -> str:
        """The name of a registered model. None is the only one; a name is compared and never opened as a path or an id.

        Raises InvalidRequestError or HttpError 404.
        """
        if name is None:
            if len(self.models) == 1:
                return next(iter(self.models))
            raise InvalidRequestError(f"model is missing; this server has: {self._names()}", param="model")
        if name not in self.models:
            message = f"no model {name!r:.80} here; this server has: {self._names()}"
            raise HttpError(404, message, code="model_not_found", param="model")
        return name

    async def lease(self, name: str, receive: Receive) -> Lease:
        """A registered model, loaded if need be; it stays until the lease is released.

        Raises what loading raises, HttpError 503 when the server shuts down first, 400 when the client leaves.
        """
        future = self.models.request(name)
        try:
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
        except (ModelFileError, ModelNotFoundError, UnsupportedModelError) as error:
            # Where its files are, and what is wrong with them, is the owner's to know.
            log.error("%s could not be loaded: %s", name, error)
            message = f"the model {name} could not be loaded; the server's log says why"
            raise HttpError(500, message, code="model_load_failed", param="model") from error
        except BaseException:
            self.models.abandon(future)
            raise

    def check_open(self) -> None:
        if self.inflight.draining:
            raise shutting_down()

    async def in_pool(self, work: Callable[[], T]) -> T:
        """Run `work` off the event loop. Raises HttpError 503 when the server shuts down first."""
        self.check_open()
        return await self.inflight.unless_draining(asyncio.get_running_loop().run_in_executor(self.pool, work))

    def _names(self) -> str:
        return ", ".join(self.models)


def state_of(request: Request) -> ServerState:
    return request.app.state.server
