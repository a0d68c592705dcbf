"""Log probabilities in OpenAI's shapes: each token's text, its bytes, and the likeliest alternatives."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.tokenizer import Tokenizer
    from mlxinfer.types import TokenLogprob

LOWEST = -9999.0
"""JSON has no infinity; OpenAI writes this for a token that can't come."""
REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """The text and bytes of single tokens, as they stand inside a reply."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._seen: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        """(text, bytes); text of a token that is part of a character only has U+FFFD in it, its bytes are right."""
        found = self._seen.get(token_id)
        if found is None:
            found = self._seen[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> tuple[str, bytes]:
        spelling = self._tokenizer.token_text(token_id)
        if spelling is None:
            return "", b""
        if self._tokenizer.is_special(token_id):
            return spelling, spelling.encode(errors="replace")
        if byte := _BYTE_TOKEN.fullmatch(spelling):
            raw = bytes.fromhex(byte[1])
            return raw.decode(errors="replace"), raw
        # Decoders drop a leading space at the start of a text, so the token is decoded behind itself.
        once = self._tokenizer.decode([token_id])
        text = self._tokenizer.decode([token_id, token_id])[len(once) :]
        if REPLACEMENT in text or REPLACEMENT in once:
            return once, _byte_level(spelling) or once.encode(errors="replace")
        return text, text.encode(errors="replace")

    def chat(self, tokens: Sequence[TokenLogprob], top: int) -> list[dict[str, Any]]:
        """Entries of `logprobs.content`; as many alternatives as were asked for."""
        return [
            self._entry(t.token_id, t.logprob) | {"top_logprobs": [self._entry(i, p) for i, p in t.top[:top]]}
            for t in tokens
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


def finite(logprob: float) -> float:
    """No infinity and no NaN."""
    return logprob if logprob > LOWEST else LOWEST


def _byte_level(spelling: str) -> bytes | None:
    """The bytes of a token of a byte-level vocabulary; None when it isn't of one."""
    table = _byte_level_table()
    if any(c not in table for c in spelling):
        return None
    return bytes(table[c] for c in spelling)


@functools.cache
def _byte_level_table() -> dict[str, int]:
    """The printable stand-ins of GPT-2's tokenizer: printable Latin-1 for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
