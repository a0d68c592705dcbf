"""JSON schemas over every keyword that structured output claims, made from parts; the same ones on every run."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Schema = dict[str, Any]

STRINGS: list[Schema] = [
    {"type": "string"},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-z]{2,4}$"},
    {"type": "string", "pattern": "^(red|green)-[0-9]+$", "maxLength": 12},
    {"type": "string", "pattern": "x.y"},
    {"type": "string", "pattern": "^\\w+@\\w+\\.(com|org)$", "maxLength": 24},
    {"type": "string", "pattern": "^[\"\\\\/]{1,3}$"},
    {"type": "string", "pattern": "^é{1,2}ß?$"},
    *({"type": "string", "format": f} for f in (
        "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")),
]  # fmt: skip
NUMBERS: list[Schema] = [
    {"type": "integer"},
    {"type": "number"},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "integer", "minimum": 1_000_000},
    {"type": "integer", "maximum": -10},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -2.5, "maximum": 2.5},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 2},
    {"type": "number", "minimum": 0.001, "maximum": 0.0015},
]
CONSTANTS: list[Schema] = [
    {"const": None},
    {"const": 'a "quoted" \\ text\n'},
    {"const": {"a": [1, 2.5, None], "b": {}}},
    {"enum": ["x", 1, None, True, [], {"k": "v"}]},
    {"enum": ["ünï", "日本", "🙂", "a\tb"]},
    {"enum": [1, 2, 3], "type": "integer"},
    {"type": "null"},
    {"type": "boolean"},
    {"type": ["integer", "null"]},
    {"type": ["string", "boolean"], "maxLength": 3},
    {"enum": [0.1, -0.0, 1e3]},
]
LEAVES = STRINGS + NUMBERS + CONSTANTS


def arrays(item: Schema, other: Schema) -> Iterator[Schema]:
    yield {"type": "array", "items": item, "maxItems": 3}
    yield {"type": "array", "items": item, "minItems": 2, "maxItems": 2}
    yield {"type": "array", "prefixItems": [item, other], "items": False, "minItems": 1}
    yield {"type": "array", "prefixItems": [item], "items": other, "minItems": 2, "maxItems": 3}
    yield {"type": "array", "maxItems": 0}


def objects(value: Schema, other: Schema) -> Iterator[Schema]:
    two = {"first": value, "second": other}
    yield {"type": "object", "properties": two, "required": ["first", "second"], "additionalProperties": False}
    yield {"type": "object", "properties": two, "required": ["second"], "additionalProperties": False}
    yield {"type": "object", "properties": two, "additionalProperties": False}
    yield {"type": "object", "properties": {"a b": value, 'c"d': other}, "required": ['c"d'],
           "additionalProperties": False}  # fmt: skip
    yield {"type": "object", "properties": {"only": value}, "required": ["only"], "additionalProperties": {"const": 1},
           "maxProperties": 2}  # fmt: skip
    yield {"type": "object", "patternProperties": {"^x[0-9]$": value}, "additionalProperties": False,
           "maxProperties": 2}  # fmt: skip
    yield {"type": "object", "properties": {"n": {"type": "object", "properties": {"deep": value},
           "required": ["deep"], "additionalProperties": False}}, "required": ["n"],
           "additionalProperties": False}  # fmt: skip


def combined(value: Schema, other: Schema) -> Iterator[Schema]:
    yield {"anyOf": [value, other]}
    yield {"allOf": [value, {}]}
    yield {"oneOf": [{"type": "object", "properties": {"k": {"const": i}, "v": v}, "required": ["k", "v"],
           "additionalProperties": False} for i, v in enumerate((value, other))]}  # fmt: skip
    yield {"$defs": {"part": value}, "type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
    yield {"definitions": {"a": {"$ref": "#/definitions/b"}, "b": other}, "$ref": "#/definitions/a"}


FIXED: list[Schema] = [
    {},
    {"type": "object"},
    {"title": "a list", "$comment": "x", "description": "y", "default": 3, "examples": [1], "type": "integer"},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/a", "type": "boolean"},
    {"$defs": {"tree": {"type": "object", "properties": {"v": {"type": "integer", "minimum": 0, "maximum": 9},
     "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}, "required": ["v", "next"],
     "additionalProperties": False}}, "$ref": "#/$defs/tree"},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
     {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}], "additionalProperties": False},
    {"type": "array", "uniqueItems": True},
    {"not": {"type": "string"}},
    {"if": {"type": "string"}, "then": {"maxLength": 2}},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "string", "format": "color-name"},
    {"type": "string", "pattern": "^(?=a)b"},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"$ref": "#/$defs/missing"},
    {"$ref": "https://example.com/elsewhere.json"},
    {"type": "array", "minItems": 3, "maxItems": 1},
    {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"type": "object", "required": ["a"], "properties": {"a": False}},
    {"enum": []},
]  # fmt: skip
"""Among them what nothing can satisfy, and keywords that have to be refused."""


def schemas(count: int = 360) -> list[Schema]:
    """At least `count` of them: every leaf, every fixed one, and combinations drawn with a fixed seed."""
    drawn = random.Random(7)
    made = [*LEAVES, *FIXED]
    builders = (arrays, objects, combined)
    while len(made) < count:
        value, other = drawn.choice(LEAVES), drawn.choice(LEAVES)
        if drawn.random() < 0.3:
            value = drawn.choice(list(drawn.choice(builders)(value, drawn.choice(LEAVES))))
            if any(k in value for k in ("$defs", "definitions")):
                continue  # references are to the root
        made += drawn.sample(list(drawn.choice(builders)(value, other)), 2)
    return made
