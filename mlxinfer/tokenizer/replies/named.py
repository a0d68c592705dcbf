"""Calls that are a name and a JSON object of arguments: DeepSeek, Kimi K2, newer Mistral models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mlxinfer.tokenizer.replies import lark
from mlxinfer.tokenizer.replies.json_text import json_value
from mlxinfer.tokenizer.replies.objects import JsonBlock
from mlxinfer.tokenizer.replies.reading import markers
from mlxinfer.tokenizer.replies.syntax import CallSyntax, finish, is_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.tokenizer.replies.reading import Reader, Scan
    from mlxinfer.tokenizer.replies.writing import Writer


class NamedBlock(CallSyntax):
    """A name and its arguments between markers, in a section: DeepSeek and Kimi K2.

    Args:
        section: what opens and closes all calls.
        call: what opens one, stands between name and arguments, and closes it.
        fenced: as DeepSeek V3 writes: `function`, the separator, the name, the arguments in a Markdown fence.
        numbered: as Kimi writes a name: `functions.name:0`.
    """

    def __init__(
        self, section: tuple[str, str], call: tuple[str, str, str], *, fenced: bool = False, numbered: bool = False
    ) -> None:
        self.openers = (section[0], call[0])
        self.tokens = (*section, *call)
        self._end = section[1]
        self._opener, self._separator, self._closer = call
        self._fenced = fenced
        self._numbered = numbered

    def read(self, reader: Reader, writer: Writer, tools: Sequence[lark.Tool], opener: str) -> Scan[bool]:
        if opener == self._opener:
            return (yield from self._one(reader, writer))
        while True:
            yield from reader.space()
            if (yield from reader.accept(self._end)) or not (yield from reader.peek()):
                return True
            if not (yield from reader.accept(self._opener)) or not (yield from self._one(reader, writer)):
                return False

    def _one(self, reader: Reader, writer: Writer) -> Scan[bool]:
        name, marker = yield from reader.header(markers(self._separator))
        if not marker:
            return False
        name = name.strip()
        if self._numbered:
            name = _NUMBERED.sub(r"\1", name)
        yield from reader.space()
        fenced = name == "function" and (yield from reader.peek()) != "{"
        if fenced:
            name, marker = yield from reader.header(markers("```json"))
            name = name.strip()
            yield from reader.space()
        if not marker or not is_name(name) or (yield from reader.peek()) != "{":
            return False
        writer.start_call(name)
        if not (yield from json_value(reader, writer.arguments)):
            return False
        yield from reader.space()
        if fenced:
            yield from reader.accept("```")
            yield from reader.space()
        if not (yield from reader.accept(self._closer)) and (yield from reader.peek()):
            return False
        finish(reader, writer)
        return True

    def calls(self, grammar: lark.Lark, tools: Sequence[lark.Tool], *, parallel: bool) -> str:
        bodies: list[str] = []
        for name, schema in lark.functions_of(tools):
            if self._fenced:
                before, between, after = f"function{self._separator}", "\n```json\n", "\n```"
            else:
                before, between, after = "functions." if self._numbered else "", self._separator, ""
            number = "/:[0-9]{1,3}/" if self._numbered else ""
            pieces = (
                grammar.literal(self._opener + before),
                lark.quoted(name),
                number,
                grammar.literal(between),
                grammar.json(schema),
                grammar.literal(after + self._closer),
            )
            bodies.append(" ".join(filter(None, pieces)))
        gap = '"\\n"' if self._fenced else ""
        inner = grammar.repeated(grammar.any_of(bodies), gap, many=parallel)
        return f"{grammar.literal(self.openers[0])} {inner} {grammar.literal(self._end)}"


_NUMBERED = re.compile(r"^(?:functions\.)?(.+?)(?::[0-9]+)?$", re.DOTALL)


class MistralCalls(CallSyntax):
    """`[TOOL_CALLS]` before a list of call objects, or, since 2025, before each `name[ARGS]{…}`."""

    openers = ("[TOOL_CALLS]",)
    tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def __init__(self, *, named: bool) -> None:
        self._named = named
        self._list = JsonBlock("[TOOL_CALLS]", "", is_list=True)

    def read(self, reader: Reader, writer: Writer, tools: Sequence[lark.Tool], opener: str) -> Scan[bool]:
        yield from reader.space()
        if (yield from reader.peek()) in ("[", "{"):
            return (yield from self._list.read(reader, writer, tools, opener))
        name, marker = yield from reader.header(_AFTER_NAME, take=False)
        if marker == "[CALL_ID]":
            _, marker = yield from reader.header(_BEFORE_ARGUMENTS, take=False)
        yield from reader.accept("[ARGS]")
        yield from reader.space()
        name = name.strip()
        if not marker or not is_name(name) or (yield from reader.peek()) != "{":
            return False
        writer.start_call(name)
        if not (yield from json_value(reader, writer.arguments)):
            return False
        finish(reader, writer)
        return True

    def calls(self, grammar: lark.Lark, tools: Sequence[lark.Tool], *, parallel: bool) -> str:
        if not self._named:
            return self._list.calls(grammar, tools, parallel=parallel)
        call = grammar.any_of(
            f"{grammar.literal('[TOOL_CALLS]')} {lark.quoted(name)} {grammar.literal('[ARGS]')} {grammar.json(schema)}"
            for name, schema in lark.functions_of(tools)
        )
        return grammar.repeated(call, "", many=parallel)


_AFTER_NAME = markers("[ARGS]", "[CALL_ID]", "{")
_BEFORE_ARGUMENTS = markers("[ARGS]", "{")
