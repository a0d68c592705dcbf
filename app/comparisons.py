"""One prompt, two replies at the same time, by two models or a model and it with an adapter, under the same settings.

They are written as any reply is, in a store in memory, so that nothing of them is among the conversations unless they
are kept or one is gone on with.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxinfer.app.prompts import params_of
from mlxinfer.app.replies import Replies, Shown
from mlxinfer.app.store import open_store
from mlxinfer.errors import InvalidRequestError, MlxinferError

if TYPE_CHECKING:
    from mlxinfer.app.library import Library
    from mlxinfer.app.replies import Live
    from mlxinfer.app.store import Conversation, Store
    from mlxinfer.pool import ModelPool

KEPT = 8
"""Comparisons that are remembered; of older ones what is in memory goes."""
LOOK_S = 0.05
MAX_TITLE = 60
JOINER, VARIANT = "\u200d", "\ufe0f"
"""Of signs that are made of several characters."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is compared."""

    prompt: str
    models: tuple[str, str]
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    """Sampling, as conversations have it: both replies get the same."""


@dataclass(slots=True)
class _Side:
    conversation: Conversation
    live: Live
    waits: bool = False
    """For the memory that the other one holds."""


class Comparison:
    """Two replies that are being written. Thread-safe."""

    def __init__(self, question: Question, replies: Replies, store: Store, kept: bool) -> None:
        self.question, self.kept = question, kept
        self._replies, self._store = replies, store
        self._stopping = threading.Event()
        self._over = threading.Event()
        self.sides: tuple[_Side, _Side] = self._begin()
        threading.Thread(target=self._watch, name="mlxinfer-compare", daemon=True).start()

    def _begin(self) -> tuple[_Side, _Side]:
        question, sides = self.question, list[_Side]()
        with contextlib.ExitStack() as undo:
            for model in question.models:
                title = f"{_title(question.prompt)} ({model})"
                chat = self._store.create(model, title=title, system=question.system, **question.settings)
                sides.append(side := _Side(chat, self._replies.ask(chat.id, question.prompt)))
                undo.callback(side.live.stop)
            undo.pop_all()
        return sides[0], sides[1]

    @property
    def over(self) -> bool:
        return self._over.is_set()

    def shown(self) -> tuple[Shown, Shown]:
        """Both at this moment."""
        left, right = (Shown() if side.waits else side.live.shown for side in self.sides)
        return left, right

    def waits(self, side: int) -> bool:
        """Whether that reply begins when the other one has given back its memory."""
        return self.sides[side].waits

    def stop(self) -> None:
        """End both; what is written stays."""
        self._stopping.set()
        for side in self.sides:
            side.live.stop()

    def wait(self, timeout: float) -> bool:
        """Whether both are over, as soon as they are or after `timeout` seconds."""
        return self._over.wait(timeout)

    def _watch(self) -> None:
        """Two models may be too large to be in memory together: the one that was refused goes after the other."""
        try:
            left, right = self.sides
            while not left.live.shown.over and not right.live.shown.over:
                left.live.wait(left.live.shown, LOOK_S)
            first, second = (left, right) if left.live.shown.over else (right, left)
            shown = first.live.shown
            if shown.stage == "failed" and not shown.text and not second.live.shown.over:
                self._again(first, second)
            self._await_end(second)
        finally:
            self._over.set()

    def _again(self, side: _Side, other: _Side) -> None:
        side.waits = True
        try:
            self._await_end(other)
            if not self._stopping.is_set():
                side.live = self._replies.retry(side.live.message)
        except MlxinferError:  # the app is closing; the first error stands
            return
        finally:
            side.waits = False
        if self._stopping.is_set():
            side.live.stop()
        self._await_end(side)

    @staticmethod
    def _await_end(side: _Side) -> None:
        live = side.live
        while not (shown := live.shown).over:
            live.wait(shown, 1.0)

    def go_on(self, side: int, store: Store) -> Conversation:
        """That reply and its prompt as a conversation among the others. Raises InvalidRequestError without a reply."""
        chosen = self.sides[side]
        reply = self._store.message(chosen.live.message)
        if not chosen.live.shown.over or not (reply.content or reply.reasoning):
            raise InvalidRequestError("there is no finished reply to go on with")
        if self.kept:
            return chosen.conversation
        question = self.question
        # Another try in the chat is to give another text.
        settings = {name: value for name, value in question.settings.items() if name != "seed"}
        with store.transaction():
            chat = store.create(
                question.models[side], title=_title(question.prompt), system=question.system, **settings
            )
            asked = store.add(chat.id, "user", question.prompt)
            store.add(
                chat.id, "assistant", reply.content, parent=asked.id, reasoning=reply.reasoning, status=reply.status,
                **reply.extra,
            )  # fmt: skip
        return store.conversation(chat.id)

    def forget(self) -> None:
        """Take what isn't kept out of memory."""
        if not self.kept:
            for side in self.sides:
                self._store.remove(side.conversation.id)


