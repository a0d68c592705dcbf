"""A thread that writes entries while the MLX thread goes on. It touches numpy views only, never mlx."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlxinfer.engine.disk import DiskTier
    from mlxinfer.engine.disk_format import StoredArray

log = logging.getLogger(__name__)

QUEUE_LENGTH = 2
"""Entries that may wait; each holds its arrays in memory, so a slow disk makes `submit` refuse instead."""


@dataclass(frozen=True, slots=True)
class DiskJob:
    """What `DiskTier.write` takes. `done` is called on the writer's thread with whether the entry is on disk."""

    key: str
    tokens: Sequence[int]
    arrays: Sequence[StoredArray]
    meta: Mapping[str, Any]
    checkpoints: Sequence[int] = ()
    done: Callable[[bool], None] | None = None


class DiskWriter:
    """Writes jobs in order. `submit`, `flush` and `close` may be called from any thread."""

    def __init__(self, tier: DiskTier, *, queue_length: int = QUEUE_LENGTH) -> None:
        self._tier = tier
        self._queue_length = queue_length
        self._jobs: deque[DiskJob] = deque()
        self._changed = threading.Condition()
        self._writing = False
        self._closed = False
        self.refused = 0
        """Jobs that found the queue full or the writer closed."""
        self._thread = threading.Thread(target=self._run, name="prefix-cache-writer", daemon=True)
        self._thread.start()

    @property
    def free(self) -> bool:
        """Whether `submit` would take a job now; ask before making one."""
        with self._changed:
            return not self._closed and len(self._jobs) < self._queue_length

    def submit(self, job: DiskJob, *, last: bool = False) -> bool:
        """Queue a job; False, and nothing is held, when the queue is full or the writer closed.

        `last`: however many wait, because there will be no other time.
        """
        with self._changed:
            if self._closed or (len(self._jobs) >= self._queue_length and not last):
                self.refused += 1
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def flush(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until all that was queued is written; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._writing, timeout)

    def finish(self) -> None:
        """Take no more; the thread ends when what is queued is written. Returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        """Take no more, write what is queued within `timeout` seconds and end; whether all of it was written.

        What is left then is dropped, but for a write that is under way: that ends on its own, or with the process.
        """
        end = time.monotonic() + timeout
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._jobs and not self._writing, timeout)
            self._jobs.clear()
            self._changed.notify_all()
        self._thread.join(max(0.0, end - time.monotonic()))
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._writing = True
            self._write(job)
            # The arrays must not live until the next job comes.
            del job

    def _write(self, job: DiskJob) -> None:
        written = False
        try:
            written = self._tier.write(job.key, job.tokens, job.arrays, job.meta, checkpoints=job.checkpoints)
        except Exception:
            # A worker's edge: one entry that can't be stored must not end the writing of the others.
            log.exception("an entry of the prefix cache could not be written")
        try:
            if job.done is not None:
                job.done(written)
        except Exception:
            log.exception("the end of a write could not be reported")
