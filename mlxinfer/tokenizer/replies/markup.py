"""Grammars of calls that aren't JSON: each parameter by itself, its value raw text or JSON by its own schema."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxinfer.errors import InvalidRequestError
from mlxinfer.tokenizer.replies.lark import Lark, Tool, functions_of, quoted

_WRITABLE = re.compile(r"[^\s<>\"'&={}\[\]():,|]+")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_FREE_KEY = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"

Value = Callable[[Lark, Any, str], str]
"""(grammar, a parameter's schema, what closes it) → the expression for its value and what closes it."""


@dataclass(frozen=True)
class Tags:
    """A call as tags. Each pair or triple is what stands around name, key and value."""

    call: tuple[str, str, str]
    parameter: tuple[str, str, str]
    section: tuple[str, str] = ("", "")
    gap: str = '"\\n"'
    """The expression between two calls."""
    numbered: str = ""
    """What follows the call's number, where it has one after what stands between name and parameters."""
    typed: bool = False
    """Kimi K3: `{type}` before the value is the JSON type of the value."""

    def __call__(self, grammar: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        call = grammar.any_of(self._call(grammar, name, schema) for name, schema in functions_of(tools))
        calls = grammar.repeated(call, self.gap, many=parallel)
        return _joined(grammar.markup(self.section[0]), calls, grammar.markup(self.section[1]))

    def _call(self, grammar: Lark, name: str, schema: Mapping[str, Any]) -> str:
        before, between, after = self.call
        parameters = [
            expression if needed else f"({expression})?"
            for expression, needed in ((self._parameter(grammar, k, s), r) for k, s, r in parameters_of(name, schema))
        ]
        if "properties" not in schema:
            before_key, between_key, closing = self._around("string")
            free = _joined(
                grammar.markup(before_key), _FREE_KEY, grammar.markup(between_key), text_value(grammar, closing)
            )
            parameters = [f"({free})*"]
        return _joined(
            grammar.markup(before),
            quoted(writable(name)),
            grammar.markup(between),
            f"/[0-9]{{1,3}}/ {grammar.markup(self.numbered)}" if self.numbered else "",
            *parameters,
            grammar.markup(after),
        )

    def _parameter(self, grammar: Lark, key: str, schema: Any) -> str:
        before, between, closing = self._around(json_type(schema))
        value = raw_value(grammar, schema, closing)
        return _joined(grammar.markup(before), quoted(writable(key)), grammar.markup(between), value)

    def _around(self, kind: str) -> tuple[str, str, str]:
        before, between, closing = self.parameter
        return before, between.replace("{type}", kind) if self.typed else between, closing


def _joined(*pieces: str) -> str:
    return " ".join(filter(None, pieces))


def writable(name: str) -> str:
    """A name that tags can hold. Raises InvalidRequestError for one that would end them."""
    if not _WRITABLE.fullmatch(name):
        raise InvalidRequestError(
            f"this model can't write the name {name!r:.80} in a call; use letters, digits, _ and -", param="tools"
        )
    return name


def identifier(name: str) -> str:
    """A name that Python-like calls can hold. Raises InvalidRequestError for another."""
    if not _IDENTIFIER.fullmatch(name):
        raise InvalidRequestError(
            f"this model can't write the name {name!r:.80} in a call; use letters, digits and _", param="tools"
        )
    return name


def parameters_of(name: str, schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """(key, its schema, whether it is required) of a tool's parameters; definitions go along with each."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise InvalidRequestError(f"the parameters of the tool {name!r:.80} are no JSON schema", param="tools")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found: list[tuple[str, Any, bool]] = []
    for key, own in properties.items():
        whole = {**shared, **resolved(own, schema)} if isinstance(own, Mapping) else own
        if own is not False:
            found.append((str(key), whole, key in required))
    return found


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that is only a reference to a definition, replaced by it, so that its type shows."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and (match := re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", reference)):
        definitions = root.get(match[1])
        target = definitions.get(match[2]) if isinstance(definitions, Mapping) else None
        if isinstance(target, Mapping):
            return {**target, **{k: v for k, v in schema.items() if k != "$ref"}}
    return schema


def json_type(schema: Any) -> str:
    """The JSON type of a schema's values; "string" where one may be any text."""
    kinds = kinds_of(schema) if isinstance(schema, Mapping) else []
    if not kinds or "string" in kinds:
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        is_number = isinstance(choices, list) and choices and all(isinstance(c, int | float) for c in choices)
        return "number" if is_number and not kinds else "string"
    kind = next((k for k in ("object", "array") if k in kinds), kinds[0])
    return "number" if kind == "integer" else kind


def kinds_of(schema: Mapping[str, Any]) -> list[str]:
    """The JSON types that a schema names, itself or in its alternatives; null left out when there are others."""
    kind = schema.get("type")
    named = list(kind) if isinstance(kind, list) else [kind]
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(choices, list):
            named += [c.get("type") for c in choices if isinstance(c, Mapping)]
    kinds = sorted({k for k in named if isinstance(k, str)})
    return [k for k in kinds if k != "null"] or kinds


def _choices(schema: Any) -> list[str] | None:
    """The strings that a schema allows, when they are few."""
    if not isinstance(schema, Mapping):
        return None
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
        return choices
    return None


def raw_value(grammar: Lark, schema: Any, closing: str) -> str:
    """A value between tags, and the closing tag: strings are any text (pattern and length don't count), the rest
    JSON."""
    if (choices := _choices(schema)) and not any(closing.strip() in c for c in choices):
        return _joined(grammar.any_of(quoted(c) for c in choices), grammar.markup(closing))
    if json_type(schema) == "string":
        return text_value(grammar, closing)
    return _joined(grammar.json(schema), grammar.markup(closing))


def text_value(grammar: Lark, closing: str) -> str:
    """Any text, and the closing tag; a line break before the tag is the text's."""
    tag, line_break, _ = closing.strip("\n").partition("\n")
    assert not line_break
    return _joined(grammar.text_until(tag), grammar.markup("\n"))


def separated(grammar: Lark, members: Sequence[tuple[str, bool]], comma: str) -> str:
    """Members in their order with commas between, those that aren't required left out at will."""
    ordered = [m for m, needed in members if needed]
    optional = [m for m, needed in members if not needed]
    tail = '""'
    starts = [tail]
    for member in reversed(optional):
        starts.append(_joined(member, tail))
        tail = grammar.rule(f"({comma} {member})? {tail}")
    if ordered:
        return _joined(f" {comma} ".join(ordered), tail)
    return grammar.any_of(starts)


def _members(grammar: Lark, schema: Mapping[str, Any], members: list[tuple[str, bool]], comma: str, free: str) -> str:
    """A call's arguments: those the schema names, or any number of `free` ones where it names none."""
    if "properties" in schema:
        return separated(grammar, members, comma)
    return f"({free} ({comma} {free})*)?"


def python_calls(grammar: Lark, tools: Sequence[Tool], parallel: bool) -> str:
    """`<|tool_call_start|>[name(key=value, …), …]<|tool_call_end|>`; values are JSON."""
    bodies: list[str] = []
    for name, schema in functions_of(tools):
        members = [
            (f"{quoted(identifier(key) + '=')} {grammar.json(own)}", needed)
            for key, own, needed in parameters_of(name, schema)
        ]
        inner = _members(grammar, schema, members, '", "', f'{_FREE_KEY} "=" {grammar.json({})}')
        bodies.append(f"{quoted(identifier(name) + '(')} {inner} {quoted(')')}")
    calls = grammar.repeated(grammar.any_of(bodies), '", "', many=parallel)
    return _joined(grammar.literal("<|tool_call_start|>["), calls, grammar.literal("]<|tool_call_end|>"))


@dataclass(frozen=True)
class GemmaCalls:
    """`call:name{key:value,…}`, strings between marks of their own; inside lists and objects any value is allowed."""

    opener: str
    closer: str
    mark: str
    nested: bool
    """Whether lists and objects can be written and read back."""

    def __call__(self, grammar: Lark, tools: Sequence[Tool], parallel: bool) -> str:
        anything = self._anything(grammar)
        bodies: list[str] = []
        for name, schema in functions_of(tools):
            members = [
                (f"{quoted(identifier(key) + ':')} {self._value(grammar, key, own, anything)}", needed)
                for key, own, needed in parameters_of(name, schema)
            ]
            inner = _members(grammar, schema, members, '","', f'{_FREE_KEY} ":" {anything}')
            bodies.append(f"{quoted('call:' + writable(name) + '{')} {inner} {quoted('}')}")
        call = _joined(grammar.literal(self.opener), grammar.any_of(bodies), grammar.literal(self.closer))
        return grammar.repeated(call, "", many=parallel)

    def _string(self, grammar: Lark) -> str:
        # The parser of those that don't nest ends a call at its first brace.
        text = "(?s:.*)" if self.nested else "[^}]*"
        return _joined(grammar.literal(self.mark), grammar.text_until(self.mark, text))

    def _anything(self, grammar: Lark) -> str:
        scalar = grammar.json({"type": ["number", "boolean", "null"]})
        plain = grammar.any_of((self._string(grammar), scalar))
        if not self.nested:
            return plain
        # Two rules that name each other: the second is the next one to be written.
        name = grammar.next_name(1)
        pair = grammar.rule(f'{_FREE_KEY} ":" {name}')
        written = grammar.any_of((plain, f'"[" ({name} ("," {name})*)? "]"', f'"{{" ({pair} ("," {pair})*)? "}}"'))
        assert written == name
        return written

    def _value(self, grammar: Lark, key: str, schema: Any, anything: str) -> str:
        if choices := _choices(schema):
            return grammar.any_of(grammar.literal(f"{self.mark}{c}{self.mark}") for c in choices)
        kind = json_type(schema)
        if kind in ("object", "array"):
            if not self.nested:
                raise InvalidRequestError(
                    f"this model can't write an {kind} in a call, which the parameter {key!r:.80} is", param="tools"
                )
            start, end = ("{", "}") if kind == "object" else ("[", "]")
            item = f'{_FREE_KEY} ":" {anything}' if kind == "object" else anything
            return f'"{start}" ({item} ("," {item})*)? "{end}"'
        if kind == "string":
            has_type = isinstance(schema, Mapping) and schema.get("type") == "string"
            return self._string(grammar) if has_type else anything
        return grammar.json(schema)
