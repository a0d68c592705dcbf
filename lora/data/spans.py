"""Where the assistant's parts stand in a rendered chat, exactly: found by rendering it again with marks in it.

A mark is a short string put inside a message's content. With the marks taken out again, the text must equal the plain
rendering, which proves that they changed nothing and shows where each message stands. An assistant's turn begins where
the prompt that inference would render before it ends, and ends with the token that closes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.lora.data.formats import RowError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from mlxinfer.lora.data.formats import Message

    Render = Callable[[Sequence[Message], bool], str]

_OPENER = re.compile(r"(<\W?think\w*\W?>|\[THINK\])\s*((</\w*think\w*>|\[/THINK\])\s*)?\Z")
"""What a generation prompt may end with though a turn of the history lacks it: an opened, or empty, reasoning part."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn in the text: [start, end) in characters, the closing token included."""

    message: int
    start: int
    end: int
    closed: bool
    """It ends with a token that stops generation."""


def assistant_turns(
    messages: Sequence[Message], render: Render, specials: Collection[str], stops: Collection[str]
) -> tuple[str, list[Turn]]:
    """The text of a chat and its assistant turns, in order.

    Args:
        render: the template's text for messages; the flag asks for the generation prompt.
        specials: spellings of the vocabulary's special tokens.
        stops: those that end generation.

    Raises RowError where a turn's place cannot be proven.
    """
    text = render(messages, False)
    marked = _Marked(messages, render, text)
    special = re.compile("|".join(re.escape(s) for s in sorted(specials, key=len, reverse=True)) or r"(?!)")
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start = _start(marked, index, render)
            end, closed = _end(marked, index, render, special, stops)
            if not start <= marked.place(index) <= end:
                raise RowError(f"messages[{index}]: its place in the chat template's text is not certain")
            turns.append(Turn(index, start, end, closed))
    _check_apart(turns, marked)
    return text, turns


class _Marked:
    """Messages with a mark in each that can take one, and where the marks stand in the text."""

    def __init__(self, messages: Sequence[Message], render: Render, text: str) -> None:
        self.text = text
        self._salt = next(s for s in map(str, range(10**6)) if f"Qz{s}x" not in text)
        self.pattern = re.compile(rf"Qz{self._salt}x(\d+)x")
        self.messages, self.rendered = self._search(list(messages), render)
        self._places = _places(self.pattern, self.rendered)

    def mark(self, index: int) -> str:
        return f"Qz{self._salt}x{index}x"

    def place(self, index: int) -> int:
        """The position in the plain text."""
        if index not in self._places:
            raise RowError(
                f"messages[{index}]: nothing of it can be found in the chat template's text; the template changes or "
                "leaves out what it says"
            )
        return self._places[index]

    def last_before(self, index: int) -> int | None:
        """The nearest earlier message with a mark."""
        return next((i for i in range(index - 1, -1, -1) if i in self._places), None)

    def between(self, start: int, end: int) -> set[int]:
        return {i for i, place in self._places.items() if start <= place < end}

    def after(self, text: str, index: int | None) -> str | None:
        """What stands after a message's mark in another marked rendering, without marks; None where it has no mark."""
        if index is None:
            return self.pattern.sub("", text)
        at = text.find(mark := self.mark(index))
        return None if at < 0 else self.pattern.sub("", text[at + len(mark) :])

    def _search(self, messages: list[Message], render: Render) -> tuple[list[Message], str]:
        """All first choices at once, which is nearly always right; else message by message."""
        first = [next(_variants(m, self.mark(i)), m) for i, m in enumerate(messages)]
        found = _try(first, render)
        if (
            found is not None
            and self.pattern.sub("", found) == self.text
            and all(self.mark(i) in found for i, m in enumerate(first) if m is not messages[i])
        ):
            return first, found
        chosen = list(messages)
        for index, message in enumerate(messages):
            for variant in _variants(message, self.mark(index)):
                found = _try([*chosen[:index], variant, *chosen[index + 1 :]], render)
                if found is not None and self.mark(index) in found and self.pattern.sub("", found) == self.text:
                    chosen[index] = variant
                    break
        return chosen, render(chosen, False)


def _try(messages: Sequence[Message], render: Render) -> str | None:
    try:
        return render(messages, False)
    except InvalidRequestError:  # a template that looks into the content
        return None


