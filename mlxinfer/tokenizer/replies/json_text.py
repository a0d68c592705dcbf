"""JSON that arrives in pieces: what has come so far is passed on only while it begins valid JSON."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlxinfer.tokenizer.replies.reading import Reader, Scan

MAX_DEPTH = 128
"""Containers inside containers; other people's parsers recurse."""
MAX_SCALAR = 1024
"""Characters of a number; Python refuses to read integers of more than 4300 digits."""

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_HALF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")


class JsonScanner:
    """The state between the pieces of one JSON value.

    Control characters inside strings, which models write and JSON forbids, are escaped.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._want = "value"
        """value, item (a value or ]), key, first (a key or }), colon, next (a comma or the end)."""
        self._in_string = False
        self.done = False
        self.broken = False

    def advance(self, text: str, at: int, *, final: bool) -> tuple[str, int]:
        """Read on from `text[at]`; `final`: no more text comes. Returns (valid text, position after it)."""
        out: list[str] = []
        start = at
        while not self.done and not self.broken:
            if self._in_string:
                at = self._string(text, at)
                if self._in_string and (at == len(text) or text[at] == "\\"):
                    break
                if self._in_string:
                    out += (text[start:at], json.dumps(text[at])[1:-1])
                    at = start = at + 1
                continue
            at = _end(_SPACE, text, at)
            if at == len(text):
                break
            moved = self._token(text, at, final)
            if moved == at:
                break
            at = moved
        out.append(text[start:at])
        return "".join(out), at

    def _string(self, text: str, at: int) -> int:
        """Inside a string: to its end, to a control character, or to what isn't whole yet."""
        while True:
            at = _end(_PLAIN, text, at)
            if at == len(text) or text[at] < " ":
                return at
            if text[at] == '"':
                self._in_string = False
                if self._want == "key":
                    self._want = "colon"
                else:
                    self._value_ended()
                return at + 1
            if (match := _ESCAPE.match(text, at)) is None:
                if not _HALF_ESCAPE.fullmatch(text, at):
                    self.broken = True
                    self._in_string = False
                return at
            at = match.end()

    def _token(self, text: str, at: int, final: bool) -> int:
        """The next token outside strings; returns `at` itself when it isn't whole or isn't JSON."""
        char, want = text[at], self._want
        if want in ("value", "item") and char in "{[":
            self._open.append(char)
            self._want = "first" if char == "{" else "item"
            self.broken = len(self._open) > MAX_DEPTH
        elif char == '"' and want in ("value", "item", "key", "first"):
            self._in_string = True
            self._want = "key" if want in ("key", "first") else "value"
        elif (char == "]" and (want == "item" or (want == "next" and self._open[-1] == "["))) or (
            char == "}" and (want == "first" or (want == "next" and self._open[-1] == "{"))
        ):
            self._open.pop()
            self._value_ended()
        elif char == ":" and want == "colon":
            self._want = "value"
        elif char == "," and want == "next":
            self._want = "key" if self._open[-1] == "{" else "value"
        elif want in ("value", "item"):
            return self._scalar(text, at, final)
        else:
            self.broken = True
            return at
        return at if self.broken else at + 1

    def _scalar(self, text: str, at: int, final: bool) -> int:
        end = _end(_WORD, text, at)
        whole = end < len(text) or (final and not self._open)
        if whole and end - at <= MAX_SCALAR and _SCALAR.fullmatch(text, at, end):
            self._value_ended()
            return end
        # An unfinished one waits for its next character.
        self.broken = whole or end - at > MAX_SCALAR
        return at

    def _value_ended(self) -> None:
        self._want = "next"
        self.done = not self._open


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None
    return match.end()


def json_value(reader: Reader, emit: Callable[[str], None]) -> Scan[bool]:
    """Take one JSON value, giving it to `emit` as it comes; False when it isn't JSON or ends too soon."""
    scanner = JsonScanner()
    while True:
        piece, at = scanner.advance(reader.text, reader.at, final=reader.closed)
        reader.move_to(at)
        if piece:
            emit(piece)
        if scanner.done or scanner.broken:
            return scanner.done
        if not (yield from reader.more()):
            return False


def json_object_text(text: str) -> str | None:
    """`text` as the JSON of an object, control characters escaped; None when it is something else."""
    text = text.strip()
    scanner = JsonScanner()
    valid, at = scanner.advance(text, 0, final=True)
    return valid if scanner.done and at == len(text) and text.startswith("{") else None


def loads(text: str) -> Any:
    """The value of JSON that `json_value` let through."""
    return json.loads(text)
