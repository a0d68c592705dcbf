"""What a reply is made of, in the order in which it comes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Text the model wrote to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `index` counts the calls of a reply from 0; the name need not be that of a known tool."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments; all pieces of an ended call are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call is whole.

    A call without this end is void: the reply was cut inside it, or it turned out to be no call after it had begun; in
    that case its whole source follows as text.
    """

    index: int


Part = TextPart | ReasoningPart | ToolCallStart | ToolCallArguments | ToolCallEnd
