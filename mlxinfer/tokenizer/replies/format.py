"""A model's way of replying, and the parser of one reply."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.tokenizer.replies.lark import Lark, Tool
from mlxinfer.tokenizer.replies.objects import BareCalls
from mlxinfer.tokenizer.replies.reading import WHITESPACE, Reader, Scan, markers
from mlxinfer.tokenizer.replies.writing import Writer
from mlxinfer.tokenizer.schemas import for_grammar
from mlxinfer.types import Grammar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlxinfer.tokenizer.replies.events import Part
    from mlxinfer.tokenizer.replies.syntax import CallSyntax

_GAP = "/[ \\t\\r\\n]{0,8}/"
"""White space after reasoning; without a limit a model may go on with it for ever."""


class ReplyParser:
    """Parses one reply, whose text arrives in pieces cut anywhere. Not thread-safe.

    However the text is cut, the parts are the same once adjacent ones of a kind are joined. Text is held back only
    while it may begin markup, white space while markup may follow it.
    """

    def __init__(self, script: Callable[[Reader, Writer], Scan[None]]) -> None:
        self._reader = Reader()
        self._writer = Writer()
        self._scan = script(self._reader, self._writer)
        next(self._scan)

    def feed(self, text: str) -> list[Part]:
        """The parts that became certain with this text."""
        assert not self._reader.closed, "the reply has ended"
        if text:
            self._reader.add(text)
            next(self._scan)
        return self._writer.take()

    def end(self, *, complete: bool) -> list[Part]:
        """The rest. `complete`: the model ended the reply itself; a reply that was cut off inside a call loses that
        call, and one that ends there by itself has it as text."""
        if not self._reader.closed:
            self._reader.close(complete=complete)
            for _ in self._scan:
                raise AssertionError("a scan waits for text after the end")
            self._writer.finish()
        return self._writer.take()


@dataclass(frozen=True)
class ThinkTags:
    """What stands around reasoning."""

    start: str
    end: str

    def is_open(self, prompt_tail: str) -> bool:
        return prompt_tail.rstrip(WHITESPACE).endswith(self.start)

    def is_closed(self, prompt_tail: str) -> bool:
        return prompt_tail.rstrip(WHITESPACE).endswith(self.end)


@dataclass(frozen=True)
class ReplyFormat:
    """How a model writes reasoning and tool calls; `reply_format` finds it."""

    name: str
    has_tools: bool
    """Whether the chat template shows tools to the model."""
    syntax: CallSyntax
    think: ThinkTags | None = None
    silent: tuple[str, ...] = ()
    """Markup that only frames text."""
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """Ids of the added tokens that the format's markup has, by their spelling."""
    markers: frozenset[str] = frozenset()
    """Special tokens that have to show in the text for the parser; a detokenizer leaves special tokens out
    otherwise."""

    @property
    def has_reasoning(self) -> bool:
        return self.think is not None

    def parser(
        self, *, prompt_tail: str = "", tools: Sequence[Mapping[str, Any]] = (), parse_tools: bool = True
    ) -> ReplyParser:
        """A parser of one reply.

        Args:
            prompt_tail: the end of the prompt, which may have opened the reasoning.
            tools: those of the request, as OpenAI has them. A model without tools in its template is only read for
            calls
                when there are some.
            parse_tools: False leaves calls in the text.
        """
        calls = parse_tools and (self.has_tools or bool(tools))
        return ReplyParser(lambda reader, writer: self._read(reader, writer, prompt_tail, tools, calls))

    def forced_calls(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> str:
        """An llguidance Lark grammar of replies that are one call of these tools, or with `parallel` one or more.

        Raises InvalidRequestError (tools) for no tools, a tool without a name, or what the markup can't say. Whether
        the schemas are any good is found when the grammar is compiled.
        """
        grammar = Lark(self.tokens)
        return grammar.grammar(self.syntax.calls(grammar, tools, parallel=parallel))

    def reasoning_prefix(self, prompt_tail: str) -> str | None:
        """Lark rules, the first named `reasoning`, for what may come before a constrained reply: put `reasoning` first
        in the start rule. None where this reply can't begin with reasoning."""
        if self.think is None or self.think.is_closed(prompt_tail):
            return None
        grammar = Lark(self.tokens, "reasoning")
        text = f"{grammar.text_until(self.think.end)} {_GAP}"
        if self.think.is_open(prompt_tail):
            return f"reasoning: {text}\n{grammar.rules()}\n"
        return f"reasoning: ({grammar.literal(self.think.start)} {text})?\n{grammar.rules()}\n"

    def constrained(self, grammar: Grammar, prompt_tail: str, *, reasons: bool = True) -> Grammar:
        """The grammar of the whole reply, when `grammar` is that of its text or calls: with `reasons`, reasoning may
        come first. A caller's own Lark grammar stays as it is; one of `forced_calls` is `calls_constrained`."""
        prefix = self.reasoning_prefix(prompt_tail) if reasons else None
        opening = self._text_opening(prompt_tail)
        if grammar.kind == "lark" or (prefix is None and not opening):
            return grammar
        start = " ".join(filter(None, ("reasoning" if prefix else "", opening, "body")))
        return Grammar("lark", f"start: {start}\n{_body(grammar)}\n{prefix or ''}")

    def calls_constrained(
        self, tools: Sequence[Mapping[str, Any]], prompt_tail: str, *, parallel: bool, reasons: bool = True
    ) -> Grammar:
        """`forced_calls`, and with `reasons` the reasoning that may come first."""
        calls = self.forced_calls(tools, parallel=parallel)
        prefix = self.reasoning_prefix(prompt_tail) if reasons else None
        return Grammar("lark", calls.replace("start: ", "start: reasoning ", 1) + prefix if prefix else calls)

    def _text_opening(self, prompt_tail: str) -> str:
        """The expression for markup that has to stand before text."""
        return ""

    def _read(
        self, reader: Reader, writer: Writer, prompt_tail: str, tools: Sequence[Tool], parse_tools: bool
    ) -> Scan[None]:
        think = self.think
        if think is not None and think.is_open(prompt_tail):
            writer.reasoning((yield from reader.space()))
            # Some write the tag again.
            yield from reader.accept(think.start)
            yield from _reason(reader, writer, think)
        bare = parse_tools and bool(tools) and isinstance(self.syntax, BareCalls)
        starts = (think.start,) if think else ()
        wanted = markers(*starts, *self.silent, *(self.syntax.openers if parse_tools else ()))
        writer.ends_bare = not parse_tools and not self.silent
        while True:
            if bare and not writer.begun:
                writer.text((yield from reader.space()))
                if (yield from reader.peek()) == "{":
                    bare = False
                    yield from self._call(reader, writer, tools, "")
            found = yield from reader.until(wanted, writer.text)
            if not found:
                return
            if found in self.silent:
                writer.turn()
            elif think is not None and found == think.start:
                # Reasoning comes first; further in, the text is about the tag.
                if writer.begun:
                    writer.text(found)
                else:
                    yield from _reason(reader, writer, think)
            else:
                bare = False
                yield from self._call(reader, writer, tools, found)

    def _call(self, reader: Reader, writer: Writer, tools: Sequence[Tool], opener: str) -> Scan[None]:
        """Read calls; what turns out to be none is text, unless the reply was cut off inside it."""
        reader.record(writer.release() + opener)
        before = writer.calls
        whole = yield from self.syntax.read(reader, writer, tools, opener)
        source = reader.recorded()
        if whole:
            if reader.is_cut:
                # The beginning of a marker.
                reader.discard()
            return
        # Without markup and a name it may as well be an answer in JSON.
        give_back(reader, writer, source, is_text=not opener and writer.calls == before)


def give_back(reader: Reader, writer: Writer, source: str, *, is_text: bool = False) -> None:
    """What began as a call is none: `source` is text, unless the reply was cut off inside it."""
    writer.drop_call()
    if is_text or not reader.is_cut:
        writer.text(source)
    else:
        reader.discard()


def _reason(reader: Reader, writer: Writer, think: ThinkTags) -> Scan[None]:
    if (yield from reader.until(markers(think.end), writer.reasoning)):
        writer.turn()


def _body(grammar: Grammar) -> str:
    """The rule `body`."""
    if grammar.kind == "json_schema":
        # Read and written again: nothing but one JSON value gets into the grammar.
        return f"body: %json {json.dumps(for_grammar(_loaded(grammar)))}"
    if grammar.kind == "json_object":
        return f"body: %json {json.dumps(for_grammar({'type': 'object'}))}"
    if grammar.kind == "choice":
        return "body: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in _loaded(grammar))
    pattern = re.sub(r"\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], grammar.text, flags=re.DOTALL)
    return "body: /" + pattern.replace("\n", "\\n") + "/"


def _loaded(grammar: Grammar) -> Any:
    try:
        return json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the {grammar.kind} grammar is not JSON: {error}", param="grammar") from None
