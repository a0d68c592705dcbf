"""Harmony, the format of gpt-oss: messages with a channel, a recipient and a body.

`<|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`: the channel
analysis is reasoning, final is text, commentary is text or, with a recipient, a call. The prompt ends after the role.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxinfer.tokenizer.replies.format import ReplyFormat, give_back
from mlxinfer.tokenizer.replies.json_text import json_value
from mlxinfer.tokenizer.replies.lark import Lark, Tool, functions_of, quoted
from mlxinfer.tokenizer.replies.reading import WHITESPACE, Reader, Scan, markers
from mlxinfer.tokenizer.replies.syntax import CallSyntax, finish, is_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlxinfer.tokenizer.replies.writing import Writer

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
TOKENS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)

_OUTSIDE = markers(START, CHANNEL, MESSAGE, END, CALL, RETURN)
_BODY_ENDS = markers(START, END, CALL, RETURN)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_TRAILING_END = re.compile(r"<\|(?:end|call|return)\|>$")
_PEOPLE = frozenset({"assistant", "user", "all"})


class HarmonyCalls(CallSyntax):
    """The body of a message to a function."""

    openers = ()
    tokens = TOKENS

    def read(self, reader: Reader, writer: Writer, tools: Sequence[Tool], opener: str) -> Scan[bool]:
        """`opener` is the function's name here."""
        yield from reader.space()
        following = yield from reader.peek()
        if not is_name(opener) or following not in ("{", "<", "") or (following == "" and reader.is_cut):
            return False
        writer.start_call(opener)
        if following == "{":
            if not (yield from json_value(reader, writer.arguments)):
                return False
        else:
            writer.arguments("{}")
        yield from reader.space()
        for ending in (CALL, END, RETURN):
            if (yield from reader.accept(ending)):
                break
        else:
            # The next message may follow at once; the reply may end.
            if (yield from reader.header(_OUTSIDE, 0, take=False))[1] == "" and not reader.ran_out:
                return False
        finish(reader, writer)
        return True

    def calls(self, grammar: Lark, tools: Sequence[Tool], *, parallel: bool) -> str:
        """One call, also with `parallel`: the model ends its reply after a call."""
        bodies = (
            f"{grammar.literal(f'{CHANNEL}commentary to=functions.')} {quoted(name)} "
            f"{grammar.literal(f' {CONSTRAIN}json{MESSAGE}')} {grammar.json(schema)}"
            for name, schema in functions_of(tools)
        )
        return grammar.any_of(bodies)


@dataclass(frozen=True)
class HarmonyFormat(ReplyFormat):
    """The whole reply is messages, so reading one is a loop of its own."""

    @property
    def has_reasoning(self) -> bool:
        return True

    def reasoning_prefix(self, prompt_tail: str) -> str | None:
        if _open_message(prompt_tail) is not None:
            return None
        grammar = Lark(self.tokens, "reasoning")
        opening = grammar.literal(f"{CHANNEL}analysis{MESSAGE}")
        text = grammar.text_until(f"{END}{START}assistant")
        return f"reasoning: ({opening} {text})?\n{grammar.rules()}\n"

    def _text_opening(self, prompt_tail: str) -> str:
        if _open_message(prompt_tail) is not None:
            return ""
        return Lark(self.tokens).literal(f"{CHANNEL}final{MESSAGE}")

    def _read(
        self, reader: Reader, writer: Writer, prompt_tail: str, tools: Sequence[Tool], parse_tools: bool
    ) -> Scan[None]:
        header = _open_message(prompt_tail)
        if header is not None:
            yield from self._body(reader, writer, header, parse_tools)
        while (yield from reader.peek()):
            reader.record(writer.release())
            header = yield from _header(reader)
            source = reader.recorded()
            if header is not None:
                yield from self._body(reader, writer, header, parse_tools, source)
            elif not (reader.is_cut and _OUTSIDE.pattern.search(source)):
                # An end without a message says nothing.
                writer.text(_TRAILING_END.sub("", source))

    def _body(self, reader: Reader, writer: Writer, header: str, parse_tools: bool, source: str = "") -> Scan[None]:
        """The body of one message, by its header."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient and recipient[1] not in _PEOPLE:
            if parse_tools:
                name = recipient[1].removeprefix("functions.")
                yield from self._message_call(reader, writer, name, source)
                return
            writer.text(source)
            writer.text((yield from _until_end(reader, writer.text)))
            return
        if channel and channel[1] == "analysis":
            writer.turn()
            yield from _until_end(reader, writer.reasoning)
            writer.turn()
            return
        if writer.begun:
            # Two messages to the user.
            writer.text("\n\n")
        yield from _until_end(reader, writer.text)

    def _message_call(self, reader: Reader, writer: Writer, name: str, source: str) -> Scan[None]:
        reader.record(source)
        whole = yield from self.syntax.read(reader, writer, (), name)
        source = reader.recorded()
        if not whole:
            give_back(reader, writer, source)


def _open_message(prompt_tail: str) -> str | None:
    """The header of a message that the prompt has begun and not ended; None when the reply begins one."""
    _, start, last = prompt_tail.rpartition(START)
    header, message, body = last.partition(MESSAGE)
    return header if start and message and not _BODY_ENDS.pattern.search(body) else None


def _header(reader: Reader) -> Scan[str | None]:
    """The header of the next message, read to its `<|message|>`; None for text that has none."""
    before, marker = yield from reader.header(_OUTSIDE)
    if marker in ("", END, CALL, RETURN):
        return None
    if marker == START:
        if before.strip(WHITESPACE):
            return None
        before, marker = yield from reader.header(_OUTSIDE)
        if marker not in (CHANNEL, MESSAGE):
            return None
    elif before.strip(WHITESPACE) and not _RECIPIENT.fullmatch(before.strip(WHITESPACE)):
        return None
    if marker == CHANNEL:
        rest, marker = yield from reader.header(markers(MESSAGE))
        before += CHANNEL + rest
    return before if marker else None


def _until_end(reader: Reader, emit: Callable[[str], None]) -> Scan[str]:
    """A body to its end. A `<|start|>` without an end before it begins the next message and stays."""
    end = yield from reader.until(_BODY_ENDS, emit, take=False)
    if end in ("", START):
        return ""
    yield from reader.accept(end)
    return end


def harmony_format(tokens: Mapping[str, int], special: frozenset[str]) -> HarmonyFormat:
    own = {t: i for t, i in tokens.items() if t in TOKENS}
    return HarmonyFormat("harmony", True, HarmonyCalls(), tokens=own, markers=special & frozenset(TOKENS))
