"""Untrusted text for a Markdown component: HTML and images lose their meaning, prices are no formulas; code and
formulas stay what they are.

This is about legibility: what a reply wrote is shown as it was written. The page's sanitizer and its content policy
(door.py) are what keep it from running or loading anything.
"""

from __future__ import annotations

import re

JOINER = "\u2060"
"""Takes no room and breaks a tag or an image apart. page.js takes it out of what is copied."""
DELIMITERS = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
    {"left": f"${JOINER}", "right": f"{JOINER}$", "display": False},
]
"""What the Markdown component is to take for formulas. It would pair any two dollar signs, "$5 and $6" too;
so `legible` marks those that are a formula's."""
_TOKEN = re.compile(r"`+|~{3,}|\$\$?|\\[(\[$]|<(?=[a-zA-Z/!?])|!(?=\[)")
_RUN = re.compile(r"`+")
_CLOSERS = {"$$": "$$", "\\(": "\\)", "\\[": "\\]"}
_IN_LINE = re.compile(r"\$(?!\s)((?:\\[^\n]|[^\\$\n])++)(?<!\s)\$(?!\d)")
"""A formula as pandoc and Jupyter have it: no space inside of either sign, no digit behind the second, which is the
next one that isn't escaped. Within its line: one dollar sign is a price more often than a formula."""


def legible(text: str) -> str:
    """`text` with a joiner after each `<` of a tag and each `!` of an image, outside of code and formulas.

    Formulas between single dollar signs get one inside of both.
    """
    parts: list[str] = []
    done = at = 0
    spans = _Spans(text)
    while match := _TOKEN.search(text, at):
        if match[0] in "<!":
            parts += (text[done : match.end()], JOINER)
            done = at = match.end()
        elif match[0] == "$":
            at = match.end()
            if formula := _IN_LINE.match(text, match.start()):
                parts += (text[done:at], JOINER, formula[1], JOINER, "$")
                done = at = formula.end()
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
        if opening == "\\$":  # escaped
            return match.end()
        return self._find(_CLOSERS[opening], match.end())

    def _find(self, closer: str, start: int) -> int:
        if closer in self._endless:
            return start
        found = self._text.find(closer, start)
        if found >= 0:
            return found + len(closer)
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
