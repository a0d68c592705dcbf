"""Where the messages of a rendered chat begin, as positions in its token ids."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from mlxinfer.errors import MlxinferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.tokenizer.tokenizer import Tokenizer

KEEP_LAST = 4
"""Boundaries of the latest messages that are of use: the next turn, a regenerated or an edited one."""
MIN_GAP = 16
"""Tokens between two boundaries at least: each costs a prompt chunk of its own."""

_CHAT = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})


def turn_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens that open a message in the model's chat template; empty where it has none of that kind.

    Found by rendering: what a chat of n messages has after the tokens it shares with one of n - 1.
    """
    found: set[int] = set()
    try:
        chats = [tokenizer.chat_ids(_CHAT[:n], add_generation_prompt=False) for n in (1, 2, 3)]
    except MlxinferError:
        # No template, or one that refuses such a chat.
        return frozenset()
    for shorter, longer in itertools.pairwise(chats):
        at = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
        if at < len(longer) and tokenizer.is_special(longer[at]):
            found.add(longer[at])
    return frozenset(found)


def message_starts(prompt_ids: Sequence[int], turns: frozenset[int]) -> tuple[int, ...]:
    """Positions where a message begins, rising: the first after the start, and the last few, not too close together."""
    last = len(prompt_ids) - 1
    starts = [i for i, token in enumerate(prompt_ids) if token in turns and 0 < i <= last]
    kept: list[int] = []
    for position in reversed(starts):
        if len(kept) < KEEP_LAST and (not kept or kept[-1] - position >= MIN_GAP):
            kept.append(position)
    if starts and kept and kept[-1] - starts[0] >= MIN_GAP and starts[0] >= MIN_GAP:
        kept.append(starts[0])
    return tuple(reversed(kept))
