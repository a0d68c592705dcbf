"""Limits of tokenizer files and of the texts given to them, looked at before the Rust side allocates anything.

A tokenizer.json may hold steps that multiply text (six times "replace every character by a hundred" is 10^12), and the
Rust side aborts the process when memory runs out. So each step's growth is bounded from its own strings, and the
product is limited; a text is limited so that text times growth stays small.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from mlxinfer.errors import ContextLengthError, ModelFileError

MAX_STEP_TEXT = 64
"""Characters a normalizer's, pre-tokenizer's or decoder's step may write."""
MAX_ENCODE_GROWTH = 1024
MAX_DECODE_GROWTH = 64
MAX_TEMPLATE_PIECES = 64
MAX_DEPTH = 32
MAX_NORMALIZED_BYTES = 64 << 20
BYTES_PER_TOKEN = 64
"""A text with more bytes than this per token of the context cannot fit, unless the vocabulary has longer entries."""
MAX_BYTES_PER_TOKEN = 1024
"""A vocabulary with one absurd entry does not lift the limit for all text."""
SLACK_BYTES = 4096

_GROWTH = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 11,
    "NFKD": 11,
    "Lowercase": 3,
    "BertNormalizer": 4,
    "ByteLevel": 2,
    "Metaspace": 4,
}
"""UTF-8 bytes that one byte may become, by the step's type."""
_LISTS = ("normalizers", "pretokenizers", "decoders", "processors")
_WRITTEN = ("content", "prepend", "replacement", "prefix", "suffix", "pad_token", "word_delimiter_token")


def check_text(text_bytes: int, max_tokens: int | None, longest_token: int, growth: int) -> None:
    """Raise ContextLengthError when `text_bytes` of UTF-8 cannot be `max_tokens` tokens, or would take too much memory.

    Generous on purpose: at least BYTES_PER_TOKEN for each token. A normalizer that shrinks text further (by dropping
    most of it) is not made allowance for.
    """
    if max_tokens is not None:
        limit = max_text_bytes(max_tokens, longest_token)
        if text_bytes > limit:
            raise ContextLengthError(
                f"the prompt has {text_bytes:,} bytes, which cannot fit a context of {max_tokens} tokens (at most "
                f"{limit:,} bytes); shorten the prompt",
                param="prompt",
            )
    if text_bytes * growth > MAX_NORMALIZED_BYTES:
        raise ContextLengthError(
            f"the text has {text_bytes:,} bytes; this tokenizer takes at most {MAX_NORMALIZED_BYTES // growth:,}",
            param="prompt",
        )


def max_text_bytes(max_tokens: int, longest_token: int) -> int:
    """The most UTF-8 bytes that are tried against a context of `max_tokens`."""
    return max_tokens * max(BYTES_PER_TOKEN, min(longest_token, MAX_BYTES_PER_TOKEN)) + SLACK_BYTES


def check_steps(parsed: Mapping[str, Any], where: str) -> int:
    """How many bytes one byte of text may become on its way to the model. Raises ModelFileError beyond the limits."""
    encode = _growth(parsed.get("normalizer"), where, 0) * _growth(parsed.get("pre_tokenizer"), where, 0)
    if encode > MAX_ENCODE_GROWTH:
        raise ModelFileError(f"{where}: its normalizer may multiply text by {encode:,}; at most {MAX_ENCODE_GROWTH}")
    decode = _growth(parsed.get("decoder"), where, 0, decoding=True)
    if decode > MAX_DECODE_GROWTH:
        raise ModelFileError(f"{where}: its decoder may multiply text by {decode:,}; at most {MAX_DECODE_GROWTH}")
    if (copies := _copies(parsed.get("post_processor"), where, 0)) > 2:
        raise ModelFileError(f"{where}: its post_processor repeats the text {copies} times; at most 2")
    return encode


def _growth(step: Any, where: str, depth: int, *, decoding: bool = False) -> int:
    if depth > MAX_DEPTH:
        raise ModelFileError(f"{where}: its steps are nested more than {MAX_DEPTH} deep")
    if not isinstance(step, Mapping):
        return 1
    # By the fields and not by the type: old files have no type, and the Rust side guesses it from the fields.
    for name in _WRITTEN:
        text = step.get(name)
        if isinstance(text, str) and len(text) > MAX_STEP_TEXT:
            raise ModelFileError(f"{where}: a step writes {len(text):,} characters; at most {MAX_STEP_TEXT}")
    growth = 1 if decoding else _GROWTH.get(str(step.get("type")), 1)
    if isinstance(content := step.get("content"), str) and "pattern" in step:
        growth *= _replacement(step["pattern"], content)
    if isinstance(text := step.get("prepend"), str):
        growth *= 1 + len(text.encode(errors="replace"))
    if (charsmap := step.get("precompiled_charsmap")) is not None:
        growth *= _charsmap(charsmap, where)
    for name in _LISTS:
        for child in step[name] if isinstance(step.get(name), list) else ():
            growth *= _growth(child, where, depth + 1, decoding=decoding)
            if growth > 2**64:
                return growth
    return growth


def _replacement(pattern: Any, content: str) -> int:
    size = len(content.encode(errors="replace"))
    text = pattern.get("String") if isinstance(pattern, Mapping) else pattern
    if isinstance(text, str) and text:
        return max(1, -(-size // len(text.encode(errors="replace"))))
    return size + 1  # a regular expression may match nothing, at every place


def _charsmap(value: Any, where: str) -> int:
    """SentencePiece's table: a length, a trie of that length, then the texts it maps to, each ended by a zero."""
    try:
        data = base64.b64decode(value) if isinstance(value, str) else bytes(value)
    except (binascii.Error, ValueError, TypeError) as error:
        raise ModelFileError(f"{where}: its precompiled_charsmap cannot be read: {error}") from error
    start = 4 + int.from_bytes(data[:4], "little")
    longest = max(map(len, data[start:].split(b"\0")))
    if longest > MAX_STEP_TEXT:
        raise ModelFileError(f"{where}: its precompiled_charsmap writes {longest:,} bytes; at most {MAX_STEP_TEXT}")
    return max(1, -(-longest // 3))  # what becomes long is a character of three bytes or more


def _copies(step: Any, where: str, depth: int) -> int:
    """How often a post-processor repeats the text."""
    if depth > MAX_DEPTH:
        raise ModelFileError(f"{where}: its steps are nested more than {MAX_DEPTH} deep")
    if not isinstance(step, Mapping):
        return 1
    copies = 1
    single = step.get("single")
    if isinstance(single, list):
        if len(single) > MAX_TEMPLATE_PIECES:
            raise ModelFileError(f"{where}: its post_processor adds {len(single):,} pieces; at most 64")
        copies = max(1, sum(isinstance(piece, Mapping) and "Sequence" in piece for piece in single))
    specials = step.get("special_tokens")
    for special in specials.values() if isinstance(specials, Mapping) else ():
        ids = special.get("ids") if isinstance(special, Mapping) else None
        if isinstance(ids, list) and len(ids) > MAX_TEMPLATE_PIECES:
            raise ModelFileError(f"{where}: its post_processor adds {len(ids):,} tokens at once; at most 64")
    children = step.get("processors")
    for child in children if isinstance(children, list) else ():
        copies *= _copies(child, where, depth + 1)
        if copies > 2:
            break
    return copies
