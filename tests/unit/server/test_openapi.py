"""The OpenAPI document says what the server reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from tests.unit.server.test_completions import HELLO

if TYPE_CHECKING:
    from starlette.testclient import TestClient

POSTS = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank"}


@pytest.fixture
def document(client: TestClient) -> dict[str, Any]:
    answer = client.get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


def test_every_post_describes_its_body_and_its_errors(document: dict[str, Any]) -> None:
    posts = {path: found["post"] for path, found in document["paths"].items() if "post" in found}
    assert set(posts) >= POSTS
    for path, operation in posts.items():
        assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert "422" not in operation["responses"]
        shape = operation["responses"]["default"]
        if path.startswith(("/api/", "/v1/messages")):
            assert shape["content"]["application/json"]["schema"]["required"]
        else:
            assert shape == {"$ref": "#/components/responses/Error"}


def test_the_figures_are_text(document: dict[str, Any]) -> None:
    assert list(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [r for value in node.values() for r in references(value)]
        return [r for one in node for r in references(one)] if isinstance(node, list) else []

    for reference in references(document):
        node: Any = document
        for part in reference.removeprefix("#/").split("/"):
            node = node[part]


@pytest.mark.parametrize(
    ("path", "body", "valid"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "user": "me", "stop": None}, True),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": "10"}, False),
        ("/v1/chat/completions", {"messages": HELLO, "wizardry": 1}, False),
        ("/v1/completions", {"prompt": [[1], [2]]}, True),
        ("/v1/completions", {"prompt": [1, "a"]}, False),
        ("/v1/responses", {"input": [{"role": "user", "content": "hi"}]}, True),
        ("/v1/responses", {"input": [{"type": "wizard"}]}, False),
        ("/v1/embeddings", {"input": ["a"]}, True),
        ("/v1/rerank", {"query": "a", "documents": [{"text": "x"}]}, True),
        ("/v1/rerank", {"query": "a", "documents": []}, False),
    ],
)
def test_the_document_and_the_server_agree_on_a_body(
    client: TestClient, document: dict[str, Any], path: str, body: Any, valid: bool
) -> None:
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = {"$ref": reference, "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is valid
    answer = client.post(path, json=body)
    # A model that chats makes no vectors; that is no fault of the body.
    assert valid is (answer.status_code == 200 or json.loads(answer.text)["error"]["param"] == "model")
