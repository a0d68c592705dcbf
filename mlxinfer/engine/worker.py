"""The one MLX thread. It owns every model, stream and array; it wakes on arrival and never polls.

Other threads hand it functions (`call`) or give an engine requests; results leave through sinks, which run on this
thread and must return at once.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeVar

import mlx.core as mx

from mlxinfer.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

log = logging.getLogger(__name__)


class Steppable(Protocol):
    """What the thread drives: an engine."""

    def step(self) -> bool:
        """Do one step; False when there was nothing to do."""
        ...

    def close(self) -> None:
        """End what is open and let go of every array."""
        ...


class MlxThread:
    """A thread with an inbox of functions and a list of engines that it steps in turn while they have work."""

    def __init__(self) -> None:
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._engines: list[Steppable] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` on the thread before its next step. Returns at once."""
        self._inbox.append(function)
        self._wake.set()

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread and return or raise what it does; EngineClosedError once it has stopped."""
        if threading.current_thread() is self._thread:
            return function()
        if self._stopping or not self.alive:
            raise EngineClosedError("the MLX thread has stopped")
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
                future.set_exception(error)

        self.post(run)
        return future.result()

    def attach(self, engine: Steppable) -> None:
        """Step `engine` from now on. On the thread only."""
        self._engines.append(engine)

    def detach(self, engine: Steppable) -> None:
        """Stop stepping `engine`. On the thread only."""
        if engine in self._engines:
            self._engines.remove(engine)

    def stop(self, timeout: float = 30.0) -> None:
        """Close every engine and end the thread; waits for the step that runs. For the end of the process.

        An interpreter that goes away under a running mlx evaluation aborts.
        """
        self._stopping = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopping:
            # Cleared before the inbox is read: what arrives after that wakes the wait below.
            self._wake.clear()
            while self._inbox:
                self._take()
            worked = False
            for engine in list(self._engines):
                worked = engine.step() or worked
            if not worked and not self._inbox:
                self._wake.wait()
        for engine in list(self._engines):
            engine.close()
        # Whoever waits in `call` gets an answer.
        while self._inbox:
            self._take()
        mx.synchronize()
        # A stream that outlives its thread makes mlx abort when the process exits (6 of 40 times here).
        mx.clear_streams()

    def _take(self) -> None:
        try:
            self._inbox.popleft()()
        except Exception:
            # The worker's edge: one bad function must not take the thread, and every model with it.
            log.exception("a function posted to the MLX thread failed")


_lock = threading.Lock()
_thread: MlxThread | None = None


def mlx_thread() -> MlxThread:
    """The MLX thread of this process, started on first use."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = MlxThread()
            atexit.register(_thread.stop)
        return _thread
