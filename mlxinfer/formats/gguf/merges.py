"""The merges of a BPE vocabulary: as the file lists them, or rebuilt from sentencepiece scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlxinfer.formats.gguf.fields import Fields

MAX_PIECE = 512
"""Characters of a piece whose splits are looked for; published vocabularies stay below 100."""
NORMAL, USER_DEFINED = 1, 4


def listed_merges(f: Fields, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """`tokenizer.ggml.merges` as pairs. Raises ModelFileError for one whose parts or result are no tokens."""
    merges = f.sequence("tokenizer.ggml.merges", str)
    if merges is None:
        raise f.fail("tokenizer.ggml.merges", "is missing: byte-level BPE cannot do without")
    pairs = []
    for merge in merges:
        # The first character may itself be a space.
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in ids or right not in ids or left + right not in ids:
            raise f.fail("tokenizer.ggml.merges", f"has {merge!r:.80}, whose parts or result are not in the vocabulary")
        pairs.append((left, right))
    return pairs


def merges_from_scores(ids: Mapping[str, int], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs in the order in which sentencepiece joins them: by the score of the result, the best first.

    sentencepiece joins the two neighbours whose union has the best score; a piece may come about in several ways, so
    every split into two pieces becomes a merge.
    """
    # Only pieces that text can turn into: control, byte and unused ones never come out of a merge.
    results = [(-scores[i], i, text) for text, i in ids.items() if types[i] == NORMAL and 1 < len(text) <= MAX_PIECE]
    results.sort()
    parts = {text for text, i in ids.items() if types[i] in (NORMAL, USER_DEFINED)}
    pairs: list[tuple[str, str]] = []
    for _, _, text in results:
        splits = [
            (left, right)
            for at in range(1, len(text))
            if (left := text[:at]) in parts and (right := text[at:]) in parts
        ]
        if len(splits) > 1:
            splits.sort(key=lambda s: (ids[s[0]], ids[s[1]]))
        pairs += splits
    return pairs
