"""Who gets at the page, on every route that there is; asked over HTTP, without a browser."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from starlette.routing import Mount, Route

from mlxinfer.app.door import MAX_CALL_BYTES, PATH, POLICY
from mlxinfer.app.mount import with_page
from mlxinfer.server.options import ServerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.app.serving import App

FOREIGN = "http://evil.example"
VALUES = {"path": "x", "page": "x", "api_name": "predict", "event_id": "e", "session_hash": "s", "name": "x.md"}


@pytest.fixture(scope="module")
def routes(app: App) -> list[tuple[str, str]]:
    """(method, path) of everything below /app, Gradio's own included, with something in place of each parameter."""
    house = app.house
    whole: Any = with_page(house, "k", ("en",), house.pool, ServerOptions(page=PATH))
    found = sorted(set(_routes(whole.routes, "")))
    assert ("POST", "/app/en/gradio_api/queue/join") in found, "Gradio's routes were not found"
    return found


def _routes(routes: Any, before: str) -> Iterator[tuple[str, str]]:
    for route in routes:
        if isinstance(route, Mount):
            yield from _routes(route.routes, before + route.path)
        elif (router := getattr(route, "original_router", None)) is not None:  # FastAPI's, of include_router
            yield from _routes(router.routes, before)
        elif isinstance(route, Route) and (before + route.path).startswith(PATH):
            path = re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: VALUES.get(match[1], "x"), before + route.path)
            for method in route.methods or ():
                yield method, path


@pytest.fixture(scope="module")
def inside(app: App) -> Iterator[httpx.Client]:
    """A client with the cookie."""
    with httpx.Client(base_url=app.base, timeout=30, trust_env=False) as client:
        answer = client.get(app.link)
        assert answer.status_code == 303
        assert answer.headers["location"] == "/app/en/"
        yield client


@pytest.fixture(scope="module")
def outside(app: App) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=app.base, timeout=30, trust_env=False) as client:
        yield client


def test_the_cookie_of_the_link_is_for_this_page_only(app: App, outside: httpx.Client) -> None:
    told = outside.get(app.link).headers["set-cookie"]
    outside.cookies.clear()
    assert "HttpOnly" in told
    assert "samesite=strict" in told.lower()
    assert "Path=/app" in told
    assert str(urlsplit(app.base).port) in told.partition("=")[0]


@pytest.mark.parametrize("key", ["", "x", "é", "x" * 5000])
def test_another_key_is_refused(outside: httpx.Client, key: str) -> None:
    answer = outside.get("/app/", params={"key": key})
    assert answer.status_code == 401
    assert "mlxinfer app" in answer.text
    assert "set-cookie" not in answer.headers


def test_every_route_is_shut_without_the_cookie(outside: httpx.Client, routes: list[tuple[str, str]]) -> None:
    name = next(iter(routes))[1]
    assert name.startswith(PATH)
    for method, path in routes:
        answer = outside.request(method, path)
        assert answer.status_code == 401, (method, path)
        wrong = {"cookie": f"mlxinfer_app_{urlsplit(str(outside.base_url)).port}=wrong"}
        assert outside.request(method, path, headers=wrong).status_code == 401, (method, path)


def test_every_route_refuses_a_foreign_host_and_a_foreign_origin(
    inside: httpx.Client, routes: list[tuple[str, str]]
) -> None:
    for method, path in routes:
        assert inside.request(method, path, headers={"host": "evil.example"}).status_code == 421, (method, path)
        for origin in (FOREIGN, "null"):
            answer = inside.request(method, path, headers={"origin": origin})
            assert answer.status_code == 403, (method, path)
            assert "access-control-allow-origin" not in answer.headers


def test_what_the_page_does_not_need_is_not_there(inside: httpx.Client, routes: list[tuple[str, str]]) -> None:
    """Gradio's proxy, file routes, calls by name, editors: only a handful is open."""
    needed = re.compile(
        r"/app/(export|stop)/|/app/\w+/(config|theme\.css|favicon\.ico|assets|static|)(/|$)"
        r"|/app/\w+/gradio_api/(queue|startup-events|upload|cancel|reset|heartbeat|component_server|run/)"
    )
    shut = [(method, path) for method, path in routes if not needed.match(path)]
    assert len(shut) > 40
    for method, path in shut:
        answer = inside.request(method, path)
        assert answer.status_code == 404, (method, path)
        assert method == "HEAD" or "the page has nothing there" in answer.text or "no such page" in answer.text


