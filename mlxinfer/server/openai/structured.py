"""What a text has to be: OpenAI's response_format, and the same with regexes, choices and grammars as vLLM names it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.openai.fields import Strict
from mlxinfer.types import Grammar

if TYPE_CHECKING:
    from mlxinfer.types import GrammarKind

Choices = Annotated[list[str], Field(min_length=1, max_length=4096)]
Schema = dict[str, Any] | bool


class JsonSchemaSpec(Strict):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Obeyed either way."""


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec


class StructuredOutputs(Strict):
    """One of them."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredFields(Strict):
    """Mixed into requests whose text can be given a form."""

    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = (
        None
    )
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def form(self) -> tuple[str, Grammar | None]:
        """(field, the form it asks for). Raises InvalidRequestError for two forms, and for one that is too large."""
        so = self.structured_outputs or StructuredOutputs()
        found = [
            made
            for made in (
                self._response_format(),
                _json("guided_json", self.guided_json),
                _grammar("regex", "guided_regex", self.guided_regex),
                _choice("guided_choice", self.guided_choice),
                _grammar("lark", "guided_grammar", self.guided_grammar),
                _json("structured_outputs.json", so.json_),
                _grammar("regex", "structured_outputs.regex", so.regex),
                _choice("structured_outputs.choice", so.choice),
                _grammar("lark", "structured_outputs.grammar", so.grammar),
                _grammar("json_object", "structured_outputs.json_object", "" if so.json_object else None),
            )
            if made is not None
        ]
        if len(found) > 1:
            names = " and ".join(name for name, _ in found)
            raise InvalidRequestError(f"{names} ask for two forms of one text; send one of them", param=found[1][0])
        return found[0] if found else ("", None)

    def _response_format(self) -> tuple[str, Grammar] | None:
        form = self.response_format
        if isinstance(form, JsonObjectFormat):
            return _grammar("json_object", "response_format", "")
        if isinstance(form, JsonSchemaFormat):
            schema = form.json_schema.schema_
            return _json("response_format", {} if schema is None else schema)
        return None


def schema_grammar(name: str, schema: Schema) -> Grammar:
    """For text that `schema` describes; `name` is the field it came in."""
    made = _json(name, schema)
    assert made is not None
    return made[1]


def _json(name: str, schema: Schema | str | None) -> tuple[str, Grammar] | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            read = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{name} is a string that is not JSON: {error}", param=name) from None
        if not isinstance(read, dict | bool):
            raise InvalidRequestError(f"{name} must be a JSON schema: an object, true or false", param=name)
        schema = read
    return _grammar("json_schema", name, json.dumps(schema, ensure_ascii=False))


def _choice(name: str, choices: list[str] | None) -> tuple[str, Grammar] | None:
    return None if choices is None else _grammar("choice", name, json.dumps(choices, ensure_ascii=False))


def _grammar(kind: GrammarKind, name: str, text: str | None) -> tuple[str, Grammar] | None:
    if text is None:
        return None
    if not text and kind in ("regex", "lark"):
        raise InvalidRequestError(f"{name} is empty", param=name)
    try:
        return name, Grammar(kind, text)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{name}: {error}", param=name) from None
