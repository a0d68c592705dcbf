"""Reading text that arrives in pieces with straight-line code.

A scan is a generator that yields whenever it needs more text, and returns what it read. Everything that is certain
leaves the buffer at once; what stays is shorter than a marker or a number, so a reply costs the same per character at
any length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Scan = Generator[None, None, T]

WHITESPACE = " \t\r\n"
_SPACE = re.compile(r"[ \t\r\n]*")


class Markers:
    """A set of strings to look for, none of which begins another."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted(set(texts)))
        assert all(self.texts), "an empty marker is everywhere"
        assert not any(a != b and b.startswith(a) for a in self.texts for b in self.texts)
        self.pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._beginnings = frozenset(t[:n] for t in self.texts for n in range(1, len(t)))
        self._longest = max(map(len, self.texts), default=0)

    def unfinished(self, text: str, at: int) -> int:
        """Length of the longest end of `text[at:]` that begins a marker."""
        for length in range(min(len(text) - at, self._longest - 1), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


@lru_cache(maxsize=256)
def markers(*texts: str) -> Markers:
    """The set of these markers; made once."""
    return Markers(texts)


class Reader:
    """The text of a reply as far as it has come. `source` can be kept, for a construct that may turn out to be text."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.closed = False
        self.complete = False
        self.ran_out = False
        """A scan wanted more text and there is none."""
        self._source: list[str] | None = None

    def add(self, text: str) -> None:
        self.text, self.at = self.text[self.at :] + text, 0

    def close(self, *, complete: bool) -> None:
        """No more text comes; `complete`: because the model ended the reply itself."""
        self.closed, self.complete = True, complete

    def discard(self) -> None:
        """Drop what has come and wasn't taken."""
        self.at = len(self.text)

    @property
    def is_cut(self) -> bool:
        """A scan failed only because the reply was cut off."""
        return self.ran_out and not self.complete

    def record(self, start: str = "") -> None:
        """Keep what is read from here on, after `start`."""
        self._source = [start]

    def recorded(self) -> str:
        """What was read since `record`; keeping ends."""
        source, self._source = "".join(self._source or ()), None
        return source

    def move_to(self, at: int) -> str:
        """Take the text up to the buffer's position `at`."""
        piece = self.text[self.at : at]
        self.at = at
        if self._source is not None and piece:
            self._source.append(piece)
        return piece

    def more(self) -> Scan[bool]:
        """Wait for more text; False when there will be none."""
        if self.closed:
            self.ran_out = True
            return False
        yield
        return True

    def peek(self) -> Scan[str]:
        """The next character, which stays; "" at the end."""
        while self.at == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def space(self) -> Scan[str]:
        """Take white space; returns it."""
        pieces: list[str] = []
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            pieces.append(self.move_to(match.end()))
            if self.at < len(self.text) or not (yield from self.more()):
                return "".join(pieces)

    def accept(self, literal: str) -> Scan[bool]:
        """Take `literal` if it comes next."""
        while not self.text.startswith(literal, self.at):
            rest = len(self.text) - self.at
            if rest >= len(literal) or not literal.startswith(self.text[self.at :]):
                return False
            if not (yield from self.more()):
                return False
        self.move_to(self.at + len(literal))
        return True

    def until(self, wanted: Markers, emit: Callable[[str], None], *, take: bool = True) -> Scan[str]:
        """Take text up to a marker, giving it to `emit` as soon as it is certain. Returns the marker, or "" at the end.

        With `take` false the marker stays.
        """
        while True:
            match = wanted.pattern.search(self.text, self.at)
            if match is not None:
                emit(self.move_to(match.start()))
                return self.move_to(match.end()) if take else match.group()
            keep = 0 if self.closed else wanted.unfinished(self.text, self.at)
            emit(self.move_to(len(self.text) - keep))
            if not (yield from self.more()):
                return ""

    def header(self, wanted: Markers, limit: int = 1024, *, take: bool = True) -> Scan[tuple[str, str]]:
        """(text before the next marker, the marker); the marker is "" at the end, or after `limit` characters.

        With `take` false the marker stays.
        """
        while True:
            match = wanted.pattern.search(self.text, self.at)
            if match is not None and match.start() - self.at <= limit:
                before = self.move_to(match.start())
                return before, self.move_to(match.end()) if take else match.group()
            size = len(self.text) - self.at
            if size - (0 if self.closed else wanted.unfinished(self.text, self.at)) > limit or match is not None:
                return self.move_to(self.at + limit), ""
            if not (yield from self.more()):
                return self.move_to(len(self.text)), ""
