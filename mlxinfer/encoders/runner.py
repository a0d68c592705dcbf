"""Runs an encoder on the MLX thread, a slice of time at a time, between the steps of other models."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import numpy as np

from mlxinfer.encoders.batching import Job, Line, Speed, TokenRow
from mlxinfer.engine.governor import governor
from mlxinfer.errors import EngineClosedError, EngineError, QueueFullError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from mlxinfer.encoders.batching import Waiting
    from mlxinfer.engine.worker import MlxThread

log = logging.getLogger(__name__)


class Network(Protocol):
    """What turns token ids into results."""

    def run(
        self, ids: mx.array, types: mx.array | None, lengths: Sequence[int], pieces: int
    ) -> Generator[None, None, mx.array]:
        """[B, L] padded at the ends → [B, …], one result a row; yields after each of about `pieces` parts."""
        ...


class Runner:
    """Takes jobs from any thread. The MLX thread steps it, and the memory governor counts it."""

    def __init__(self, thread: MlxThread, network: Network, *, weight_bytes: int, max_queue: int) -> None:
        self.thread = thread
        self.weight_bytes = weight_bytes
        self.max_queue = max_queue
        self.closed = False
        self.forwards = 0
        self.tokens = 0
        """Read so far, without padding."""
        self._network: Network | None = network
        self._line = Line()
        self._speed = Speed()
        self._batch: list[Waiting] = []
        self._running: Generator[None, None, None] | None = None
        self._admission = threading.Lock()
        self._open = 0
        self._joined = False

    # -- from any thread -------------------------------------------------------------------------------------------

    def submit(self, rows: Sequence[TokenRow]) -> Job:
        """Queue texts; cancel the job's future to end it early. Raises QueueFullError or EngineClosedError."""
        self.thread.check_alive()
        job = Job(rows, results=[None] * len(rows), missing=len(rows))
        if not rows:
            job.future.set_result([])
            return job
        with self._admission:
            if self.closed:
                raise EngineClosedError("the model was unloaded")
            if self._open >= self.max_queue:
                raise QueueFullError(f"{self._open} requests are running or waiting; the limit is {self.max_queue}")
            self._open += 1
        job.future.add_done_callback(self._note_end)
        self.thread.post(lambda: self._admit(job))
        return job

    def stats(self) -> dict[str, int]:
        """Running and waiting requests, forwards and tokens so far."""
        running = len({w.job for w in self._batch})
        waiting = max(0, self._open - running)
        return {"running": running, "waiting": waiting, "steps": self.forwards, "prompt_tokens": self.tokens}

    def _note_end(self, _: object) -> None:
        with self._admission:
            self._open -= 1

    # -- for the governor ------------------------------------------------------------------------------------------

    def reserved_bytes(self) -> int:
        """Nothing outlives a forward; what one takes is bounded, and within the governor's headroom."""
        return 0

    def cached_bytes(self) -> int:
        return 0

    def shrink_cache(self, max_bytes: int) -> None:
        """There is no cache."""

    # -- on the MLX thread -----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One slice of a forward; False when there was nothing to do."""
        if not self._joined:
            self._joined = True
            governor().join(self)
            governor().balance(self)
        try:
            return self._step()
        except Exception as error:
            # The worker's edge: whatever failed, every job of the batch gets its answer and the others go on.
            log.exception("an encoder's forward failed")
            self._fail(EngineError(f"the model failed: {type(error).__name__}: {error}"))
            return True

    def close(self) -> None:
        """Fail what is open and let go of the weights."""
        self.closed = True
        error = EngineClosedError("the model was unloaded")
        self._fail(error)
        for job in self._line.jobs:
            self._end(job, error)
        self._network = None
        self.thread.detach(self)
        governor().leave(self)

    def _admit(self, job: Job) -> None:
        if self.closed:
            self._end(job, EngineClosedError("the model was unloaded"))
        else:
            self._line.add(job)

    def _step(self) -> bool:
        for job in self._line.jobs:
            if job.future.cancelled():
                self._line.remove(job)
        if self._running is not None and all(w.job.future.cancelled() for w in self._batch):
            self._drop()
        if self._running is None:
            self._batch = self._line.take(self._speed.budget)
            if not self._batch:
                return False
            self._running = self._forward(self._batch)
        try:
            next(self._running)
        except StopIteration:
            self._drop()
        return True

    def _forward(self, batch: Sequence[Waiting]) -> Generator[None, None, None]:
        assert self._network is not None, "closed runners aren't stepped"
        lengths = [w.length for w in batch]
        padded = max(lengths)
        ids = _padded([w.row.ids for w in batch], padded)
        pairs = any(w.row.types is not None for w in batch)
        types = _padded([w.row.types or [0] * w.length for w in batch], padded) if pairs else None
        size = padded * len(batch)
        spent, parts = 0.0, 1
        pieces = self._network.run(ids, types, lengths, self._speed.pieces(size))
        while True:
            begun = time.perf_counter()
            try:
                next(pieces)
            except StopIteration as done:
                results = np.array(done.value.astype(mx.float32))
                spent += time.perf_counter() - begun
                break
            spent, parts = spent + time.perf_counter() - begun, parts + 1
            yield
        self._speed.observe(size / parts, spent / parts)
        self.forwards += 1
        self.tokens += sum(lengths)
        for waiting, result in zip(batch, results, strict=True):
            self._deliver(waiting, result)

    def _deliver(self, waiting: Waiting, result: Any) -> None:
        job = waiting.job
        job.results[waiting.index] = result
        job.missing -= 1
        if not job.missing and job.future.set_running_or_notify_cancel():
            job.future.set_result(job.results)

    def _fail(self, error: Exception) -> None:
        """End the jobs of the running batch with an error, and the batch."""
        jobs = {w.job for w in self._batch}
        self._drop()
        for job in jobs:
            self._line.remove(job)
            self._end(job, error)

    def _end(self, job: Job, error: Exception) -> None:
        if not job.future.done() and job.future.set_running_or_notify_cancel():
            job.future.set_exception(error)

    def _drop(self) -> None:
        running, self._running = self._running, None
        self._batch = []
        if running is not None:
            running.close()


def _padded(rows: Sequence[Sequence[int]], length: int) -> mx.array:
    """[B, length], zeros behind each row. Which token pads doesn't matter: nothing looks there."""
    array = np.zeros((len(rows), length), dtype=np.int32)
    for number, row in enumerate(rows):
        array[number, : len(row)] = row
    return mx.array(array)
