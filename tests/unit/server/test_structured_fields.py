"""Every way to ask for text of a given form reaches the engine as one grammar."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.server.test_completions import CHAT, HELLO, TEXT, post

if TYPE_CHECKING:
    from starlette.testclient import TestClient

    from tests.unit.server.fake import FakeLLM

SCHEMA = {"type": "object", "properties": {"ä": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}}


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize("url", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": named(SCHEMA)}, "json_schema", SCHEMA),
        ({"response_format": named(SCHEMA, strict=True, description="d")}, "json_schema", SCHEMA),
        ({"response_format": named(True)}, "json_schema", True),
        ({"response_format": named({})}, "json_schema", {}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema", {}),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"guided_choice": ["yes", "nö"]}, "choice", ["yes", "nö"]),
        ({"guided_grammar": "start: /a/"}, "lark", "start: /a/"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"structured_outputs": {"regex": "x"}}, "regex", "x"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", ["a"]),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "lark", "start: /a/"),
    ],
)
def test_a_form_becomes_a_grammar(
    client: TestClient, llm: FakeLLM, url: str, fields: dict[str, Any], kind: str, text: Any
) -> None:
    body = {"messages": HELLO} if url == CHAT else {"prompt": "hello"}
    post(client, url, **body, **fields)
    grammar = llm.made[-1].params.grammar
    assert grammar is not None
    assert grammar.kind == kind
    found = grammar.text if kind in ("regex", "lark", "json_object") else json.loads(grammar.text)
    assert found == text
    # The same request without it is free again.
    post(client, url, **body)
    assert llm.made[-1].params.grammar is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
        {"guided_json": None, "guided_choice": None},
    ],
)
def test_a_form_that_asks_for_nothing_is_free_text(client: TestClient, llm: FakeLLM, fields: dict[str, Any]) -> None:
    post(client, CHAT, messages=HELLO, **fields)
    assert llm.made[-1].params.grammar is None


def test_two_forms_of_one_text_are_a_400_that_names_both(client: TestClient, llm: FakeLLM) -> None:
    fields = {"guided_regex": "x", "response_format": {"type": "json_object"}}
    answer = client.post(CHAT, json={"messages": HELLO, **fields})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "response_format" in message
    assert "guided_regex" in message
    assert not llm.made


def test_the_priority_comes_from_the_body_or_the_header(client: TestClient, llm: FakeLLM) -> None:
    header = {"x-mlxinfer-priority": "-3"}
    for url, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "hello"})):
        client.post(url, json=body, headers=header)
        assert llm.made[-1].options["priority"] == -3
        client.post(url, json=body | {"priority": 5}, headers=header)
        assert llm.made[-1].options["priority"] == 5
        post(client, url, **body)
        assert llm.made[-1].options["priority"] == 0
        for bad in ("11", "x", "1.5", "", "9" * 5000):
            answer = client.post(url, json=body, headers={"x-mlxinfer-priority": bad})
            assert answer.status_code == 400, bad


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        (CHAT, {"guided_regex": "no such thing"}, "guided_regex"),
        (TEXT, {"guided_grammar": "no such thing"}, "guided_grammar"),
        (CHAT, {"response_format": named({"const": "no such thing"})}, "response_format"),
        (TEXT, {"structured_outputs": {"regex": "no such thing"}}, "structured_outputs.regex"),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": "no such thing"}}}},
            "text.format",
        ),
    ],
)
def test_a_form_that_cannot_be_compiled_is_a_400_and_the_next_good_one_works(
    client: TestClient, llm: FakeLLM, url: str, fields: dict[str, Any], param: str
) -> None:
    body = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "hello"}}.get(url, {"input": "hello"})
    answer = client.post(url, json=body | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not llm.made
    post(client, CHAT, messages=HELLO, guided_regex="x")
