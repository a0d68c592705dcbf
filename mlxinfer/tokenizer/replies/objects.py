"""Calls that are JSON objects with a name and arguments: between markers, or bare."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.tokenizer.replies import lark
from mlxinfer.tokenizer.replies.json_text import json_object_text, json_value, loads
from mlxinfer.tokenizer.replies.syntax import CallSyntax, finish, is_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.tokenizer.replies.reading import Reader, Scan
    from mlxinfer.tokenizer.replies.writing import Writer

_NAME_KEYS = ("name", "function", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")
_BARE_KEYS = frozenset({"name", "arguments", "parameters", "type", "id"})


@dataclass(slots=True)
class _Call:
    """A call object as far as it has been read."""

    name: str = ""
    arguments: str | None = None
    """JSON of an object that came before the name, or in a string."""


def call_object(reader: Reader, writer: Writer, *, bare: bool = False) -> Scan[bool]:
    """Read `{"name": …, "arguments": {…}}`, keys in any order, others ignored; the call is left open.

    Arguments stream when the name stands before them. A `bare` object, one without markup around it, must have
    arguments, and no keys but those of calls.
    """
    call = _Call()
    if not (yield from reader.accept("{")):
        return False
    while True:
        yield from reader.space()
        key = yield from _json(reader)
        if not isinstance(key, str) or (bare and key not in _BARE_KEYS):
            return False
        yield from reader.space()
        if not (yield from reader.accept(":")):
            return False
        yield from reader.space()
        if not (yield from _member(reader, writer, call, key)):
            return False
        yield from reader.space()
        if (yield from reader.accept("}")):
            return _complete(writer, call, bare)
        if not (yield from reader.accept(",")):
            return False


def _json(reader: Reader) -> Scan[Any]:
    """A JSON value; None also when it is broken."""
    pieces: list[str] = []
    whole = yield from json_value(reader, pieces.append)
    return loads("".join(pieces)) if whole else None


def _member(reader: Reader, writer: Writer, call: _Call, key: str) -> Scan[bool]:
    """The value of one key."""
    if key in _ARGUMENT_KEYS:
        if writer.in_call or call.arguments is not None:
            return False
        if call.name and (yield from reader.peek()) == "{":
            writer.start_call(call.name)
            return (yield from json_value(reader, writer.arguments))
    pieces: list[str] = []
    if not (yield from json_value(reader, pieces.append)):
        return False
    text = "".join(pieces)
    if key in _ARGUMENT_KEYS:
        # Some write the object as a string; null is how others write none.
        inner = loads(text) if text.startswith('"') else "{}" if text == "null" else text
        call.arguments = json_object_text(inner)
        return call.arguments is not None
    if key in _NAME_KEYS and not call.name and text.startswith('"'):
        call.name = loads(text)
        return is_name(call.name)
    return True


def _complete(writer: Writer, call: _Call, bare: bool) -> bool:
    if writer.in_call:
        return True
    if not call.name or (bare and call.arguments is None):
        return False
    writer.start_call(call.name)
    writer.arguments(call.arguments or "{}")
    return True


class JsonBlock(CallSyntax):
    """Call objects, or a list of them, after a marker, and in most formats before another:
    `<tool_call>{…}</tool_call>`."""

    def __init__(self, opener: str, closer: str, *, is_list: bool = False, pad: str = "\n") -> None:
        self.openers = (opener,)
        self.tokens = (opener, closer) if closer else (opener,)
        self._closer = closer
        self._is_list = is_list
        self._pad = pad

    def read(self, reader: Reader, writer: Writer, tools: Sequence[lark.Tool], opener: str) -> Scan[bool]:
        yield from reader.space()
        if (yield from reader.accept("[")):
            return (yield from self._list(reader, writer))
        while (yield from call_object(reader, writer)):
            yield from reader.space()
            following = yield from reader.peek()
            closed = bool(self._closer) and (yield from reader.accept(self._closer))
            if closed or not following or following == "{" or not self._closer:
                finish(reader, writer)
            if closed or following != "{":
                return not writer.in_call
        return False

    def _list(self, reader: Reader, writer: Writer) -> Scan[bool]:
        while True:
            yield from reader.space()
            if not (yield from call_object(reader, writer)):
                return False
            yield from reader.space()
            following = yield from reader.peek()
            if following not in (",", "]", ""):
                return False
            finish(reader, writer)
            if following != ",":
                break
            yield from reader.accept(",")
        yield from reader.accept("]")
        if self._closer:
            yield from reader.space()
            yield from reader.accept(self._closer)
        return True

    def calls(self, grammar: lark.Lark, tools: Sequence[lark.Tool], *, parallel: bool) -> str:
        objects = call_objects(grammar, tools)
        opener, closer = self.openers[0], self._closer
        if self._is_list:
            inner = grammar.repeated(objects, '", "', many=parallel)
            return " ".join(filter(None, (grammar.literal(f"{opener}["), inner, grammar.literal(f"]{closer}"))))
        call = f"{grammar.literal(opener + self._pad)} {objects} {grammar.literal(self._pad + closer)}"
        return grammar.repeated(call, '"\\n"' if self._pad else "", many=parallel)


def call_objects(grammar: lark.Lark, tools: Sequence[lark.Tool], arguments_key: str = "arguments") -> str:
    """The expression for one call object of these tools."""
    return grammar.any_of(
        f"{lark.quoted(_opening(name, arguments_key))} {grammar.json(schema)} {lark.quoted('}')}"
        for name, schema in lark.functions_of(tools)
    )


def _opening(name: str, arguments_key: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{arguments_key}": '


class BareCalls(CallSyntax):
    """Call objects that are the whole reply, with or without markup before them: Llama 3, and models without any
    syntax.

    `marked` is how calls look when the model does mark them.
    """

    def __init__(self, marked: CallSyntax | None = None, *, arguments_key: str = "arguments") -> None:
        self.openers = marked.openers if marked else ("<|python_tag|>",)
        self.tokens = marked.tokens if marked else self.openers
        self._marked = marked
        self._arguments_key = arguments_key

    def read(self, reader: Reader, writer: Writer, tools: Sequence[lark.Tool], opener: str) -> Scan[bool]:
        if opener and self._marked:
            return (yield from self._marked.read(reader, writer, tools, opener))
        yield from reader.space()
        while (yield from call_object(reader, writer, bare=True)):
            yield from reader.space()
            if (yield from reader.accept(";")):
                yield from reader.space()
            following = yield from reader.peek()
            if following not in ("{", ""):
                return False
            finish(reader, writer)
            if not following:
                return True
        return False

    def calls(self, grammar: lark.Lark, tools: Sequence[lark.Tool], *, parallel: bool) -> str:
        objects = call_objects(grammar, tools, self._arguments_key)
        return grammar.repeated(objects, '"; "' if not self._marked else '"\\n"', many=parallel)