class Comparisons:
    """Those of this process. `replies` and `store` are the app's, for those that are kept."""

    def __init__(self, pool: ModelPool, store: Store, replies: Replies, library: Library) -> None:
        self._store, self._replies, self._library = store, replies, library
        # SQLite's name for a database that is in no file; it is gone with the process.
        self._passing = open_store(Path(":memory:")).store
        self._passing_replies = Replies(pool, self._passing)
        self._made: dict[str, Comparison] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._better: dict[str, tuple[str, str]] = {}
        """By the key of a comparison: the better model and the other one."""

    def begin(self, question: Question, *, keep: bool = False) -> str:
        """Have both written; the key of the comparison. With `keep` both are among the conversations from now on.

        Raises InvalidRequestError for an empty prompt and settings that can't be, ModelNotFoundError or OfflineError
        for a model that isn't here; then nothing was begun.
        """
        if not question.prompt.strip():
            raise InvalidRequestError("the prompt is empty", param="prompt")
        params_of(question.settings)
        for model in question.models:
            self._library.use(model)
        replies, store = (self._replies, self._store) if keep else (self._passing_replies, self._passing)
        made = Comparison(question, replies, store, keep)
        with self._lock:
            key = str(next(self._numbers))
            self._made[key] = made
            old = [k for k, one in self._made.items() if one.over][: max(0, len(self._made) - KEPT)]
            gone = [self._made.pop(k) for k in old]
        for one in gone:
            one.forget()
        return key

    def get(self, key: str) -> Comparison | None:
        return self._made.get(key)

    def last(self) -> str | None:
        """The key of the one that was begun last."""
        with self._lock:
            return next(reversed(self._made), None)

    def go_on(self, key: str, side: int) -> Conversation:
        """See `Comparison.go_on`."""
        made = self.get(key)
        if made is None:
            raise InvalidRequestError("this comparison is not remembered any more; compare again")
        return made.go_on(side, self._store)

    def vote(self, key: str, side: int) -> None:
        """Count that side's model as the better one; of a comparison the last vote counts.

        Raises InvalidRequestError while one is being written.
        """
        made = self.get(key)
        if made is None or not made.over:
            raise InvalidRequestError("both replies have to be there first")
        models = made.question.models
        self._better[key] = (models[side], models[1 - side])

    def votes(self, models: tuple[str, str]) -> tuple[int, int]:
        """How often each of the two was called the better one, whatever the side it stood on."""
        given = list(self._better.values())
        return given.count(models), given.count((models[1], models[0]))

    def close(self) -> None:
        """Stop what runs."""
        self._passing_replies.close()


def same_until(left: str, right: str) -> int:
    """Characters that both begin with; a mark or a joined sign isn't taken apart from what it belongs to."""
    shortest = min(len(left), len(right))
    count = next((at for at in range(shortest) if left[at] != right[at]), shortest)
    while count and any(_belongs_before(text, count) for text in (left, right)):
        count -= 1
    return count


def _belongs_before(text: str, at: int) -> bool:
    """Whether the character there is one sign with that before it."""
    return at < len(text) and (
        unicodedata.combining(text[at]) > 0 or text[at] in (JOINER, VARIANT) or text[at - 1] == JOINER
    )


def _title(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= MAX_TITLE else f"{line[: MAX_TITLE - 1]}…"
