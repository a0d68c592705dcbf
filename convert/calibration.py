"""The texts that ship with the package, as token rows: what scales are fitted on, and what quality is measured on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Literal

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.tokenizer import Tokenizer
    from mlxinfer.types import Message

Purpose = Literal["calibration", "evaluation"]

MAX_TEXT_BYTES = 64 << 20
HEADING = re.compile(r"^=== (prose|code|chat)(?: .*)?$", re.MULTILINE)
TURN = re.compile(r"^(user|assistant): ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Document:
    """One text; a chat as its turns, alternately the user's and the assistant's."""

    kind: str
    text: str


def documents(purpose: Purpose) -> list[Document]:
    """The texts of the package for `purpose`."""
    text = resources.files("mlxinfer.convert").joinpath("data", f"{purpose}.txt").read_text(encoding="utf-8")
    return parse(text)


def parse(text: str) -> list[Document]:
    """Documents of a text in the form of convert/data. Text without a heading is one document of prose.

    Raises InvalidRequestError for text that is empty or too long.
    """
    if not text.strip() or len(text) > MAX_TEXT_BYTES:
        raise InvalidRequestError(f"the text has {len(text)} characters; it needs between 1 and {MAX_TEXT_BYTES}")
    before, *rest = HEADING.split(text)
    found = [Document("prose", before.strip("\n"))] if before.strip() else []
    pairs = zip(rest[::2], rest[1::2], strict=True)
    return found + [Document(kind, body.strip("\n")) for kind, body in pairs if body.strip()]


def rows(texts: Sequence[Document], tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """One row of token ids per document, at most `max_tokens` each; documents of fewer than two tokens are left out."""
    encoded = (_ids(document, tokenizer)[:max_tokens] for document in texts)
    return [row for row in encoded if len(row) > 1]


def packed_rows(texts: Sequence[Document], tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """All documents one after another, cut into rows of exactly `length` tokens; the last is filled from the start.

    In a fixed order that mixes kinds and languages, so that a few rows hold some of each. Where the tokenizer begins
    texts with a token of its own every row begins with it: without it models do what they do nowhere else.
    """
    stride = next(s for s in range(max(1, len(texts) * 5 // 8), 2 * len(texts) + 2) if _coprime(s, len(texts)))
    mixed = [texts[i * stride % len(texts)] for i in range(len(texts))]
    stream = [token for document in mixed for token in _ids(document, tokenizer)]
    first = tokenizer.bos_token_id if tokenizer.encode("a")[:1] == [tokenizer.bos_token_id] else None
    found: list[list[int]] = []
    at = 0
    while at < len(stream):
        row = [] if first is None or stream[at] == first else [first]
        taken = length - len(row)
        found.append(row + [stream[(at + i) % len(stream)] for i in range(taken)])
        at += taken
    return found


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def _ids(document: Document, tokenizer: Tokenizer) -> list[int]:
    if document.kind != "chat" or not tokenizer.has_chat_template:
        return tokenizer.encode(document.text)
    _, *turns = TURN.split(document.text)
    messages: list[Message] = [
        {"role": role, "content": body.strip()} for role, body in zip(turns[::2], turns[1::2], strict=True)
    ]
    return tokenizer.chat_ids(messages, add_generation_prompt=False)
