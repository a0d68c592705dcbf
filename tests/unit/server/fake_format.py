"""A reply format in which every piece of text says what part it is.

"r:" is reasoning, "c:" a call's name, "a:" more of its arguments, "e:" its end, "-:" nothing; the rest is text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxinfer.tokenizer.replies import (
    Part,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from mlxinfer.types import Grammar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class FakeParser:
    def __init__(self, parse_tools: bool) -> None:
        self._parse_tools = parse_tools
        self._call = -1
        self.completed: bool | None = None

    def feed(self, text: str) -> list[Part]:
        kind, body = text[:2], text[2:]
        if kind == "r:":
            return [ReasoningPart(body)]
        if kind == "-:":
            return []
        if not self._parse_tools or kind not in ("c:", "a:", "e:"):
            return [TextPart(text)]
        if kind == "c:":
            self._call += 1
            return [ToolCallStart(self._call, body)]
        return [ToolCallArguments(self._call, body) if kind == "a:" else ToolCallEnd(self._call)]

    def end(self, *, complete: bool) -> list[Part]:
        self.completed = complete
        return []


@dataclass
class FakeFormat:
    name: str = "fake"
    markers: frozenset[str] = frozenset({"<|im_start|>", "h", "no such token"})
    has_tools: bool = True
    has_reasoning: bool = True
    made: list[dict[str, Any]] = field(default_factory=list)
    parsers: list[FakeParser] = field(default_factory=list)

    def parser(
        self, *, prompt_tail: str = "", tools: Sequence[Mapping[str, Any]] = (), parse_tools: bool = True
    ) -> FakeParser:
        self.made.append({"prompt_tail": prompt_tail, "tools": tools, "parse_tools": parse_tools})
        self.parsers.append(FakeParser(parse_tools))
        return self.parsers[-1]

    def calls_constrained(
        self, tools: Sequence[Mapping[str, Any]], prompt_tail: str, *, parallel: bool, reasons: bool = True
    ) -> Grammar:
        return Grammar("lark", json.dumps([[tool["function"]["name"] for tool in tools], parallel]))

    def constrained(self, grammar: Grammar, prompt_tail: str, *, reasons: bool = True) -> Grammar:
        return grammar

    def reasoning_prefix(self, prompt_tail: str) -> str | None:
        return None
