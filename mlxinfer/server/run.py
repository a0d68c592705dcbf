"""Run the server until a signal: bind, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import resource
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

import uvicorn

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.app import create_app
from mlxinfer.server.logs import logging_to
from mlxinfer.server.options import ServerOptions
from mlxinfer.server.protocol import protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fastapi import FastAPI

    from mlxinfer.llm import LLM
    from mlxinfer.pool import ModelPool
    from mlxinfer.server.state import ServerState

BACKLOG = 1024
"""Connections that may wait to be accepted; a burst of 200 must not be reset."""
FLUSH_S = 0.5
"""How long after the grace clients have to read their last event."""
WANTED_FILES = 8192
"""Open files; macOS starts programs with a limit of 256, fewer than the connections a server should hold."""
KEPT_FILES = 256
"""Of these, left to models, caches and logs when all connections are taken."""


def serve(
    models: Mapping[str, LLM] | ModelPool,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    api_key: str | None = None,
    on_started: Callable[[str, int], None] | None = None,
    log_level: str = "warning",
    build: Callable[[Any, ServerOptions], FastAPI] | None = None,
    until: threading.Event | None = None,
    **options: Any,
) -> int | None:
    """Serve `models` until SIGINT or SIGTERM, drain, and return that signal's number.

    They are a pool, or name to loaded model.

    `options` are fields of ServerOptions; `api_key` falls back to $MLXINFER_API_KEY. `on_started(host, port)` is called
    once connections are accepted; port 0 picks a free one. `build` makes the application in place of `create_app`;
    `until`, once set, ends it as a signal does. Does not unload the models.

    Raises InvalidRequestError when the address cannot be bound, or is not loopback and there is no key.
    """
    chosen = ServerOptions(host=host, api_key=api_key or os.environ.get("MLXINFER_API_KEY") or None, **options)
    with contextlib.closing(bind(host, port)) as listener, logging_to(chosen.access_log):
        _raise_file_limit()
        app = (build or create_app)(models, chosen)
        server = Server(app, chosen, on_started=on_started, log_level=log_level, until=until)
        asyncio.run(server.serve(sockets=[listener]))
    return server.ended_by


def _hide_departures(record: logging.LogRecord) -> bool:
    """asyncio warns of every write to a client that left."""
    return record.msg != "socket.send() raised exception."


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises InvalidRequestError that says what is in the way."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(f"host {host!r} is no address of this machine: {error}", param="host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} of {host} is taken; stop what uses it or choose another with --port"
        else:
            message = f"cannot listen on {host}:{port}: {error.strerror}"
        raise InvalidRequestError(message, param="port") from error
    return listener


class Server(uvicorn.Server):
    """uvicorn that drains: on a signal open requests get `grace_s`, then an error as their last event. A second signal
    ends them at once."""

    def __init__(
        self,
        app: FastAPI,
        options: ServerOptions,
        *,
        on_started: Callable[[str, int], None] | None = None,
        log_level: str = "warning",
        until: threading.Event | None = None,
    ) -> None:
        self._state: ServerState = app.state.server
        config = uvicorn.Config(
            app,
            backlog=BACKLOG,
            log_level=log_level,
            access_log=False,
            log_config=None,  # uvicorn's own would close the handlers that there are
            server_header=False,
            proxy_headers=False,
            lifespan="on",  # the API has nothing to start; what is mounted beside it may
            ws="none",
            http=protocol(options.body_timeout_s, _max_connections(), self._state.metrics.refused),
            timeout_keep_alive=30,
            timeout_graceful_shutdown=math.ceil(options.grace_s) + 2,
        )
        super().__init__(config)
        logging.getLogger("asyncio").addFilter(_hide_departures)
        self.ended_by: int | None = None
        self._impatient = asyncio.Event()
        self._options = options
        self._on_started = on_started
        self._until = until

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn raises the signal again at the end, which would make a clean stop look like a kill."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {s: signal.signal(s, self.handle_exit) for s in signals}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            self._impatient.set()
        else:
            self.ended_by = sig
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._until is not None and self._until.is_set():
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_started is not None:
            assert sockets
            self._on_started(*sockets[0].getsockname()[:2])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        grace = self._options.grace_s
        self._state.inflight.drain()
        self._state.pool.shutdown(wait=False, cancel_futures=True)
        ending = loop.create_task(self._end_in(grace))
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_in(self, grace: float) -> None:
        """End what still runs after the grace, or when a second signal comes."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._impatient.wait(), grace)
        self._state.inflight.end_all()
        await asyncio.sleep(FLUSH_S)
        self._abort_connections()

    def _abort_connections(self) -> None:
        """Clients that do not read their last event hold nobody up."""
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


def _max_connections() -> int:
    """As many as this process can have files, less what else it opens."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED_FILES if soft == resource.RLIM_INFINITY else max(soft - KEPT_FILES, soft // 2)


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS has limits of its own below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