@pytest.mark.parametrize(
    "target",
    [
        "gradio_api/file=/etc/passwd", "gradio_api/file=../../../../etc/passwd", "gradio_api/file/etc/passwd",
        "file=/etc/passwd", "file/etc/passwd", "gradio_api/file=http://evil.example/x", "static/../../../../etc/passwd",
        "static/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "assets/..%2f..%2f..%2fetc%2fpasswd", "assets//etc/passwd",
        "gradio_api/proxy=http://evil.example/", "gradio_api/custom_component/1/client/component/../../x",
        "static/..%5c..%5cx", "assets/%00", "gradio_api/upload/../file=/etc/passwd",
    ],
)  # fmt: skip
def test_no_route_gives_a_file_from_outside(inside: httpx.Client, target: str) -> None:
    answer = inside.get(f"/app/en/{target}")
    assert 400 <= answer.status_code < 500
    assert "root:" not in answer.text


def test_the_conversations_file_and_the_uploads_are_given_out_by_no_route(app: App, inside: httpx.Client) -> None:
    upload = app.house.uploads / "x.txt"
    upload.write_text("private")
    for path in (app.house.store.path, upload):
        for route in ("file=", "file/", "gradio_api/file=", "gradio_api/file/", "static/", "assets/"):
            for target in (path, os.path.relpath(path)):
                assert inside.get(f"/app/en/{route}{target}").status_code in (403, 404)
    upload.unlink()


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"data": 1}', b'{"data": [], "fn_index": 99999, "session_hash": "s"}',
     b'{"data": [], "fn_index": -1, "session_hash": "s"}', b'{"data": [], "fn_index": "x", "session_hash": "s"}',
     b'{"data": [], "session_hash": "s"}', b"[" * 100_000],
)  # fmt: skip
def test_junk_in_an_event_is_refused_and_the_app_goes_on(app: App, inside: httpx.Client, body: bytes) -> None:
    json = {"content-type": "application/json"}
    for route in ("queue/join", "run/predict", "component_server/"):
        answer = inside.post(f"/app/en/gradio_api/{route}", content=body, headers=json)
        assert answer.status_code < 500, (route, answer.text[:300])
    for route in ("call/predict", "api/predict", "run/other", "call/v2/send"):
        assert inside.post(f"/app/en/gradio_api/{route}", content=body, headers=json).status_code == 404
    assert inside.get("/app/en/").status_code == 200
    assert not app.errors


def test_a_body_beyond_the_limit_is_refused_declared_or_not(inside: httpx.Client) -> None:
    json = {"content-type": "application/json"}
    declared = inside.post("/app/en/gradio_api/queue/join", headers=json, content=b" " * (MAX_CALL_BYTES + 1))
    assert declared.status_code == 413
    chunked = inside.post(
        "/app/en/gradio_api/queue/join",
        headers=json,
        content=(b" " * (1 << 20) for _ in range((MAX_CALL_BYTES >> 20) + 2)),
    )
    assert chunked.status_code == 413


def test_only_the_page_takes_uploads(app: App, inside: httpx.Client) -> None:
    files, origin = {"files": ("a.txt", b"text")}, {"origin": app.base}
    taken = inside.post("/app/en/gradio_api/upload", files=files, headers=origin)
    assert taken.status_code == 200
    assert str(app.house.uploads) in taken.json()[0]
    assert inside.post("/v1/chat/completions", files=files, headers=origin).status_code == 415
    assert inside.post("/apples", files=files, headers=origin).status_code == 415


def test_the_pages_answers_carry_the_policy_that_keeps_the_browser_here(inside: httpx.Client) -> None:
    answer = inside.get("/app/en/")
    assert answer.headers["content-security-policy"] == POLICY
    assert "default-src 'self'" in POLICY
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-frame-options"] == "DENY"


def test_the_language_is_the_browsers(app: App, outside: httpx.Client) -> None:
    for header, language in (
        ("ja,en;q=0.5", "ja"),
        ("de,ja;q=0.1", "ja"),
        ("fr", "en"),
        ("", "en"),
        ("ja;q=0,en", "en"),
    ):
        answer = outside.get(app.link, headers={"accept-language": header})
        assert answer.headers["location"] == f"/app/{language}/"
    outside.cookies.clear()


def test_the_api_beside_the_page_is_as_it_was(app: App, outside: httpx.Client) -> None:
    assert outside.get("/health").status_code == 200
    assert {one["id"] for one in outside.get("/v1/models").json()["data"]} == {"tiny", "other"}
    assert parse_qs(urlsplit(app.link).query)["key"][0] not in outside.get("/health").text
