"""Untrusted text for a Markdown component: HTML and images lose their meaning; code and formulas don't.

This is about legibility: what a reply wrote is shown as it was written. The page's sanitizer and its content policy
(door.py) are what keep it from running or loading anything.
"""

from __future__ import annotations

import re

JOINER = "\u2060"
"""Takes no room and breaks a tag or an image apart. page.js takes it out of what is copied."""
_TOKEN = re.compile(r"`+|~{3,}|\$\$?|\\[(\[]|<(?=[a-zA-Z/!?])|!(?=\[)")
_RUN = re.compile(r"`+")
_CLOSERS = {"$$": "$$", "$": "$", "\\(": "\\)", "\\[": "\\]"}


def legible(text: str) -> str:
    """`text` with a joiner after each `<` of a tag and each `!` of an image, outside of code and formulas."""
    parts: list[str] = []
    done = at = 0
    spans = _Spans(text)
    while match := _TOKEN.search(text, at):
        if match[0] in "<!":
            parts += (text[done : match.end()], JOINER)
            done = at = match.end()
        else:
            at = spans.end(match)
    return "".join((*parts, text[done:]))


class _Spans:
    """Where code and formulas end. What has no end is looked for once: a text of openings only stays linear."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._endless: set[str] = set()

    def end(self, match: re.Match[str]) -> int:
        """Behind the span that begins there; behind the opening where there is no such span."""
        opening = match[0]
        if opening[0] in "`~":
            line = self._text[self._text.rfind("\n", 0, match.start()) + 1 : match.start()]
            if len(opening) >= 3 and len(line) <= 3 and not line.strip(" "):
                return self._fence(match)
            return match.end() if opening[0] == "~" else self._inline(match)
        closer = _CLOSERS[opening]
        # One dollar sign is a price more often than a formula: only within its line.
        line_end = self._text.find("\n", match.end()) if opening == "$" else -1
        return self._find(closer, match.end(), line_end if line_end >= 0 else len(self._text))

    def _find(self, closer: str, start: int, stop: int) -> int:
        if closer in self._endless:
            return start
        found = self._text.find(closer, start, stop)
        if found >= 0:
            return found + len(closer)
        if stop == len(self._text):
            self._endless.add(closer)
        return start

    def _fence(self, match: re.Match[str]) -> int:
        mark = match[0]
        closing = re.compile(rf"^ {{0,3}}{re.escape(mark)}{re.escape(mark[0])}*[ \t]*$", re.MULTILINE)
        found = closing.search(self._text, match.end())
        return found.end() if found else len(self._text)

    def _inline(self, match: re.Match[str]) -> int:
        mark = match[0]
        if mark in self._endless:
            return match.end()
        for run in _RUN.finditer(self._text, match.end()):
            if run[0] == mark:
                return run.end()
        self._endless.add(mark)
        return match.end()
