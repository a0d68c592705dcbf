"""What the routes share: models by name, options, requests in flight."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.errors import HttpError
from mlxinfer.server.inflight import Inflight, shutting_down

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request

    from mlxinfer.llm import LLM
    from mlxinfer.server.options import ServerOptions


T = TypeVar("T")
WORKERS = 4
"""Threads that check, render and tokenize; what waits for one is dropped at shutdown."""


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="mlxinfer-prompt")


@dataclass(frozen=True, slots=True)
class ServerState:
    models: Mapping[str, LLM]
    options: ServerOptions
    inflight: Inflight = field(default_factory=Inflight)
    pool: ThreadPoolExecutor = field(default_factory=_pool)
    started: int = field(default_factory=lambda: int(time.time()))

    def model(self, name: str | None) -> tuple[str, LLM]:
        """(served name, model). No name is the only model; a name is compared and never opened as a path or an id."""
        if name is None:
            if len(self.models) == 1:
                return next(iter(self.models.items()))
            raise InvalidRequestError(f"model is missing; this server has: {self._names()}", param="model")
        if name not in self.models:
            message = f"no model {name!r:.80} here; this server has: {self._names()}"
            raise HttpError(404, message, code="model_not_found", param="model")
        return name, self.models[name]

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
