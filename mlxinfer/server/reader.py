"""One choice of a chat: from the deltas of its generation to the parts of its reply."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlxinfer.tokenizer import StopMatcher
from mlxinfer.tokenizer.replies import Part, ReasoningPart, TextPart, ToolCallEnd
from mlxinfer.types import Timings, TokenLogprob, Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlxinfer.server.prompting import Prepared
    from mlxinfer.types import Delta


@dataclass(frozen=True, slots=True)
class Finish:
    """The last part of each choice."""

    reason: Literal["stop", "length", "tool_calls"]
    stop_string: str | None
    """The stop string that ended it."""
    usage: Usage
    timings: Timings | None


@dataclass(frozen=True, slots=True)
class LogprobsPart:
    """Of the tokens of the text that follows, and of any before it that gave no text."""

    tokens: tuple[TokenLogprob, ...]


ChatPart = Part | LogprobsPart | Finish


class Reader:
    """One choice: its deltas in, its parts out."""

    def __init__(self, prepared: Prepared) -> None:
        self._parser = prepared.parser()
        self._one_call = prepared.one_call
        self._only_calls = prepared.only_calls
        self._calls = 0
        self._reasoning_tokens = 0
        self._held_tokens = 0
        self._held: list[tuple[int, tuple[TokenLogprob, ...]]] = []
        """Of each delta since the last part: how long its text is, and its tokens."""
        self._kind: type[Part] = TextPart
        self._stop = StopMatcher(prepared.stop)
        self._used: int | None = None
        """Tokens up to where it was enough: some more are made before the engine hears of that."""
        self.tokens = 0
        self.enough = False
        """The only call that was allowed is whole, or a stop string has come; nothing that follows counts."""

    def read(self, delta: Delta) -> Iterator[ChatPart]:
        parts = self._parser.feed(delta.text) if delta.text and not self.enough else []
        if delta.finish_reason is not None and not self.enough:
            parts += self._end(cut=delta.finish_reason == "length")
        self.tokens += len(delta.token_ids)
        self._held_tokens += len(delta.token_ids)
        if not self.enough:
            self._held.append((len(delta.text), delta.logprobs))
        if parts:
            self._attribute(parts)
        elif delta.finish_reason is not None and self._kind is ReasoningPart:
            self._reasoning_tokens += self._held_tokens
        # Tokens after the last text have log probabilities too.
        of_text = any(isinstance(p, TextPart) for p in parts) or (
            not parts and delta.finish_reason is not None and self._kind is TextPart
        )
        checked = list(self._checked(parts))
        if self.enough and self._used is None and delta.finish_reason is None:
            self._used = self.tokens
        if of_text and (tokens := self._of_text()):
            yield LogprobsPart(tokens)
        if parts:
            self._held.clear()
        yield from checked
        if delta.finish_reason is not None:
            if not self.enough and (held := self._stop.flush()):
                yield TextPart(held)
            yield self._finish(delta)

    def _of_text(self) -> tuple[TokenLogprob, ...]:
        """The held tokens, without those that came behind a stop string: the parser may let go of many at once."""
        held, behind = list(self._held), self._stop.behind
        while self._stop.stopped and held and held[-1][0] <= behind:
            behind -= held.pop()[0]
        return tuple(token for _, tokens in held for token in tokens)

    def _end(self, *, cut: bool) -> list[Part]:
        parts = self._parser.end(complete=not cut)
        # "<" may be text to the parser; where only calls can come it is the beginning of one.
        return [p for p in parts if not isinstance(p, TextPart)] if cut and self._only_calls else parts

    def _attribute(self, parts: Sequence[Part]) -> None:
        """Tokens belong to the part they made; where one delta ends the reasoning and begins the text, to both."""
        if any(isinstance(p, ReasoningPart) for p in parts):
            self._reasoning_tokens += self._held_tokens
        self._held_tokens = 0
        self._kind = type(parts[-1])

    def _checked(self, parts: Sequence[Part]) -> Iterator[Part]:
        for part in parts:
            if self.enough:
                return
            if isinstance(part, TextPart):
                text, self.enough = self._stop.feed(part.text)
            else:
                text = self._stop.flush()
            if text:
                yield TextPart(text)
            if not isinstance(part, TextPart):
                yield part
            if isinstance(part, ToolCallEnd):
                self._calls += 1
                self.enough = self._one_call

    def _finish(self, delta: Delta) -> Finish:
        usage = delta.usage or Usage()
        count = usage.completion_tokens if self._used is None else self._used
        usage = dataclasses.replace(usage, completion_tokens=count, reasoning_tokens=min(self._reasoning_tokens, count))
        stop_string = self._stop.found or delta.stop_string
        if self._calls and (self.enough or delta.finish_reason == "stop"):
            reason = "tool_calls"
        else:
            reason = "length" if delta.finish_reason == "length" and stop_string is None else "stop"
        return Finish(reason, stop_string, usage, delta.timings)
