"""One loaded model's engine: requests in, tokens out, stepped by the MLX thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxinfer.engine.scheduler import SchedulerState, Tracked, schedule
from mlxinfer.errors import EngineClosedError, EngineError, MlxinferError, QueueFullError
from mlxinfer.types import FinishReason, Timings, Usage

if TYPE_CHECKING:
    from mlxinfer.engine.runner import Launched, RowSpec, Runner
    from mlxinfer.engine.worker import MlxThread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request."""

    spec: RowSpec
    max_tokens: int
    eos_token_ids: frozenset[int]
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """What a sink receives. A request's last event, and only that, has `finished` or `error`."""

    token: int | None = None
    finished: FinishReason | None = None
    error: MlxinferError | None = None
    usage: Usage | None = None
    timings: Timings | None = None


Sink = Callable[[Event], None]


@dataclass(slots=True)
class _Open:
    request: Request
    sink: Sink
    submitted: float
    started: float = 0.0
    first_token: float = 0.0
    tokens: int = 0


class Engine:
    """Continuous batching over one Runner. `submit` and `cancel` may be called from any thread."""

    def __init__(self, thread: MlxThread, runner: Runner, *, max_num_seqs: int, max_queue: int, prefill_chunk: int):
        self.thread = thread
        self.runner = runner
        self.max_queue = max_queue
        self.state = SchedulerState(max_num_seqs=max_num_seqs, prefill_chunk=prefill_chunk)
        self._open: dict[str, _Open] = {}
        self._pending: Launched | None = None
        self._admission = threading.Lock()
        self._submitted = 0
        self._ended = 0
        self.closed = False
        self.generated_tokens = 0
        self.prompt_tokens = 0

    # -- from any thread -------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; its events go to `sink`. Raises QueueFullError or EngineClosedError."""
        self.thread.check_alive()
        with self._admission:
            if self.closed:
                raise EngineClosedError("the model was unloaded")
            in_flight = self._submitted - self._ended
            limit = self.max_queue + self.state.max_num_seqs
            if in_flight >= limit:
                raise QueueFullError(f"{in_flight} requests are running or waiting; the limit is {limit}")
            self._submitted += 1
        opened = _Open(request, sink, time.perf_counter())
        self.thread.post(lambda: self._admit(opened))

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """End a request; its terminal event says `reason`. Nothing happens if it has ended."""
        self.thread.post(lambda: self._end(request_id, reason))

    # -- on the MLX thread -----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch the next step, then take in the one before. False when there was nothing to do."""
        try:
            return self._step()
        except Exception as error:
            # The worker's edge: whatever failed, every open request gets its one terminal event.
            log.exception("a step failed")
            self._fail_all(EngineError(f"the engine's step failed: {type(error).__name__}: {error}"))
            return True

    def _step(self) -> bool:
        step = schedule(self.state)
        now = time.perf_counter()
        for request_id in step.started:
            self._open[request_id].started = now
        launched = None if step.empty else self.runner.launch(step)
        before, self._pending = self._pending, launched
        if before is not None:
            for outcome in self.state.update(before.step, before.read()):
                self._deliver(outcome.request_id, outcome.token, outcome.finished)
        return launched is not None or before is not None

    def _admit(self, opened: _Open) -> None:
        request = opened.request
        spec = request.spec
        if self.closed:
            self._finish(opened, error=EngineClosedError("the model was unloaded"))
            return
        try:
            self.runner.admit(spec)
        except Exception as error:
            # The worker's edge: a request that can't be admitted must not take the thread with it.
            log.exception("a request could not be admitted")
            self._finish(opened, error=EngineError(f"admission failed: {type(error).__name__}: {error}"))
            return
        self._open[spec.request_id] = opened
        self.state.add(
            Tracked(
                spec.request_id,
                len(spec.prompt_token_ids),
                request.max_tokens,
                request.eos_token_ids,
                priority=request.priority,
            )
        )

    def _deliver(self, request_id: str, token: int | None, finished: FinishReason | None) -> None:
        opened = self._open[request_id]
        now = time.perf_counter()
        opened.tokens += 1
        if opened.tokens == 1:
            opened.first_token = now
            self.prompt_tokens += len(opened.request.spec.prompt_token_ids)
        self.generated_tokens += 1
        if finished is None:
            if not _sent(opened, Event(token=token)):
                self._end(request_id, "cancelled")
        else:
            del self._open[request_id]
            self._finish(opened, token=token, finished=finished)

    def _end(self, request_id: str, reason: FinishReason) -> None:
        opened = self._open.pop(request_id, None)
        if opened is None:
            return
        started = request_id in self.state.started
        self.state.end(request_id, reason)
        if not started:
            self.runner.forget(request_id)
        self._finish(opened, finished=reason)

    def _finish(
        self,
        opened: _Open,
        *,
        token: int | None = None,
        finished: FinishReason | None = None,
        error: MlxinferError | None = None,
    ) -> None:
        with self._admission:
            self._ended += 1
        usage = Usage(prompt_tokens=len(opened.request.spec.prompt_token_ids), completion_tokens=opened.tokens)
        _sent(opened, Event(token=token, finished=finished, error=error, usage=usage, timings=_timings(opened)))

    def _fail_all(self, error: MlxinferError) -> None:
        self._pending = None
        opened, self._open = list(self._open.values()), {}
        old = self.state
        self.state = SchedulerState(old.max_num_seqs, old.prefill_chunk, step_number=old.step_number)
        self.runner.drop_all()
        for one in opened:
            self._finish(one, error=error)

    def close(self) -> None:
        """End every request and let go of the model. On the MLX thread."""
        with self._admission:
            self.closed = True
        try:
            self._fail_all(EngineClosedError("the model was unloaded"))
        finally:
            self.thread.detach(self)
            self.runner.close()

    def stats(self) -> dict[str, int]:
        """Counters, roughly in step: read from any thread."""
        return {
            "running": len(self.state.started),
            "waiting": max(0, self._submitted - self._ended - len(self.state.started)),
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "steps": self.state.step_number,
        }


def _sent(opened: _Open, event: Event) -> bool:
    """Hand an event over; False when the sink raised, whatever it was: one consumer must not harm the others."""
    try:
        opened.sink(event)
    except Exception as error:  # noqa: BLE001 - the worker's edge
        log.warning("the consumer of %s is gone: %s: %s", opened.request.spec.request_id, type(error).__name__, error)
        return False
    return True


def _timings(o: _Open) -> Timings:
    now = time.perf_counter()
    if not o.tokens:
        return Timings(queue_s=(o.started or now) - o.submitted, total_s=now - o.submitted)
    prefill = o.first_token - o.started
    decode = now - o.first_token
    return Timings(
        queue_s=o.started - o.submitted,
        ttft_s=o.first_token - o.submitted,
        total_s=now - o.submitted,
        prefill_tok_s=len(o.request.spec.prompt_token_ids) / prefill if prefill > 0 else 0.0,
        decode_tok_s=(o.tokens - 1) / decode if decode > 0 and o.tokens > 1 else 0.0,
    )
