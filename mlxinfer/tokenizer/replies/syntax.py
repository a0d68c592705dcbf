"""How a model writes its tool calls: what begins one, how one is read, and the grammar of what it may write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxinfer.tokenizer.replies import lark
    from mlxinfer.tokenizer.replies.reading import Reader, Scan
    from mlxinfer.tokenizer.replies.writing import Writer

MAX_NAME = 256


class CallSyntax(ABC):
    """One way of writing calls. `openers` begin them; `tokens` are the special tokens inside that have to show."""

    openers: tuple[str, ...]
    tokens: tuple[str, ...] = ()

    @abstractmethod
    def read(self, reader: Reader, writer: Writer, tools: Sequence[lark.Tool], opener: str) -> Scan[bool]:
        """Read what follows `opener`; False when it is no call, or no further one. Whole calls are `finish`ed."""

    @abstractmethod
    def calls(self, grammar: lark.Lark, tools: Sequence[lark.Tool], *, parallel: bool) -> str:
        """The expression for a call of these tools, or with `parallel` for one or more."""


def finish(reader: Reader, writer: Writer) -> None:
    """The call is whole: what was read so far is never text."""
    writer.end_call()
    reader.record()


def is_name(value: object) -> bool:
    """Whether a value from a model can be a function's name."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or value != value.strip():
        return False
    return not any("\ud800" <= c <= "\udfff" or c < " " for c in value)
