"""Pieces of llguidance's Lark grammars. Names and schemas come from strangers: nothing of theirs gets in unquoted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.tokenizer.schemas import for_grammar

Tool = Mapping[str, Any]


class Lark:
    """A grammar being written. Expressions are strings; `rule` gives one a name.

    Args:
        tokens: ids of the vocabulary's added tokens by their spelling. A marker that is such a token is matched as that
            token, for llguidance never matches its spelling.
    """

    def __init__(self, tokens: Mapping[str, int], prefix: str = "r") -> None:
        self._tokens = tokens
        self._prefix = prefix
        self._rules: list[str] = []
        split = "|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True) if t)
        self._split = re.compile(f"({split})") if split else None

    def literal(self, text: str) -> str:
        """Exactly this text."""
        pieces = self._split.split(text) if self._split else [text]
        return " ".join(self._token(p) if p in self._tokens else quoted(p) for p in pieces if p)

    def markup(self, text: str) -> str:
        """This text, with or without its line breaks: templates of one format differ in them."""
        lines = (self.literal(line) for line in text.split("\n"))
        return " /\\n?/ ".join(lines).strip()

    def _token(self, text: str) -> str:
        return f"<[{self._tokens[text]}]>"

    def rule(self, body: str, attributes: str = "") -> str:
        name = self.next_name()
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def next_name(self, later: int = 0) -> str:
        """The name of the next rule, or of one `later`; for rules that name themselves."""
        return f"{self._prefix}_{len(self._rules) + later}"

    def any_of(self, bodies: Iterable[str]) -> str:
        return self.rule(" | ".join(f"({b})" for b in bodies))

    def json(self, schema: Any) -> str:
        """A JSON value of this schema."""
        return self.rule(f"%json {json.dumps(for_grammar(schema))}")

    def text_until(self, closing: str, text: str = "(?s:.*)") -> str:
        """Any text (of this pattern) without `closing`, then `closing`."""
        pieces = [p for p in self._split.split(closing) if p] if self._split else [closing]
        if pieces[0] in self._tokens:
            name = self.rule(f"/{text}/ {self._token(pieces[0])}")
        else:
            name = self.rule(f"/{text}/", f"[suffix={quoted(pieces[0])}]")
        return f"{name} {self.literal(''.join(pieces[1:]))}".rstrip()

    def repeated(self, call: str, between: str, *, many: bool) -> str:
        """One `call`, or with `many` one or more of them."""
        name = self.rule(call)
        return f"{name} ({between} {name})*" if many else name

    def rules(self) -> str:
        return "\n".join(self._rules)

    def grammar(self, start: str) -> str:
        return f"start: {start}\n{self.rules()}\n"


def quoted(text: str) -> str:
    """A Lark string of exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def function_of(tool: Tool) -> tuple[str, dict[str, Any]]:
    """(name, schema of the arguments object) of a tool. Raises InvalidRequestError for one without a name, or whose
    arguments can't be an object."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise InvalidRequestError("each tool needs function.name, a string that isn't empty", param="tools")
    schema = function.get("parameters")
    if not isinstance(schema, Mapping) or not schema:
        return name, {"type": "object"}
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequestError(
            f"the parameters of the tool {name!r:.80} have the type {kind!r:.80}; arguments are an object",
            param="tools",
        )
    return name, {**schema, "type": "object"}


def functions_of(tools: Sequence[Tool]) -> list[tuple[str, dict[str, Any]]]:
    """All (name, schema). Raises InvalidRequestError when there are none."""
    if not tools:
        raise InvalidRequestError("a call is required, but there are no tools to call", param="tools")
    return [function_of(tool) for tool in tools]
