"""Reading a reply in tests."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

from mlxinfer.tokenizer.replies import ReasoningPart, TextPart, ToolCallArguments, ToolCallEnd, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlxinfer.tokenizer.replies import Part, ReplyFormat


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    """`text` cut at these positions."""
    at = [0, *sorted(c for c in set(cuts) if 0 < c < len(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(at)]


def parse(
    form: ReplyFormat, text: str | Sequence[str], *, complete: bool = True, merge: bool = True, **options: Any
) -> list[Part]:
    """The parts of a reply, adjacent ones of a kind joined."""
    parser = form.parser(**options)
    parts: list[Part] = []
    for piece in [text] if isinstance(text, str) else text:
        parts += parser.feed(piece)
    parts += parser.end(complete=complete)
    assert parser.end(complete=complete) == []
    return merged(parts) if merge else parts


def merged(parts: Sequence[Part]) -> list[Part]:
    out: list[Part] = []
    for (kind, index), group in itertools.groupby(parts, lambda p: (type(p), getattr(p, "index", None))):
        same = list(group)
        if kind is TextPart or kind is ReasoningPart:
            out.append(kind("".join(p.text for p in same)))
        elif kind is ToolCallArguments:
            out.append(ToolCallArguments(index, "".join(p.text for p in same)))
        else:
            out += same
    return out


def summary(parts: Sequence[Part]) -> list[Any]:
    """Parts as they are easily compared: text as a string, reasoning as ("reasoning", text), a whole call as (name,
    arguments), a void one as ("void", name). Checks that indices count up and whole arguments are objects."""
    out: list[Any] = []
    names: list[str] = []
    arguments = ""
    ended: set[int] = set()
    for part in merged(parts):
        if isinstance(part, TextPart):
            out.append(part.text)
        elif isinstance(part, ReasoningPart):
            out.append(("reasoning", part.text))
        elif isinstance(part, ToolCallStart):
            assert part.index == len(names)
            names.append(part.name)
            arguments = ""
            out.append(("void", part.name))
        elif isinstance(part, ToolCallArguments):
            assert part.index == len(names) - 1
            arguments += part.text
        else:
            assert isinstance(part, ToolCallEnd)
            assert part.index == len(names) - 1
            assert part.index not in ended
            ended.add(part.index)
            value = json.loads(arguments)
            assert isinstance(value, dict)
            assert out[-1] == ("void", names[-1])
            out[-1] = (names[-1], value)
    return out
