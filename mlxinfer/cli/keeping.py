"""The terminal's chat in the store of conversations, turn by turn and while a reply grows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mlxinfer.cli import output
from mlxinfer.errors import InvalidRequestError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.app.store import Store
    from mlxinfer.app.store.records import Status
    from mlxinfer.cli.chat import Chat

LAST = "last"
"""What `run --resume` takes for an id: the newest conversation."""
EVERY_S = 1.0
"""Seconds between two states of a growing reply on disk."""
TITLE = 60


class Keeper:
    """Keeps one chat. A store that fails ends the keeping, with a word about it, and never the chat."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._conversation: str | None = None
        self._before: str | None = None
        self._reply: str | None = None
        self._kept: list[dict[str, str]] = []
        """The messages that the shown branch has."""
        self._written = 0.0

    def resume(self, state: Chat, key: str) -> None:
        """Go on with a conversation of the store. Raises InvalidRequestError, StoreError."""
        assert self._store is not None
        found = self._store.conversations(limit=1) if key == LAST else [self._store.conversation(key)]
        if not found:
            raise InvalidRequestError("there is no conversation to go on with", param="resume")
        chat = found[0]
        turns = [one for one in self._store.branch(chat.id) if one.role != "tool"]
        state.messages = [{"role": one.role, "content": one.content} for one in turns]
        state.system = state.system or chat.system or None
        self._conversation, self._kept = chat.id, list(state.messages)

    def begin(self, state: Chat, text: str) -> None:
        """The question is asked and the reply begins."""
        self._guarded(lambda store: self._begin(store, state, text))

    def _begin(self, store: Store, state: Chat, text: str) -> None:
        # After /clear, /load or another system message it is another conversation.
        if self._conversation is None or self._kept != state.messages:
            title = " ".join(text.split())[:TITLE]
            chat = store.create(state.info.name, title=title, system=state.system or "")
            self._conversation = chat.id
            for turn in state.messages:
                store.add(chat.id, "user" if turn["role"] == "user" else "assistant", turn["content"])
        self._before = store.conversation(self._conversation).leaf
        store.add(self._conversation, "user", text)
        self._reply = store.add(self._conversation, "assistant", "", status="streaming", model=state.info.name).id
        self._written = time.monotonic()

    def grow(self, said: list[str]) -> None:
        """The reply so far; now and then it is written."""
        now, reply = time.monotonic(), self._reply
        if reply is not None and now - self._written >= EVERY_S:
            self._written = now
            self._guarded(lambda store: store.write(reply, "".join(said)))

    def end(self, state: Chat, said: list[str], status: Status) -> None:
        """The reply is over; `failed` takes the question back from the shown branch."""
        reply, before = self._reply, self._before
        if reply is None:
            return

        def finish(store: Store) -> None:
            store.write(reply, "".join(said), status=status)
            if status == "failed" and before is not None:
                store.show_end(before)
            elif status == "failed" and self._conversation is not None:
                store.delete(self._conversation)
                self._conversation = None

        self._guarded(finish)
        self._reply, self._kept = None, list(state.messages)

    def _guarded(self, work: Callable[[Store], None]) -> None:
        if self._store is None:
            return
        try:
            work(self._store)
        except StoreError as error:
            output.say(f"This conversation is no longer kept: {error}")
            self._store = None
