"""What is asked of the data, and what became of every row."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from mlxinfer.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlxinfer.lora.types import Example, Judged, Pair

Supervise = Literal["assistant", "last", "all"]
Overlong = Literal["cut", "drop", "error"]
BadRow = Literal["error", "drop"]
CompletionStyle = Literal["auto", "chat", "text"]
Kind = Literal["sft", "preference", "judged"]


@dataclass(frozen=True, slots=True)
class DataOptions:
    """How rows become tokens. Raises InvalidRequestError for a value that is none of the choices."""

    max_tokens: int = 2048
    """Tokens of a row at most."""
    supervise: Supervise = "assistant"
    """Every assistant turn, the last one only, or every token but the first. Plain text is always learnt whole."""
    overlong: Overlong = "cut"
    """A row with more than `max_tokens`: its end is cut off, it is dropped, or it is an error."""
    bad_rows: BadRow = "error"
    """A row that cannot be used ends the reading, with all such rows named, or is dropped and counted."""
    completion_style: CompletionStyle = "auto"
    """Whether prompts and completions that are strings go through the chat template; auto: where there is one."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as `enable_thinking`."""

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise InvalidRequestError(f"max_tokens is {self.max_tokens}; a row needs at least 2", param="max_tokens")
        for name, choices in (
            ("supervise", get_args(Supervise)),
            ("overlong", get_args(Overlong)),
            ("bad_rows", get_args(BadRow)),
            ("completion_style", get_args(CompletionStyle)),
        ):
            if (value := getattr(self, name)) not in choices:
                raise InvalidRequestError(f"{name} is {value!r}; it is one of {', '.join(choices)}", param=name)


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
