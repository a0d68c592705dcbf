"""What is asked of the data, and what became of every row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping  # noqa: TC003 (the options' types are read when the program runs)
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.options import options_of

if TYPE_CHECKING:
    from mlxinfer.lora.types import Example, Judged, Pair

Supervise = Literal["assistant", "last", "all"]
Overlong = Literal["cut", "drop", "error"]
BadRow = Literal["error", "drop"]
CompletionStyle = Literal["auto", "chat", "text"]
Kind = Literal["sft", "preference", "judged"]
RESERVED = ("self", "messages", "tools", "add_generation_prompt")
"""What a chat template is given anyway."""


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How rows become tokens. Raises InvalidRequestError for a value that is none of the choices."""

    max_tokens: Annotated[int, "Tokens of a row at most."] = 2048
    supervise: Annotated[
        Supervise, "Every assistant turn, the last one, or every token; plain text is learnt whole."
    ] = "assistant"
    overlong: Annotated[Overlong, "A row above max_tokens: its end is cut off, it is dropped, or it is an error."] = (
        "cut"
    )
    bad_rows: Annotated[BadRow, "A row that cannot be used ends the reading, or is dropped and counted."] = "error"
    completion_style: Annotated[
        CompletionStyle,
        "Whether prompts and completions as strings go through the chat template; auto: if there is one.",
    ] = "auto"
    template_kwargs: Annotated[Mapping[str, Any], "Variables for the chat template, such as enable_thinking."] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        for name, option in options_of(DataOptions).items():
            option.check(getattr(self, name))
        if self.max_tokens < 2:
            raise InvalidRequestError(f"max_tokens is {self.max_tokens}; a row needs at least 2", param="max_tokens")
        for name in self.template_kwargs:
            if not isinstance(name, str) or name in RESERVED:
                message = f"template_kwargs has {name!r:.80}; names are text, and none of {', '.join(RESERVED)}"
                raise InvalidRequestError(message, param="template_kwargs")
        try:
            # They are written into the adapter's config when all is done.
            json.dumps(dict(self.template_kwargs))
        except (TypeError, ValueError, RecursionError) as error:
            message = f"template_kwargs holds what JSON doesn't: {error}"
            raise InvalidRequestError(message, param="template_kwargs") from error


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that isn't trained on."""

    where: str
    """"file:line"."""
    reason: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows as tokens, all of one kind, in the order of the files. `rows` = `trained` + `truncated` + dropped ones."""

    kind: Kind
    items: tuple[Example | Pair | Judged, ...]
    rows: int
    """Rows that were read, blank lines included."""
    truncated: int
    """Items that lost their end."""
    dropped: tuple[Dropped, ...]
    formats: Mapping[str, int] = field(default_factory=Counter)
    """Rows of each detected format."""
    lost_reasoning: int = 0
    """Assistant turns whose reasoning the chat template leaves out, so that it cannot be learnt."""

    @property
    def trained(self) -> int:
        """Items that are trained on whole."""
        return len(self.items) - self.truncated

    def __len__(self) -> int:
        return len(self.items)

    def summary(self) -> str:
        """One line of counts for the log."""
        formats = ", ".join(f"{count:,} {name}" for name, count in self.formats.items())
        text = (
            f"{self.rows:,} rows ({formats or 'none'}): {self.trained:,} trained, {self.truncated:,} truncated, "
            f"{len(self.dropped):,} dropped"
        )
        if self.lost_reasoning:
            text += f"; the chat template leaves out the reasoning of {self.lost_reasoning:,} turns"
        return text
