"""A page beside the API: what the Guard leaves to the page's own door, and where that ends."""

from __future__ import annotations

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from mlxinfer.config import Settings
from mlxinfer.pool import Machine, ModelPool
from mlxinfer.server.app import create_app
from mlxinfer.server.options import ServerOptions

ORIGIN = {"origin": "http://localhost"}


@pytest.fixture
def client() -> TestClient:
    app = create_app(ModelPool({}, Machine(Settings())), ServerOptions(api_key="secret", page="/page"))
    for path in ("/page", "/page/x", "/pages"):
        app.add_route(path, lambda _: PlainTextResponse("in"), methods=["GET", "POST"])
    return TestClient(app, base_url="http://localhost")


def test_the_api_key_is_the_apis(client: TestClient) -> None:
    assert client.get("/page").status_code == 200
    assert client.get("/page/x").status_code == 200
    assert client.get("/pages").status_code == 401
    assert client.get("/v1/models").status_code == 401


def test_uploads_are_the_pages(client: TestClient) -> None:
    files = {"files": ("a.txt", b"text")}
    assert client.post("/page/x", files=files, headers=ORIGIN).status_code == 200
    assert client.post("/pages", files=files, headers=ORIGIN).status_code == 415
    assert client.post("/page/x", data={"a": "b"}, headers=ORIGIN).status_code == 415


def test_the_page_is_not_open_to_foreign_pages(client: TestClient) -> None:
    assert client.get("/page/x", headers={"host": "evil.example"}).status_code == 421
    assert client.get("/page/x", headers={"origin": "http://evil.example"}).status_code == 403


def test_without_a_page_no_path_is_one() -> None:
    assert not ServerOptions().in_page("/page")
    assert not ServerOptions(page="/page").in_page("/pages")
