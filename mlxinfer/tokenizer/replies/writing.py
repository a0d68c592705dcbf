"""The parts of a reply as they come out: adjacent ones joined, white space around markup left out, calls numbered."""

from __future__ import annotations

from typing import Literal

from mlxinfer.tokenizer.replies.events import (
    Part,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from mlxinfer.tokenizer.replies.reading import WHITESPACE

Kind = Literal["text", "reasoning"]


class Writer:
    """Collects parts. White space waits until it is known whether text follows: what stands before or after markup
    goes.

    White space at the very start of a reply stays, as long as no reasoning or call has come.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._pieces: list[str] = []
        """Text of the kind at hand that isn't a part yet."""
        self._held: list[str] = []
        self._kind: Kind = "text"
        self._keeps_lead = True
        self.begun = False
        """Whether something that isn't white space has come since the last markup."""
        self.ends_bare = False
        """Whether no markup can follow text that has begun: then white space needn't wait."""
        self.calls = 0
        self.in_call = False

    def text(self, piece: str) -> None:
        self._write("text", piece)

    def reasoning(self, piece: str) -> None:
        self._write("reasoning", piece)

    def _write(self, kind: Kind, piece: str) -> None:
        if kind != self._kind:
            self.turn()
            self._kind = kind
        body = piece.rstrip(WHITESPACE)
        if not body:
            if piece:
                self._held.append(piece)
                self._let_go()
            return
        tail = piece[len(body) :]
        if self.begun or self._keeps_lead:
            self._pieces += self._held
        else:
            body = body.lstrip(WHITESPACE)
        self._pieces.append(body)
        self._held = [tail] if tail else []
        self.begun = True
        self._let_go()

    def _let_go(self) -> None:
        if self.ends_bare and self.begun and self._kind == "text":
            self._pieces += self._held
            self._held = []

    def turn(self) -> None:
        """Markup stands here: white space around it is the template's."""
        self._flush()
        self._held, self.begun, self._keeps_lead = [], False, False

    def release(self) -> str:
        """White space that waits; it is the caller's from here on."""
        held, self._held = "".join(self._held), []
        return held

    def start_call(self, name: str) -> None:
        self.turn()
        self._parts.append(ToolCallStart(self.calls, name))
        self.calls += 1
        self.in_call = True

    def arguments(self, text: str) -> None:
        assert self.in_call
        last = self._parts[-1] if self._parts else None
        if isinstance(last, ToolCallArguments):
            self._parts[-1] = ToolCallArguments(last.index, last.text + text)
        else:
            self._parts.append(ToolCallArguments(self.calls - 1, text))

    def end_call(self) -> None:
        assert self.in_call
        self._parts.append(ToolCallEnd(self.calls - 1))
        self.in_call = False

    def drop_call(self) -> None:
        """What began as a call is none; the text that follows is its source, white space and all."""
        self._keeps_lead |= self.in_call
        self.in_call = False

    def finish(self) -> None:
        """The reply has ended."""
        if self.begun or self._keeps_lead:
            self._pieces += self._held
        self._held = []

    def take(self) -> list[Part]:
        """The parts since the last time."""
        self._flush()
        parts, self._parts = self._parts, []
        return parts

    def _flush(self) -> None:
        if self._pieces:
            part = TextPart if self._kind == "text" else ReasoningPart
            self._parts.append(part("".join(self._pieces)))
            self._pieces = []
