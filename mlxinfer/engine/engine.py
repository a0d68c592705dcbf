"""One loaded model's engine: requests in, tokens out, stepped by the MLX thread."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxinfer.engine.events import Event, Open, Request, RowsLostError, Sink, sent, timings_of
from mlxinfer.engine.governor import Governor, governor
from mlxinfer.engine.idle import IdleWriter
from mlxinfer.engine.memory import RESERVE_TOKENS
from mlxinfer.engine.scheduler import load_of, release_only, schedule
from mlxinfer.engine.shared_prefixes import SharedPrefixes
from mlxinfer.engine.tracked import SchedulerState, Tracked
from mlxinfer.errors import (
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    MlxinferError,
    ModelNotFoundError,
    QueueFullError,
    WontFitError,
)
from mlxinfer.types import FinishReason, Usage

if TYPE_CHECKING:
    from mlxinfer.engine.adapter_files import AdapterFiles
    from mlxinfer.engine.pace import Load
    from mlxinfer.engine.prefix_disk import PrefixDisk
    from mlxinfer.engine.rows import Launched
    from mlxinfer.engine.runner import Runner
    from mlxinfer.engine.steps import Release, Start, Step
    from mlxinfer.engine.worker import MlxThread
    from mlxinfer.types import TokenLogprob

log = logging.getLogger(__name__)

WRITTEN_S = 5.0
"""How long who unloads a model waits for the disk."""
MEAN_WEIGHT = 0.1
"""Of the latest request in how long requests run."""
RECOUNT_EVERY = 64
"""Steps between two counts of what replies that grow have reserved."""


@dataclass(slots=True)
class _Running:
    """A launched step that isn't read yet."""

    launched: Launched
    load: Load
    at: float