def _places(pattern: re.Pattern[str], text: str) -> dict[int, int]:
    """Of each mark its first place, in the text without marks."""
    places: dict[int, int] = {}
    removed = 0
    for match in pattern.finditer(text):
        places.setdefault(int(match[1]), match.start() - removed)
        removed += len(match[0])
    return places


def _variants(message: Message, mark: str) -> Iterator[Message]:
    """The message with the mark in it, in several places: templates cut, split and look at the ends of content."""
    for field in ("content", "reasoning_content"):
        text = message.get(field) or ""
        core = text.strip()
        lead = text.find(core)
        for at in dict.fromkeys((len(core) // 2, len(core) * 9 // 10, len(core) - 1, 1, 0)) if core else ():
            placed = f"{text[: lead + at]}{mark}{text[lead + at :]}"
            yield {**message, field: placed} | ({"thinking": placed} if field == "reasoning_content" else {})
        if field == "content" and (calls := message.get("tool_calls")):
            last: Mapping[str, Any] = calls[-1]
            name = last["function"]["name"]
            half = len(name) // 2
            function = {**last["function"], "name": f"{name[:half]}{mark}{name[half:]}"}
            yield {**message, "tool_calls": [*calls[:-1], {**last, "function": function}]}


def _start(marked: _Marked, index: int, render: Render) -> int:
    """Where the turn begins: what inference's prompt has after the last mark before it, found in the text."""
    anchor = marked.last_before(index)
    try:
        prompt = marked.after(render(marked.messages[:index], True), anchor)
    except InvalidRequestError as error:
        raise RowError(f"messages[{index}]: the chat template renders no prompt for this answer: {error}") from error
    if prompt is None:
        raise RowError(f"messages[{index}]: the prompt before it leaves out messages[{anchor}]")
    begin = 0 if anchor is None else marked.place(anchor)
    shared = _shared(prompt, marked.text[begin : marked.place(index)])
    if shared < len(prompt):
        # The history shows the turn without the reasoning that the prompt opens.
        opener = _OPENER.search(prompt)
        needed = opener.start() if opener else len(prompt.rstrip())
        if shared < needed:
            raise RowError(
                f"messages[{index}]: the chat template's text does not continue the prompt before it, which ends with "
                f"{prompt[-40:]!r}"
            )
        shared = needed
    return begin + shared


def _end(
    marked: _Marked, index: int, render: Render, special: re.Pattern[str], stops: Collection[str]
) -> tuple[int, bool]:
    """Where the turn ends, after the token that closes it, and whether there is one."""
    begin = marked.place(index)
    last = index == len(marked.messages) - 1
    try:
        alone = marked.after(marked.rendered if last else render(marked.messages[: index + 1], False), index)
    except InvalidRequestError as error:
        raise RowError(f"messages[{index}]: the chat template does not render up to this answer: {error}") from error
    if alone is None:
        raise RowError(f"messages[{index}]: the chat template leaves it out where it is the last message")
    inside = marked.text[begin:]
    if not inside.startswith(alone):
        return begin + _closed_otherwise(alone, inside, special, index), True
    closing = max((found.end() for found in special.finditer(alone)), default=None)
    if closing is not None and not alone[closing:].strip():
        return begin + closing, True
    # Some families write no closing token: the next role's is what stops the generation.
    follows = special.match(inside, len(alone))
    if follows is not None and follows[0] in stops:
        return begin + follows.end(), True
    return begin + len(alone), False


def _closed_otherwise(alone: str, inside: str, special: re.Pattern[str], index: int) -> int:
    """Families close the last turn and one of the history by different tokens: the end of the one in `inside`."""
    at = 0
    for ours, theirs in zip(special.finditer(alone), special.finditer(inside), strict=False):
        if alone[at : ours.start()] != inside[at : theirs.start()]:
            break
        if ours[0] != theirs[0]:
            return theirs.end()
        at = ours.end()
    raise RowError(
        f"messages[{index}]: the chat template writes this answer differently when more messages follow, so where it "
        "ends is not certain"
    )


def _check_apart(turns: Sequence[Turn], marked: _Marked) -> None:
    """No turn holds a part of another message."""
    before = 0
    for turn in turns:
        others = marked.between(turn.start, turn.end) - {turn.message}
        if turn.start < before or others:
            raise RowError(f"messages[{turn.message}]: its part of the text cannot be told from its neighbours'")
        before = turn.end


def _shared(a: str, b: str) -> int:
    """How many leading characters are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
