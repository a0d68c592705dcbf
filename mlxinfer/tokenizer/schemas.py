"""`oneOf` in JSON schemas: where no value can satisfy two of its parts it means `anyOf`, which grammars can hold to.

Tagged unions are of this kind: the parts are objects that require a common property and fix different values for it.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

MAX_HOPS = 16
"""References that are followed."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{0,20}"
"""Between the parts of JSON: room for a line's indentation, and an end for models that would go on forever."""


def for_grammar(schema: Any) -> Any:
    """The schema as every grammar has it: `oneOf` made `anyOf` where that is the same, white space bounded, and none of
    llguidance's own switches from a client (`x-guidance` can turn strictness off)."""
    if not isinstance(schema, dict):
        return {"x-guidance": {"whitespace_pattern": WHITESPACE}} if schema is True else schema
    return {**without_one_of(schema), "x-guidance": {"whitespace_pattern": WHITESPACE}}


def without_one_of(schema: Any) -> Any:
    """The schema with every `oneOf` of disjoint parts made an `anyOf`. Others stay as they are."""
    return _rewritten(schema, schema)


def _rewritten(node: Any, root: Any) -> Any:
    if isinstance(node, list):
        return [_rewritten(child, root) for child in node]
    if not isinstance(node, dict):
        return node
    made = {key: value if key in ("const", "enum") else _rewritten(value, root) for key, value in node.items()}
    parts = node.get("oneOf")
    if isinstance(parts, list) and "anyOf" not in node and _disjoint(parts, root):
        made["anyOf"] = made.pop("oneOf")
    return made


def _disjoint(parts: list[Any], root: Any) -> bool:
    found = [_resolved(part, root) for part in parts]
    return all(_apart(a, b, root) for a, b in itertools.combinations(found, 2))


def _apart(a: Any, b: Any, root: Any) -> bool:
    """Whether it is plain that no value satisfies both."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return False
    values, others = _values(a), _values(b)
    if values is not None and others is not None:
        return not values & others
    types = _types(a), _types(b)
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if types != ({"object"}, {"object"}):
        return False
    required = _names(a.get("required")) & _names(b.get("required"))
    mine, theirs = a.get("properties"), b.get("properties")
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return False
    for name in required & mine.keys() & theirs.keys():
        one, other = (_values(_resolved(p[name], root)) for p in (mine, theirs))
        if one is not None and other is not None and not one & other:
            return True
    return False


def _resolved(schema: Any, root: Any) -> Any:
    """What a local reference stands for, if that is all it is."""
    for _ in range(MAX_HOPS):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found = root
        for step in reference[2:].split("/"):
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, dict) else None
        schema = found
    return None


def _values(schema: Any) -> set[str] | None:
    """The values a schema allows, as JSON, where it lists them."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return {_canonical(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return {_canonical(value) for value in schema["enum"]}
    return None


def _canonical(value: Any) -> str:
    """JSON text that is the same for equal values: 1.0 is 1."""
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _types(schema: dict[str, Any]) -> set[str]:
    """Its types; none where it doesn't say. An integer is a number too."""
    kind = schema.get("type")
    types = {kind} if isinstance(kind, str) else _names(kind)
    return types | {"integer"} if "number" in types else types


def _names(value: Any) -> set[str]:
    return {v for v in value if isinstance(v, str)} if isinstance(value, list) else set()