class Engine:
    """Continuous batching over one Runner. `submit` and `cancel` may be called from any thread."""

    def __init__(
        self,
        thread: MlxThread,
        runner: Runner,
        *,
        max_num_seqs: int,
        max_queue: int,
        prefill_chunk: int,
        weight_bytes: int = 0,
        prefix_bytes: int | None = None,
        memory: Governor | None = None,
        disk: PrefixDisk | None = None,
    ) -> None:
        """`prefix_bytes` limits the prefix cache, 0 turns it off; None: what memory is spare. `disk` outlives it."""
        self.thread = thread
        self.runner = runner
        self._model_bytes = weight_bytes
        self.prefix_bytes = prefix_bytes
        self._disk = disk
        self.memory = memory or governor()
        self._reserved = 0
        if prefix_bytes != 0:
            runner.remember(disk)
        self.max_queue = max_queue
        self.state = SchedulerState(
            max_num_seqs=max_num_seqs,
            prefill_chunk=prefill_chunk,
            fused=runner.fused,
            needs_checkpoints=runner.needs_checkpoints,
            kv=runner.kv_cost,
        )
        self._open: dict[str, Open] = {}
        self._shared = SharedPrefixes(runner.prefixes, self.state, self._open)
        self._pending: _Running | None = None
        self._releasing: tuple[Release, ...] = ()
        self._building: Step | None = None
        self._last_read = 0.0
        self._admission = threading.Lock()
        self._submitted = 0
        self._ended = 0
        self._mean_s = 0.0
        """How long requests have run lately."""
        self.closed = False
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.failed_steps = 0
        self._joined = False
        self._idle = IdleWriter(thread.post, lambda: not self.state.requests, runner.prefixes)

    @property
    def weight_bytes(self) -> int:
        """Of the model and of its adapters in memory."""
        return self._model_bytes + self.runner.adapters.nbytes

    # -- from any thread -------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue a request; its events go to `sink`. Raises QueueFullError, WontFitError or EngineClosedError."""
        self.thread.check_alive()
        tokens = len(request.spec.prompt_token_ids) + min(request.max_tokens, RESERVE_TOKENS)
        self.memory.check_fits(self, self.state.kv.bytes(tokens), f"a request of {tokens} tokens")
        with self._admission:
            if self.closed:
                raise EngineClosedError("the model was unloaded")
            in_flight = self._submitted - self._ended
            limit = self.max_queue + self.state.max_num_seqs
            if in_flight >= limit:
                raise QueueFullError(
                    f"{in_flight} requests are running or waiting; the limit is {limit}",
                    # A place is free when the next of those that run ends.
                    retry_after=max(1.0, self._mean_s / max(1, len(self.state.started))),
                )
            self._submitted += 1
        opened = Open(request, sink, time.perf_counter())
        self.thread.post(lambda: self._admit(opened))

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """End a request; its terminal event says `reason`. Nothing happens if it has ended."""
        self.thread.post(lambda: self._end(request_id, reason))

    def add_adapter(self, files: AdapterFiles) -> None:
        """Register an adapter. Raises EngineClosedError or what Adapters.add raises."""

        def add() -> None:
            if self.closed:
                raise EngineClosedError("the model was unloaded")
            self.runner.adapters.add(files)

        self.thread.call(add)

    # -- on the MLX thread -----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch the next step, then take in the one before. False when there was nothing to do."""
        if not self._joined:
            # Here, not when it is made: an engine whose load is cut off at its end never steps.
            self._joined = True
            self.memory.join(self)
            self.memory.balance(self)
        try:
            return self._step()
        except RowsLostError as error:
            log.warning("%s", error)
            self._recover(error)
        except Exception as error:
            # The worker's edge: whatever failed, every open request goes on or gets its one terminal event.
            log.exception("a step failed")
            self._recover(error)
        return True

    def _step(self) -> bool:
        self._releasing = tuple(self.state.release)
        if self._releasing and self.state.num_waiting:
            # First of all, so that a request that starts now finds what they leave.
            self._building = release_only(self.state)
            self._share_memory()
            self.runner.launch(self._building)
        step = self._next_step()
        self._building = step
        if step.start or step.release or step.number % RECOUNT_EVERY == 0:
            self._share_memory()
        load = load_of(self.state, step)
        now = time.perf_counter()
        for start in step.start:
            self._note_start(start, now)
        running = None if step.empty else _Running(self.runner.launch(step), load, now)
        before, self._pending = self._pending, running
        worked = running is not None or before is not None
        if before is not None:
            self._building = before.launched.step
            # The grammars follow its tokens while the next step computes.
            before.launched.follow()
            if not before.launched.guided:
                # On a CPU the next step is submitted below and takes as long as it computes: nobody waits for that.
                self._read(before)
                before = None
        self._building = None
        if running is not None:
            running.launched.submit()
        if before is not None:
            self._read(before)
        if running is not None:
            # Grammars know now what may come next.
            self._building = running.launched.step
            running.launched.choose()
            running.launched.submit()
            self._building = None
        if running is not None and running.launched.choice is None:
            # Prompts only: nothing is gained by being a step ahead, and a newcomer would wait one chunk longer.
            self._pending = None
            self._read(running)
        self._end_outgrown()
        self._idle.worked() if worked else self._idle.rests()
        return worked

    def _next_step(self) -> Step:
        """The next step within the memory there is; beyond it only for one alone, when nothing will become free."""
        state = self.state
        if not state.requests:
            return schedule(state)
        state.kv_limit, state.patient = self.memory.kv_limit(self), True
        step = schedule(state, self._shared.claim)
        if step.empty and state.short_of and not self._more_will_come(state.short_of):
            state.patient = False
            step = schedule(state, self._shared.claim)
        return step

    def _more_will_come(self, wanted: int) -> bool:
        """Whether sequences of other models will end, or idle models go."""
        return self.memory.others_busy(self) or self.memory.press(wanted)

    def _share_memory(self) -> None:
        """Count what the running sequences need, and let idle prefixes give way."""
        self._reserved = self.state.reserved_bytes()
        self.memory.balance(self)

    def _end_outgrown(self) -> None:
        """Fail the only sequence when it takes more than there is and nothing will become free."""
        limit = self.state.kv_limit
        if limit is None or len(self.state.started) != 1 or self._reserved <= limit:
            return
        only = self.state.requests[next(iter(self.state.started))]
        beyond = self.state.kv.bytes(only.prompt_length + only.num_scheduled) - limit
        if beyond > 0 and not self._more_will_come(beyond):
            message = f"the reply has outgrown the memory: {limit / 2**20:.0f} MiB are left for its context"
            self._fail(only.request_id, WontFitError(message))

    # -- as the governor sees it -----------------------------------------------------------------------------------

    def reserved_bytes(self) -> int:
        """Bytes that the running sequences take, or will."""
        return self._reserved

    def cached_bytes(self) -> int:
        """Bytes of idle prefixes."""
        prefixes = self.runner.prefixes
        return 0 if prefixes is None else prefixes.nbytes

    def shrink_cache(self, max_bytes: int) -> None:
        """Let the prefix cache have at most this much, and no more than it was given at the start."""
        if self.runner.prefixes is not None:
            limit = max_bytes if self.prefix_bytes is None else min(max_bytes, self.prefix_bytes)
            self.runner.prefixes.shrink(limit)

    # -- one step --------------------------------------------------------------------------------------------------

    def _read(self, running: _Running) -> None:
        """Wait for a launched step and hand its tokens out."""
        self._building = running.launched.step
        out = running.launched.read()
        now = time.perf_counter()
        self.state.pace.observe(running.load, now - max(running.at, self._last_read))
        self._last_read = now
        for name, (start, logprobs) in out.prompts.items():
            if name in self._open:
                self._open[name].prompt_logprobs.update(enumerate(logprobs, start))
        for outcome in self.state.update(running.launched.step, out.tokens, out.complete):
            name = outcome.request_id
            try:
                if name in out.errors and name in self._open and outcome.finished is None:
                    message = f"the grammar cannot be followed any further: {out.errors[name]}"
                    self._fail(name, InvalidRequestError(message, param="grammar"))
                else:
                    self._deliver(name, outcome.token, outcome.finished, out.logprobs.get(name))
            except Exception as error:
                # The worker's edge: the tokens of the others are still to be handed out.
                log.exception("a token could not be delivered")
                if name in self._open:
                    self._fail(name, EngineError(f"delivery failed: {type(error).__name__}: {error}"))
        self._building = None

    def _note_start(self, start: Start, now: float) -> None:
        opened = self._open[start.request_id]
        opened.started = opened.started or now
        if not start.output:
            opened.cached = start.cached

    def _admit(self, opened: Open) -> None:
        request = opened.request
        spec = request.spec
        if self.closed:
            self._finish(opened, error=EngineClosedError("the model was unloaded"))
            return
        try:
            if spec.adapter:
                # Now, so that one that can't be read is an answer to who asked for it and no failed step.
                self.runner.adapters.load(spec.adapter)
            self.runner.admit(spec, request.grammar)
            self._open[spec.request_id] = opened
            tracked = Tracked(
                spec.request_id,
                len(spec.prompt_token_ids),
                request.max_tokens,
                request.eos_token_ids,
                priority=request.priority,
                boundaries=request.boundaries if self.runner.prefixes is not None else (),
                whole=spec.prompt_logprobs is not None,
                adapter=spec.adapter,
            )
            self._shared.relate(tracked, spec)
            self.state.add(tracked)
        except MlxinferError as error:
            self._finish(opened, error=error)
        except Exception as error:
            # The worker's edge: a request that can't be admitted must not take the thread with it.
            log.exception("a request could not be admitted")
            self._open.pop(spec.request_id, None)
            self.runner.forget(spec.request_id)
            self._finish(opened, error=EngineError(f"admission failed: {type(error).__name__}: {error}"))

    def _deliver(
        self, request_id: str, token: int | None, finished: FinishReason | None, logprob: TokenLogprob | None = None
    ) -> None:
        opened = self._open[request_id]
        now = time.perf_counter()
        opened.tokens += 1
        if opened.tokens == 1:
            opened.first_token = now
            self.prompt_tokens += len(opened.request.spec.prompt_token_ids)
            self.cached_tokens += opened.cached
        self.generated_tokens += 1
        if finished is None:
            event = Event(token=token, logprob=logprob, prompt_logprobs=opened.take_prompt())
            if not sent(opened, event):
                self._end(request_id, "cancelled")
        else:
            del self._open[request_id]
            self._finish(opened, token=token, finished=finished, logprob=logprob)

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
        opened: Open,
        *,
        token: int | None = None,
        finished: FinishReason | None = None,
        error: MlxinferError | None = None,
        logprob: TokenLogprob | None = None,
    ) -> None:
        with self._admission:
            self._ended += 1
            if finished in ("stop", "length"):
                self._mean_s += MEAN_WEIGHT * (time.perf_counter() - opened.started - self._mean_s)
        prompt = len(opened.request.spec.prompt_token_ids)
        usage = Usage(prompt_tokens=prompt, completion_tokens=opened.tokens, cached_tokens=opened.cached)
        prompt_logprobs = None if token is None else opened.take_prompt()
        timings = timings_of(opened)
        sent(opened, Event(token, finished, error, usage, timings, logprob, prompt_logprobs))

    # -- when a step fails -----------------------------------------------------------------------------------------

    def _recover(self, error: Exception) -> None:
        """Drop every row, and let the requests that had a part in the failed steps run alone, from their tokens.

        A request whose step fails while it is alone, for the second time in a row, is the one to blame.
        """
        self.failed_steps += 1
        steps = [s for s in (self._building, self._pending and self._pending.launched.step) if s is not None]
        self._building = self._pending = None
        releases = [*self._releasing, *self.state.release, *(r for step in steps for r in step.release)]
        for release in releases:
            if release.request_id not in self.state.requests:
                self.runner.forget(release.request_id)
        self.state.release.clear()
        self._reserved = 0
        try:
            self.runner.drop_all()
        except MlxinferError as failure:
            # Where the rows would go on there is nothing.
            for request_id in list(self._open):
                self._fail(request_id, EngineError(f"the engine's rows are lost: {failure}"))
            return
        for request_id, opened in list(self._open.items()):
            adapter = opened.request.spec.adapter
            if adapter and adapter not in self.runner.adapters:
                self._fail(request_id, ModelNotFoundError(f"the adapter {adapter} is gone"))
        for request_id in list(self.state.started):
            self.state.rewind(request_id)
        if isinstance(error, RowsLostError):
            return
        # Without a step to look at, it is the one that runs alone, or anyone.
        involved = {name for step in steps for name in step.request_ids} or set(self.state.probation[:1])
        suspects = [name for name in self.state.requests if name in involved] or list(self.state.requests)
        for name in suspects:
            self.state.suspect(name, alone=len(suspects) == 1)
        if len(suspects) == 1 and self.state.requests[suspects[0]].failed_alone > 1:
            message = f"the engine's step failed: {type(error).__name__}: {error}"
            self._fail(suspects[0], EngineError(message))

    def _fail(self, request_id: str, error: MlxinferError) -> None:
        opened = self._open.pop(request_id)
        self.state.end(request_id, "error")
        if request_id not in {release.request_id for release in self.state.release}:
            self.runner.forget(request_id)
        self._finish(opened, error=error)

    def close(self) -> None:
        """End every request and let go of the model. On the MLX thread."""
        with self._admission:
            self.closed = True
        try:
            self._pending = None
            for request_id in list(self._open):
                self._fail(request_id, EngineClosedError("the model was unloaded"))
        finally:
            self._idle.close()
            self._reserved = 0
            self.memory.leave(self)
            self.thread.detach(self)
            self.runner.close()

    def wait_written(self, timeout: float = WRITTEN_S) -> bool:
        """After `close`, from another thread: wait until what was idle is on disk."""
        return self._disk is None or self._disk.wait(timeout)

    def stats(self) -> dict[str, int]:
        """Counters, roughly in step: read from any thread."""
        return {
            "running": len(self.state.started),
            "waiting": max(0, self._submitted - self._ended - len(self.state.started)),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "steps": self.state.step_number,
            "failed_steps": self.failed_steps,
            "kv_bytes": self._reserved,
            "prefix_bytes": self.cached_bytes(),
        }
