"""Replies while they are written: each on a thread of its own, in the store as it grows, whoever looks at it.

A page that is closed, or opened twice, changes nothing: `Live.shown` is what there is at the moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mlxinfer.app.prompts import continued, task_of
from mlxinfer.errors import InvalidRequestError, MlxinferError, StoreError
from mlxinfer.server.prompting import prepare
from mlxinfer.server.reader import Finish, Reader
from mlxinfer.tokenizer.replies import ReasoningPart, TextPart, ToolCallArguments, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlxinfer.app.store import Conversation, Message, Store
    from mlxinfer.app.store.records import Status
    from mlxinfer.llm import LLM, Generation
    from mlxinfer.pool import Lease, ModelPool
    from mlxinfer.server.prompting import Prepared
    from mlxinfer.server.reader import ChatPart

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two states of a growing reply on disk."""
Stage = Literal["loading", "reading", "writing", "done", "stopped", "failed"]
"""Reading: the prompt is being computed, or waits for its turn."""
OVER = ("done", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class Shown:
    """A reply at one moment."""

    stage: Stage = "loading"
    text: str = ""
    reasoning: str = ""
    reasoning_s: float = 0.0
    calls: tuple[tuple[str, str], ...] = ()
    """(name, arguments as JSON text) of tool calls."""
    error: str = ""
    prompt_tokens: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of a finished reply: prompt_tokens, cached_tokens, completion_tokens, ttft_s, decode_tok_s, finish_reason."""

    @property
    def over(self) -> bool:
        return self.stage in OVER

    def extra(self) -> dict[str, Any]:
        """What the store keeps beside the text."""
        kept: dict[str, Any] = dict(self.figures)
        if self.reasoning:
            kept["reasoning_s"] = round(self.reasoning_s, 2)
        if self.calls:
            kept["tool_calls"] = [list(call) for call in self.calls]
        if self.error:
            kept["error"] = self.error
        return kept


class Live:
    """One reply that is being written. Thread-safe."""

    def __init__(self, message: Message, before: Shown) -> None:
        self.message = message.id
        self.conversation = message.conversation
        self._shown = before
        self._changed = threading.Condition()
        self._generation: Generation | None = None
        self.stopping = threading.Event()

    @property
    def shown(self) -> Shown:
        return self._shown

    def wait(self, seen: Shown, timeout: float) -> Shown:
        """What there is, as soon as it is something else than `seen`, or after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._shown is not seen, timeout)
            return self._shown

    def stop(self) -> None:
        """End it; what is written stays. Harmless when it is over."""
        self.stopping.set()
        with self._changed:
            if self._generation is not None:
                self._generation.cancel()

    def show(self, **changes: Any) -> Shown:
        with self._changed:
            self._shown = dataclasses.replace(self._shown, **changes)
            self._changed.notify_all()
            return self._shown

    def runs(self, generation: Generation) -> None:
        """What `stop` cancels from now on."""
        with self._changed:
            self._generation = generation
        if self.stopping.is_set():
            generation.cancel()


class Replies:
    """All replies of this process that are being written."""

    def __init__(self, pool: ModelPool, store: Store) -> None:
        self._pool, self._store = pool, store
        self._live: dict[str, Live] = {}
        self._lock = threading.Lock()
        self._closed = False

    def live(self, message: str) -> Live | None:
        """The reply with that message's id, as long as it is being written."""
        return self._live.get(message)

    def writing(self, conversation: str) -> Live | None:
        """A reply that is being written in that conversation."""
        with self._lock:
            return next((one for one in self._live.values() if one.conversation == conversation), None)

    def ask(self, conversation: str, text: str, *, parent: str | None = None, root: bool = False, **extra: Any) -> Live:
        """Add a message of the user below `parent`, or below the end of what is shown, and have it answered.

        `root`: as a new beginning, beside the first message. `extra` is kept with it: attachments.
        """
        chat = self._free(conversation)
        if not text.strip() and not extra.get("attachments"):
            raise InvalidRequestError("the message is empty", param="text")
        with self._store.transaction():
            asked = self._store.add(chat.id, "user", text, parent=parent, root=root, **extra)
            reply = self._store.add(chat.id, "assistant", "", parent=asked.id, status="streaming", model=chat.model)
        return self._begin(chat, reply, Shown())

    def retry(self, message: str) -> Live:
        """Another reply beside a reply, or the first one to a message of the user."""
        one = self._store.message(message)
        chat = self._free(one.conversation)
        asked = one.id if one.role == "user" else one.parent
        if asked is None:
            raise InvalidRequestError("this reply answers nothing", param="message")
        reply = self._store.add(chat.id, "assistant", "", parent=asked, status="streaming", model=chat.model)
        return self._begin(chat, reply, Shown())

    def go_on(self, message: str) -> Live:
        """Go on with a reply where it ends."""
        one = self._store.message(message)
        chat = self._free(one.conversation)
        if one.role != "assistant" or not (one.content or one.reasoning):
            raise InvalidRequestError("there is no reply to go on with", param="message")
        before = Shown(text=one.content, reasoning=one.reasoning, reasoning_s=one.extra.get("reasoning_s", 0.0))
        self._store.write(one.id, one.content, reasoning=one.reasoning, status="streaming")
        return self._begin(chat, one, before)

    def close(self, timeout: float = 5.0) -> None:
        """Stop them all, and wait until they are on disk."""
        self._closed = True
        with self._lock:
            left = list(self._live.values())
        for live in left:
            live.stop()
        ends = time.monotonic() + timeout
        for live in left:
            while not live.shown.over and time.monotonic() < ends:
                live.wait(live.shown, ends - time.monotonic())

    def _free(self, conversation: str) -> Conversation:
        if self._closed:
            raise InvalidRequestError("the app is closing")
        chat = self._store.conversation(conversation)
        if self.writing(chat.id):
            raise InvalidRequestError("a reply is being written in this conversation; stop it first")
        return chat

    def _begin(self, chat: Conversation, reply: Message, before: Shown) -> Live:
        live = Live(reply, before)
        with self._lock:
            self._live[reply.id] = live
        run = _Run(self._pool, self._store, chat, reply, live)
        threading.Thread(target=self._write, args=(run,), name="mlxinfer-reply", daemon=True).start()
        return live

    def _write(self, run: _Run) -> None:
        try:
            run.run()
        finally:
            with self._lock:
                del self._live[run.live.message]


