"""Texts, or pairs of texts, as an encoder reads them: framed by the tokenizer's own special tokens, cut to a length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxinfer.errors import ContextLengthError, ModelFileError
from mlxinfer.tokenizer.files import mapped

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tokenizers


@dataclass(frozen=True, slots=True)
class Framed:
    """Token ids with the special tokens."""

    ids: list[int]
    types: list[int]
    """Of a pair: 0 for the first text's tokens, 1 for the second's."""
    truncated: bool


def frame(
    backend: tokenizers.Tokenizer,
    texts: Sequence[str | tuple[str, str]],
    *,
    max_tokens: int,
    truncate: bool,
    special_tokens: bool = True,
    bos: int | None = None,
) -> list[Framed]:
    """Frame each text, or pair of texts, in at most `max_tokens` tokens; other threads run meanwhile.

    With `truncate` a text that is too long loses its end, and of a pair the longer one does, until both are of one
    length, as in the tokenizers package and sentence-transformers. Without it that is a ContextLengthError which names
    the text's index. `bos` goes before everything; without `special_tokens` nothing is added.
    """
    parts = [text if isinstance(text, tuple) else (text,) for text in texts]
    try:
        # One call for all: it runs on several cores.
        encoded = iter(backend.encode_batch_fast([p for pair in parts for p in pair], add_special_tokens=False))
        framed: list[Framed] = []
        for index, pair in enumerate(parts):
            encodings = [next(encoded) for _ in pair]
            added = (bos is not None) + backend.num_special_tokens_to_add(len(pair) == 2) if special_tokens else 0
            cut = _shortened(encodings, max_tokens, added, index, truncate)
            whole = backend.post_process(*encodings, add_special_tokens=special_tokens)
            ids, types = list(whole.ids), list(whole.type_ids)
            if bos is not None and special_tokens:
                ids, types = [bos, *ids], [0, *types]
            framed.append(Framed(ids, types, cut))
        return framed
    except (ContextLengthError, ModelFileError):
        raise
    except BaseException as error:
        raise mapped(error, "the tokenizer fails to encode") from error


def _shortened(
    encodings: Sequence[tokenizers.Encoding], max_tokens: int, added: int, index: int, truncate: bool
) -> bool:
    """Cut a text, or pair of texts, so that it fits with the `added` tokens; whether anything was cut."""
    counts = [len(encoding.ids) for encoding in encodings]
    room = max_tokens - added
    if room < len(encodings):
        raise ModelFileError(f"the tokenizer's special tokens leave no room in {max_tokens} tokens")
    if sum(counts) <= room:
        return False
    if not truncate:
        raise ContextLengthError(
            f"text {index} has {sum(counts) + added} tokens and the model reads {max_tokens}; shorten it, or have it "
            "cut off with truncate",
            param="input",
        )
    for encoding, limit in zip(encodings, shares(counts, room), strict=True):
        encoding.truncate(limit)
    return True


def shares(counts: Sequence[int], room: int) -> list[int]:
    """How many tokens each of one or two texts keeps when both have `room` together."""
    if len(counts) == 1:
        return [min(counts[0], room)]
    first, second = counts
    half = room // 2
    if min(counts) <= half:
        return [first, room - first] if first <= second else [room - second, second]
    return [half, room - half] if first <= second else [room - half, half]
