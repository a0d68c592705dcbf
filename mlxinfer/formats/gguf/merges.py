"""The merges of a BPE vocabulary: as the file lists them, or rebuilt from sentencepiece scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mlxinfer.formats.gguf.fields import Fields

MAX_PIECE = 512
"""Characters of a piece whose splits are looked for; published vocabularies stay below 100."""
MAX_MERGED = 2**25
"""Characters of all merges that are made up; Gemma 3, which has many, takes a tenth of it."""
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


def merges_from_scores(
    ids: Mapping[str, int], types: Sequence[int], scores: Sequence[float], where: str
) -> list[tuple[str, str]]:
    """Pairs in the order in which sentencepiece joins them: by the score of the result, the best first.

    sentencepiece joins the two neighbours whose union has the best score; a piece may come about in several ways, so
    every split into two pieces becomes a merge. Raises ModelFileError as `every_split` does.
    """
    # Only pieces that text can turn into: control, byte and unused ones never come out of a merge.
    results = [(-scores[i], i, text) for text, i in ids.items() if types[i] == NORMAL and 1 < len(text) <= MAX_PIECE]
    results.sort()
    parts = {text for text, i in ids.items() if types[i] in (NORMAL, USER_DEFINED)}
    return every_split((text for _, _, text in results), {text: ids[text] for text in parts}, where)


def every_split(texts: Iterable[str], parts: Mapping[str, int], where: str) -> list[tuple[str, str]]:
    """Every way in which two of `parts` (to their ids) make a text, for one text after the other, by the parts' ids.

    Raises ModelFileError, which begins with `where`, when that is far more than a vocabulary has: runs of one letter
    have as many ways as the square of their number.
    """
    pairs: list[tuple[str, str]] = []
    left_over = MAX_MERGED
    for text in texts:
        splits = [
            (left, right)
            for at in range(1, len(text))
            if (left := text[:at]) in parts and (right := text[at:]) in parts
        ]
        splits.sort(key=lambda pair: (parts[pair[0]], parts[pair[1]]))
        left_over -= len(text) * len(splits)
        if left_over < 0:
            raise ModelFileError(
                f"{where}: its tokens split into others in too many ways, {text!r:.40} in {len(splits)}"
            )
        pairs += splits
    return pairs
