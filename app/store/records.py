"""What the store gives out. Times are seconds since 1970, UTC."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import sqlite3

Role = Literal["user", "assistant", "tool"]
Status = Literal["streaming", "done", "stopped", "failed"]
QUIET_S = 30.0
"""A reply that is being written and hasn't grown for so long was cut off: whoever wrote it is gone."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation without its messages."""

    id: str
    title: str
    model: str
    created: float
    updated: float
    pinned: bool = False
    deleted: float | None = None
    leaf: str | None = None
    """The message that the shown branch ends with."""
    system: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Sampling and the like, as the app sets them."""


@dataclass(frozen=True, slots=True)
class Message:
    """A node of the tree."""

    id: str
    conversation: str
    parent: str | None
    role: Role
    content: str
    created: float
    updated: float
    reasoning: str = ""
    status: Status = "done"
    extra: dict[str, Any] = field(default_factory=dict)
    """Attachments, tool calls, the model, figures of the reply."""

    @property
    def cut_off(self) -> bool:
        """Whether a reply ended because its writer died."""
        return self.status == "streaming" and time.time() - self.updated > QUIET_S


@dataclass(frozen=True, slots=True)
class Hit:
    """What a search found."""

    conversation: Conversation
    message: str | None
    """None where the title matched."""
    snippet: str


def conversation_of(row: sqlite3.Row | dict[str, Any]) -> Conversation:
    values: dict[str, Any] = dict(row)
    values.update(pinned=bool(values["pinned"]), settings=json.loads(values["settings"]))
    return Conversation(**values)


def message_of(row: sqlite3.Row) -> Message:
    values: dict[str, Any] = dict(row)
    values.pop("number")
    values["extra"] = json.loads(values["extra"])
    return Message(**values)
