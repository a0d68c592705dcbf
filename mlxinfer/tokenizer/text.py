"""From token ids to text, piece by piece: what may be shown now, what has to wait for the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 8
"""A character has at most four bytes, so a longer run of undecodable tokens is invalid and not just incomplete."""


class Detokenizer:
    """Incremental decoding: the pieces of `add` and `flush` together are `decode(all ids)`. Not thread-safe.

    Only a short window of tokens is decoded again for each new one, so a token costs the same at any length. Text that
    ends inside a character waits for the rest of it. With byte-fallback tokenizers (SentencePiece) the equality holds
    where the bytes are valid UTF-8; there a whole run of byte tokens becomes replacement characters if any is bad.

    Args:
        decode: ids to text.
        is_text: False for ids that have no text (special tokens, ids beyond the vocabulary).
        kept: special tokens that are shown after all, by id, as the vocabulary spells them.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_text: Callable[[int], bool],
        kept: Mapping[int, str] | None = None,
    ) -> None:
        self._decode = decode
        self._is_text = is_text
        self._kept = kept or {}
        # Window: [0, read) has been emitted and gives the rest its context (a leading space, a combined decoder).
        self._window: list[int] = []
        self._read = 0
        self._emitted = ""

    def add(self, token_id: int) -> str:
        """The text that became certain with this token; often the token's own, sometimes none."""
        if token_id in self._kept:
            return self.flush() + self._kept[token_id]
        if not self._is_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        held = len(self._window) - self._read
        if text.endswith(REPLACEMENT):
            return "" if held < MAX_HELD_TOKENS else self._give_up(text)
        piece = self._after_emitted(text)
        if piece or held >= MAX_HELD_TOKENS:
            self._restart(self._read)
        return piece

    def flush(self) -> str:
        """What is still held; an incomplete character comes out as U+FFFD."""
        if self._read == len(self._window):
            return ""
        piece = self._after_emitted(self._decode(self._window))
        self._window, self._read, self._emitted = [], 0, ""
        return piece

    def _after_emitted(self, text: str) -> str:
        if text.startswith(self._emitted):
            return text[len(self._emitted) :]
        # A later token changed how earlier ones decode (an invalid run of bytes); those are out already.
        return self._decode(self._window[self._read :])

    def _restart(self, start: int) -> None:
        """Everything in the window is out; tokens from `start` on stay as context."""
        self._window = self._window[start:]
        self._read = len(self._window)
        self._emitted = self._decode(self._window)

    def _give_up(self, text: str) -> str:
        """Emit an undecodable run up to its last possible start of a character."""
        piece = self._after_emitted(text)
        for cut in range(len(self._window) - 1, max(self._read, len(self._window) - 4), -1):
            tail = self._decode(self._window[cut:])
            # If cutting here changes nothing, no character spans the cut, nor can one that still grows.
            if piece.endswith(tail) and self._decode(self._window[:cut]) + tail == text:
                self._window, self._read, self._emitted = self._window[cut:], 0, ""
                return piece[: len(piece) - len(tail)]
        self._restart(self._read)
        return piece


class StopMatcher:
    """Finds stop strings in text that arrives in pieces. Not thread-safe.

    The text ends just before the stop string that is complete first (of those complete at the same character, the
    longest), so the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._held = ""
        self._longest = max(map(len, stop), default=0)
        self.stopped = False
        self.found: str | None = None
        """The stop string that ended the text."""
        self.behind = 0
        """How many characters had come behind it by then."""

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that is certain to come before any stop string, whether one was found). After that: ("", True)."""
        if self.stopped:
            return "", True
        if not self._stop:
            return text, False
        text = self._held + text
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            end, start = min(found)
            self.found, self.behind = text[start:end], len(text) - end
            return text[:start], True
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """The text that was held because a stop string could have begun in it."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(s.startswith(text[-length:]) for s in self._stop):
                return length
        return 0
