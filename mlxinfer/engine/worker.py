"""The one MLX thread. It owns every model, stream and array; it wakes on arrival and never polls.

Other threads hand it functions (`call`), long work in slices (`run_sliced`) or give an engine requests; results leave
through sinks, which run on this thread and must return at once.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import os
import queue
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import mlx.core as mx

from mlxinfer.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")

SLICE_S = 0.04
"""How long a sliced job runs between two rounds of engine steps, give or take one of its pieces."""

log = logging.getLogger(__name__)


class Steppable(Protocol):
    """What the thread drives: an engine."""

    def step(self) -> bool:
        """Do one step; False when there was nothing to do."""
        ...

    def close(self) -> None:
        """End what is open and let go of every array."""
        ...


class SlicedJob(Generic[T]):
    """Long work on the MLX thread, one slice per round of engine steps. Made by `MlxThread.run_sliced`."""

    def __init__(self, thread: MlxThread, pieces: Generator[None, None, T]) -> None:
        self._thread = thread
        self._pieces: Generator[None, None, T] | None = pieces
        self._future: Future[T] = Future()

    def result(self) -> T:
        """Wait for the end; returns or raises what the generator does.

        Raises EngineClosedError when the thread stops first, concurrent.futures.CancelledError after `cancel`.
        """
        return self._thread.wait_for(self._future)

    def cancel(self) -> bool:
        """Let go of the work before its next piece; False when it has ended already. From any thread."""
        return self._future.cancel()

    def advance(self, seconds: float) -> bool:
        """Run pieces for about `seconds`; False once there is nothing more to do. On the thread only."""
        until = time.perf_counter() + seconds
        if self._future.cancelled():
            self.close()
        while self._pieces is not None:
            try:
                next(self._pieces)
            except StopIteration as done:
                self._pieces = None
                if self._future.set_running_or_notify_cancel():
                    self._future.set_result(done.value)
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits, whatever it is
                self._pieces = None
                if self._future.set_running_or_notify_cancel():
                    self._future.set_exception(error)
            if self._future.cancelled():
                self.close()
            if time.perf_counter() >= until:
                break
        return self._pieces is not None

    def close(self, error: Exception | None = None) -> None:
        """Drop the work with all that it holds; who still waits gets `error`. On the thread only."""
        pieces, self._pieces = self._pieces, None
        try:
            if pieces is not None:
                pieces.close()
        finally:
            del pieces
            if error is not None and not self._future.done() and self._future.set_running_or_notify_cancel():
                self._future.set_exception(error)
            gc.collect()
            mx.clear_cache()


class MlxThread:
    """A thread with an inbox of functions and a list of engines that it steps in turn while they have work.

    The inbox is a SimpleQueue because its `put` may be re-entered: a garbage collection that closes a stream can post
    from inside a `post`.
    """

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._engines: list[Steppable] = []
        self._jobs: deque[SlicedJob[Any]] = deque()
        self._stopping = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once stopped, and in a forked child, where the thread doesn't exist."""
        return not self._stopping and self._pid == os.getpid() and self._thread.is_alive()

    def check_alive(self) -> None:
        """Raise EngineClosedError, with the cause and the cure, when nothing can run here."""
        if self._pid != os.getpid():
            raise EngineClosedError(
                "this process was forked from one that uses mlx, which can't be used on both sides of a fork; "
                'start it with multiprocessing.get_context("spawn") or load models after the fork only'
            )
        if not self.alive:
            raise EngineClosedError("the MLX thread has stopped; the process is ending")

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` on the thread before its next step. Returns at once, from any thread, re-entrantly."""
        self._inbox.put(function)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread and return or raise what it does; EngineClosedError once it has stopped."""
        if threading.current_thread() is self._thread:
            return function()
        self.check_alive()
        future: Future[T] = Future()
        self.post(lambda: _fulfil(future, function))
        return self.wait_for(future)

    def run_sliced(self, pieces: Generator[None, None, T]) -> SlicedJob[T]:
        """Run a generator on the thread, SLICE_S of it between two rounds of engine steps; its value is the result.

        Between two `yield`s it does one short piece of work. Jobs run one after another. Returns at once; on the
        thread itself, when the work is done. Raises EngineClosedError when the thread has stopped.
        """
        job = SlicedJob(self, pieces)
        if threading.current_thread() is self._thread:
            while job.advance(SLICE_S):
                pass
            return job
        self.check_alive()
        self.post(lambda: self._jobs.append(job))
        return job

    def wait_for(self, future: Future[T]) -> T:
        """The result of what was posted; EngineClosedError when the thread ends without it."""
        while not future.done():
            wait([future], timeout=1.0)
            # The thread may have stopped before it took the post.
            if not self._thread.is_alive() and not future.done():
                raise EngineClosedError("the MLX thread has stopped; the process is ending")
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
        if self._pid != os.getpid():
            return
        self._stopping = True
        self.post(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        worked = False
        while not self._stopping:
            self._take_all(block=not worked and not self._jobs)
            worked = False
            for engine in list(self._engines):
                worked = self._guarded(engine.step) or worked
            self._advance_job(worked)
        for engine in list(self._engines):
            self._guarded(engine.close)
        # Whoever waits in `call` gets an answer.
        self._take_all(block=False)
        for job in self._jobs:
            self._guarded(functools.partial(job.close, EngineClosedError("the MLX thread was stopped")))
        self._jobs.clear()
        mx.synchronize()
        # A stream that outlives its thread makes mlx abort when the process exits (6 of 40 times here).
        mx.clear_streams()

    def _advance_job(self, worked: bool) -> None:
        """One slice of the first job."""
        if not self._jobs:
            return
        if worked:
            # The slice's time begins when the steps that were just submitted are done: both share one stream.
            mx.synchronize()
        if not self._guarded(functools.partial(self._jobs[0].advance, SLICE_S)):
            self._jobs.popleft()

    def _take_all(self, *, block: bool) -> None:
        """Run what is in the inbox; with `block`, wait for something first."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._guarded(self._inbox.get(block=block))
                block = False

    def _guarded(self, function: Callable[[], T]) -> T | None:
        try:
            return function()
        except Exception:
            # The worker's edge: nothing may take the thread, and every model with it.
            log.exception("a function on the MLX thread failed")
            return None


def aside(function: Callable[[], T]) -> Future[T]:
    """Run `function` on a thread of its own that doesn't keep the process alive."""
    future: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(future, function), name="mlxinfer-aside", daemon=True).start()
    return future


def _fulfil(future: Future[T], function: Callable[[], T]) -> None:
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - handed to whoever waits
        future.set_exception(error)


_lock = threading.Lock()
_thread: MlxThread | None = None


def mlx_thread() -> MlxThread:
    """The MLX thread of this process, started on first use. Raises EngineClosedError in a forked child."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = MlxThread()
            atexit.register(_thread.stop)
        _thread.check_alive()
        return _thread
