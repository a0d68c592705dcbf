"""From texts to the token ids that a model reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxinfer.errors import ContextLengthError
from mlxinfer.formats.files import read_json_object
from mlxinfer.tokenizer.files import special_tokens
from mlxinfer.tokenizer.framing import Framed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mlxinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Framing:
    """Token ids that go around a text beside, or in place of, the tokenizer's own."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    special_tokens: bool = False
    """Whether the tokenizer adds its own as well."""


def eos_framing(tokenizer: Tokenizer, folder: Path) -> Framing:
    """The end-of-sequence token, if tokenizer_config.json asks for it (add_eos_token) and tokenizer.json has no step
    that adds it: transformers wraps such a step around it."""
    config = read_json_object(folder / "tokenizer_config.json") or {}
    name = special_tokens(config).get("eos_token")
    end = tokenizer.encode(name, add_special_tokens=False) if name and config.get("add_eos_token") is True else []
    added = len(end) == 1 and tokenizer.encode("a")[-1:] != end
    return Framing(after=tuple(end) if added else (), special_tokens=True)


def framed(
    tokenizer: Tokenizer,
    texts: Sequence[str | tuple[str, str]],
    around: Framing,
    *,
    max_tokens: int,
    truncate: bool,
) -> list[Framed]:
    """Texts, or pairs of them, each in at most `max_tokens` tokens, all counted. Raises as `Tokenizer.frame` does."""
    outside = len(around.before) + len(around.after)
    if outside >= max_tokens:
        raise ContextLengthError(
            f"{max_tokens} tokens are read here and the model's own prompt takes {outside}; raise context_length",
            param="context_length",
        )
    made = tokenizer.frame(
        texts, max_tokens=max_tokens - outside, truncate=truncate, special_tokens=around.special_tokens
    )
    if not outside:
        return made
    before, after = [0] * len(around.before), [0] * len(around.after)
    return [
        Framed([*around.before, *one.ids, *around.after], [*before, *one.types, *after], one.truncated) for one in made
    ]