class _Run:
    """One reply, on its thread."""

    def __init__(self, pool: ModelPool, store: Store, chat: Conversation, reply: Message, live: Live) -> None:
        self.pool, self.store, self.chat, self.reply, self.live = pool, store, chat, reply, live
        self._written = time.monotonic()
        self._reasons_since = 0.0

    def run(self) -> None:
        try:
            with self._lease() as lease:
                self._answer(lease.llm)
        except _StoppedError:
            self._over("stopped")
        except MlxinferError as error:
            self._over("failed", str(error))
        except Exception as error:
            # The thread's edge: whoever looks at the reply has to see that it is over.
            log.exception("a reply failed")
            self._over("failed", f"{type(error).__name__}: {error}")

    def _lease(self) -> Lease:
        future = self.pool.request(self.chat.model)
        with contextlib.ExitStack() as undo:
            undo.callback(self.pool.abandon, future)
            while not future.done():
                if self.live.stopping.wait(0.05):
                    raise _StoppedError
            lease = future.result()
            undo.pop_all()
        return lease

    def _answer(self, llm: LLM) -> None:
        prepared = prepare(llm, task_of(self.chat, self.store.branch(self.chat.id, self.reply.parent)))
        if self.live.shown.text or self.live.shown.reasoning:
            prepared = continued(llm, prepared, self.live.shown.text, self.live.shown.reasoning)
        if self.live.stopping.is_set():
            raise _StoppedError
        self.live.show(stage="reading", prompt_tokens=len(prepared.ids))
        generation = llm.submit(prepared.ids, prepared.params, keep=prepared.keep)
        self.live.runs(generation)
        self._read(generation, prepared)

    def _read(self, generation: Generation, prepared: Prepared) -> None:
        reader, finish = Reader(prepared), None
        for delta in generation:
            for part in reader.read(delta):
                if isinstance(part, Finish):
                    finish = part
                else:
                    self._show(part)
            if reader.enough and delta.finish_reason is None:
                generation.cancel()
            if time.monotonic() - self._written >= EVERY_S:
                self._store("streaming")
        if finish is not None:
            self.live.show(figures=_figures(finish))
        self._over("stopped" if self.live.stopping.is_set() else "done")

    def _show(self, part: ChatPart) -> None:
        now, shown = time.monotonic(), self.live.shown
        if isinstance(part, ReasoningPart):
            self._reasons_since = self._reasons_since or now - shown.reasoning_s
            self.live.show(
                stage="writing", reasoning=shown.reasoning + part.text, reasoning_s=now - self._reasons_since
            )
        elif isinstance(part, TextPart):
            self.live.show(stage="writing", text=shown.text + part.text)
        elif isinstance(part, ToolCallStart):
            self.live.show(stage="writing", calls=(*shown.calls, (part.name, "")))
        elif isinstance(part, ToolCallArguments):
            name, arguments = shown.calls[part.index]
            calls = list(shown.calls)
            calls[part.index] = (name, arguments + part.text)
            self.live.show(calls=tuple(calls))

    def _store(self, status: Status) -> None:
        shown = self.live.shown
        self._written = time.monotonic()
        self.store.write(self.reply.id, shown.text, reasoning=shown.reasoning, status=status, extra=shown.extra())

    def _over(self, stage: Literal["done", "stopped", "failed"], error: str = "") -> None:
        """Whoever waits for the end finds it on disk."""
        shown = dataclasses.replace(self.live.shown, stage=stage, error=error)
        try:
            self.store.write(self.reply.id, shown.text, reasoning=shown.reasoning, status=stage, extra=shown.extra())
        except StoreError as failure:
            log.error("a reply was not kept: %s", failure)
            error = error or f"this reply is not on disk: {failure}"
        self.live.show(stage=stage, error=error)


class _StoppedError(Exception):
    """Before there was a generation to cancel."""


def _figures(finish: Finish) -> dict[str, Any]:
    usage, timings = finish.usage, finish.timings
    found: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "finish_reason": finish.reason,
    }
    if timings is not None:
        found |= {"ttft_s": round(timings.ttft_s, 3), "decode_tok_s": round(timings.decode_tok_s, 1)}
    return found
