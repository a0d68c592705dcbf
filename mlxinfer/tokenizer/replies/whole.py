"""Calls that aren't JSON: each is read by mlx-lm's own parser when it is whole, and passed on in one piece."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.tokenizer.replies import lark
from mlxinfer.tokenizer.replies.json_text import json_object_text
from mlxinfer.tokenizer.replies.markup import kinds_of, resolved
from mlxinfer.tokenizer.replies.reading import Reader, Scan, markers
from mlxinfer.tokenizer.replies.syntax import CallSyntax, finish, is_name

if TYPE_CHECKING:
    from mlxinfer.tokenizer.replies.writing import Writer

MAX_CALL = 1 << 20
"""Characters of one call."""
MAX_WORK = 5_000_000
"""Characters times markers: what the patterns of mlx-lm's parsers may walk in the worst case, at 0.1 µs each."""
MAX_DEPTH = 64
"""Braces inside braces; a pattern of mlx-lm's calls itself for each."""

_NAME_ALONE = re.compile(r"[^\s<>{}]+")

Grammar = Callable[[lark.Lark, Sequence[lark.Tool], bool], str]


@dataclass(frozen=True)
class WholeCalls(CallSyntax):
    """One of mlx-lm's formats."""

    parser: str
    """The module in mlx_lm.tool_parsers."""
    openers: tuple[str, ...]
    closer: str
    grammar: Grammar
    shape: tuple[str, str] = ("", "")
    """How the text between opener and closer begins and ends; mlx-lm's parsers guess what isn't so, or leave it out."""
    costly: str = "<"
    """The marker at which the parser's patterns begin to search."""
    counted: str = ""
    """A marker of which each call has one, where the parser skips calls that it can't read."""
    check: Callable[[str], bool] | None = None
    """What else has to hold of that text, for the same reason."""
    or_plain: bool = False
    """Whether a name without arguments, or a call in JSON, is a call too (GLM, LongCat)."""
    tokens: tuple[str, ...] = ()

    def read(self, reader: Reader, writer: Writer, tools: Sequence[lark.Tool], opener: str) -> Scan[bool]:
        pieces: list[str] = []
        closer = yield from reader.until(markers(self.closer), pieces.append)
        body = "".join(pieces)
        # A model may end its reply instead of writing the last marker; then the text before it has to be whole.
        if not closer and (reader.is_cut or not self.shape[1]):
            return False
        calls = self._parsed(body, tools)
        for name, arguments in calls:
            writer.start_call(name)
            writer.arguments(arguments)
            finish(reader, writer)
        return bool(calls)

    def _parsed(self, body: str, tools: Sequence[lark.Tool]) -> list[tuple[str, str]]:
        """(name, arguments as JSON) of each call; none when any of it can't be read."""
        begin, end = self.shape
        stripped = body.strip()
        if len(body) > MAX_CALL or len(body) * body.count(self.costly) > MAX_WORK:
            return []
        is_call = stripped.startswith(begin) and stripped.endswith(end)
        if not is_call and not (self.or_plain and _is_plain(stripped)):
            return []
        if self.check is not None and not self.check(body):
            return []
        if self.or_plain and _NAME_ALONE.fullmatch(stripped):
            return [(stripped, "{}")] if is_name(stripped) else []
        # Imported late: it brings the array library with it.
        from mlxinfer.upstream import parse_tool_call

        parsed = parse_tool_call(self.parser, body, [t for t in map(_typed, tools) if t is not None])
        calls = [c for c in map(_call, parsed) if c is not None]
        if len(calls) != len(parsed) or (self.counted and body.count(self.counted) != len(calls)):
            return []
        return calls

    def calls(self, grammar: lark.Lark, tools: Sequence[lark.Tool], *, parallel: bool) -> str:
        return self.grammar(grammar, tools, parallel)


def _is_plain(body: str) -> bool:
    return _NAME_ALONE.fullmatch(body) is not None or json_object_text(body) is not None


def _typed(tool: lark.Tool) -> dict[str, Any] | None:
    """A tool as mlx-lm's parsers need it: with parameters, whose types stand where they look for them."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return None
    schema = function.get("parameters")
    schema = schema if isinstance(schema, Mapping) else {}
    properties = schema.get("properties")
    typed: dict[str, Any] = {}
    for key, own in properties.items() if isinstance(properties, Mapping) else ():
        own = resolved(own, schema) if isinstance(own, Mapping) else {}
        kinds = kinds_of(own)
        typed[key] = {**own, "type": kinds[0]} if len(kinds) == 1 else dict(own)
    return {"function": {"name": function.get("name"), "parameters": {"type": "object", "properties": typed}}}


def is_python(body: str) -> bool:
    """Whether the calls are a Python expression; from others mlx-lm's parser takes what it recognizes."""
    try:
        ast.parse(body.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def is_balanced(body: str) -> bool:
    """Whether Gemma's braces outside strings match, and strings are whole; its parser's time is cubic otherwise."""
    pieces = body.split('<|"|>')
    depth = 0
    for piece in pieces[::2]:
        for brace in re.findall(r"[{}]", piece):
            depth += 1 if brace == "{" else -1
            if not 0 <= depth <= MAX_DEPTH:
                return False
    return depth == 0 and len(pieces) % 2 == 1


def _call(parsed: Any) -> tuple[str, str] | None:
    """What a parser of mlx-lm's returned, as (name, arguments as JSON)."""
    if not isinstance(parsed, dict) or not is_name(parsed.get("name")):
        return None
    arguments = parsed.get("arguments", {})
    if isinstance(arguments, str):
        text = json_object_text(arguments)
    elif isinstance(arguments, dict) and all(isinstance(key, str) for key in arguments):
        text = _dumps(arguments)
    else:
        text = None
    return (parsed["name"], text) if text is not None else None


def _dumps(arguments: dict[str, Any]) -> str | None:
    """JSON; None for what JSON can't say (a set, NaN, a list inside itself)."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # A lone surrogate can only travel as an escape.
        return text if text.isascii() or _encodes(text) else json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
