"""Judged answers beside each other's prompts: what KTO measures its baseline on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.types import Example

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.lora.types import Judged


def mismatched(judged: Sequence[Judged], max_tokens: int | None = None) -> list[Example]:
    """Each prompt with the next row's answer, the last with the first's: what KTO measures its baseline on.

    A prompt ends where supervision begins; what is made is cut to `max_tokens`, as rows are. Raises InvalidRequestError
    for fewer than two rows, and for one of which nothing is supervised.
    """
    if len(judged) < 2:
        raise InvalidRequestError(f"KTO needs at least two rows in a micro-batch to mismatch; it has {len(judged)}")
    cuts = [_answer_start(row.example) for row in judged]
    made: list[Example] = []
    for i, row in enumerate(judged):
        j = (i + 1) % len(judged)
        prompt, other = row.example, judged[j].example
        made.append(
            Example(
                token_ids=(prompt.token_ids[: cuts[i]] + other.token_ids[cuts[j] :])[:max_tokens],
                supervised=((False,) * cuts[i] + other.supervised[cuts[j] :])[:max_tokens],
                where=prompt.where,
            )
        )
    return made


def _answer_start(example: Example) -> int:
    if True not in example.supervised:
        raise InvalidRequestError(f"{example.where}: no token is supervised, so there is no answer")
    return example.supervised.index(True)
