"""oneOf becomes anyOf exactly where no value can satisfy two of its parts."""

from __future__ import annotations

from typing import Any

import pytest

from mlxinfer.tokenizer.schemas import WHITESPACE, for_grammar, without_one_of


def tagged(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": value, "x": {}}, "required": ["kind"], **more}


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "string"}, {"type": "integer"}, {"type": ["null", "object"]}],
        [{"const": 1}, {"enum": [2, "1"]}],
        [tagged({"const": "a"}), tagged({"enum": ["b", "c"]}), tagged({"const": "d"})],
        [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two~1three"}],
    ],
)
def test_parts_that_exclude_each_other_are_alternatives(parts: list[Any]) -> None:
    defs = {"one": tagged({"const": "a"}), "two/three": tagged({"const": "b"})}
    found = without_one_of({"$defs": defs, "items": {"oneOf": parts}})
    assert found["items"] == {"anyOf": parts}
    assert found["$defs"] == defs


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "number"}, {"type": "integer"}],
        [{"type": "string"}, {}],
        [{"const": 1}, {"enum": [2, 1.0]}],
        [{"const": [2.0]}, {"const": [2]}],
        [tagged({"const": "a"}), tagged({"const": "a"})],
        [tagged({"const": "a"}), tagged({"const": "b"}, required=[])],
        [tagged({"const": "a"}), tagged({"type": "string"})],
        [
            {**tagged({"const": "a"}), "type": ["object", "null"]},
            {**tagged({"const": "b"}), "type": ["object", "null"]},
        ],
        [{"$ref": "#/$defs/loop"}, {"type": "string"}],
        [{"$ref": "#/nowhere"}, True],
    ],
)
def test_where_two_may_hold_at_once_nothing_changes(parts: list[Any]) -> None:
    schema = {"$defs": {"loop": {"$ref": "#/$defs/loop"}}, "oneOf": parts}
    assert without_one_of(schema) == schema


def test_what_only_looks_like_a_keyword_is_left_alone() -> None:
    schema = {"const": {"oneOf": [{"type": "string"}, {"type": "null"}]}, "anyOf": [], "oneOf": [{"const": 1}]}
    assert without_one_of(schema) == schema


def test_a_client_cannot_turn_strictness_off() -> None:
    found = for_grammar({"type": "string", "not": {"const": "x"}, "x-guidance": {"lenient": True}})
    assert found == {"type": "string", "not": {"const": "x"}, "x-guidance": {"whitespace_pattern": WHITESPACE}}
    assert for_grammar(True) == {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    assert for_grammar(False) is False
