"""Every way a web page or a confused client may come in, on a real socket: Host, target, Origin, preflight."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import TYPE_CHECKING

import pytest

from mlxinfer.server.app import create_app
from mlxinfer.server.options import ServerOptions
from mlxinfer.server.run import Server, bind
from tests.unit.server.fake import FakeLLM, wait_for
from tests.unit.server.test_sockets import exchange

if TYPE_CHECKING:
    from collections.abc import Iterator

Address = tuple[str, int]
ALLOWED = "http://localhost:3000"


@pytest.fixture(scope="module")
def door() -> Iterator[Address]:
    """A server on loopback that also answers to box.local, and to one page."""
    options = ServerOptions(
        body_timeout_s=5, grace_s=1, allowed_hosts=frozenset({"Box.local"}), allowed_origins=frozenset({ALLOWED})
    )
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        server = Server(create_app({"tiny": FakeLLM()}, options), options)  # pyright: ignore[reportArgumentType]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        assert wait_for(lambda: server.started)
        yield listener.getsockname()[:2]
        server.should_exit = True
        thread.join(20)


def get(door: Address, target: str, *headers: str, method: str = "GET", version: str = "1.1") -> tuple[int, str, bytes]:
    """(status, head in lower case, body)"""
    lines = [f"{method} {target} HTTP/{version}", *headers, "Connection: close", "", ""]
    head, _, body = exchange(door, "\r\n".join(lines).replace("PORT", str(door[1])).encode("latin-1")).partition(
        b"\r\n\r\n"
    )
    return int(head.split()[1]), head.decode("latin-1").lower(), body


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",  # its address was changed to 127.0.0.1
        "evil.example:PORT",
        "evil.example.:PORT",
        "127.0.0.1.evil.example:PORT",
        "localhost.evil.example",
        "evil-localhost",
        "xlocalhost",
        "localhost..",
        "127.0.0.1.nip.io:PORT",
        "0.0.0.0:PORT",  # another name of loopback, to which a page's rules don't apply
        "[::]:PORT",
        "[::ffff:127.0.0.1]:PORT",
        "[::ffff:7f00:1]:PORT",
        "127.1",
        "127.0.1.1",
        "0x7f000001",
        "2130706433",
        "0177.0.0.1",
        "192.168.1.5:PORT",
        "169.254.169.254",
        "[fe80::1%25eth0]",
        "user@127.0.0.1",
        "127.0.0.1@evil.example",
        "localhost:PORT@evil.example",
        "localhost/evil",
        "localhost?x",
        "localhost#x",
        "localhost\\evil.example",
        "local\thost",
        "localhost, evil.example",
        "localhost:",
        "localhost:x",
        "localhost:999999",
        "[::1",
        "::1",
        "",
        "\xe9vil.example",
        "box.local.evil.example",
        "null",
    ],
)
def test_a_host_that_is_not_ours_is_refused(door: Address, host: str) -> None:
    status, _, body = get(door, "/v1/models", f"Host: {host}")
    assert status in (400, 421)
    assert json.loads(body)["error"]["code"] in ("wrong_host", "invalid_http")
    assert b"tiny" not in body


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:PORT", "127.0.0.1", "localhost:PORT", "LOCALHOST:PORT", "localhost.:PORT", "[::1]:PORT", "[::1]",
        "[0:0:0:0:0:0:0:1]:PORT", "box.local", "BOX.local:8080", "localhost:1",
    ],
)  # fmt: skip
def test_a_host_that_is_ours_is_answered(door: Address, host: str) -> None:
    assert get(door, "/v1/models", f"Host: {host}")[0] == 200


@pytest.mark.parametrize(
    ("target", "headers", "status"),
    [
        ("http://evil.example/v1/models", ["Host: localhost"], 421),
        ("http://evil.example/v1/models", ["Host: evil.example"], 421),
        ("HTTP://EVIL.example:PORT/v1/models", ["Host: localhost"], 421),
        ("http://localhost@evil.example/v1/models", ["Host: localhost"], 421),
        ("http://localhost/v1/models", ["Host: evil.example"], 421),
        ("http:///v1/models", ["Host: localhost"], 421),
        ("http://localhost:PORT/v1/models", ["Host: localhost"], 200),
        ("http://[::1]/v1/models?x=1", ["Host: localhost"], 200),
        ("//evil.example/v1/models", ["Host: localhost"], 404),
        ("ftp://localhost/v1/models", ["Host: localhost"], 404),
        ("/v1/models", ["Host: localhost", "Host: localhost"], 400),
        ("/v1/models", ["Host: localhost", "Host: evil.example"], 400),
        ("/v1/models", [], 400),
        ("/v1/models", ["Host: evil.example", "X-Forwarded-Host: localhost"], 421),
        ("/v1/models", ["Host: evil.example", "Forwarded: host=localhost"], 421),
        ("/v1/models", ["Host: localhost", "X-Forwarded-Host: evil.example"], 200),
        ("/v1/models", ["Host: localhost", "X-Original-URL: http://evil.example/"], 200),
    ],
)
def test_the_target_and_doubled_and_forwarded_hosts(
    door: Address, target: str, headers: list[str], status: int
) -> None:
    assert get(door, target, *headers)[0] == status


def test_http_1_0_without_a_host_is_refused(door: Address) -> None:
    assert get(door, "/health", version="1.0")[0] == 421


@pytest.mark.parametrize(
    "origin",
    [
        "null", "http://evil.example", "https://evil.example:PORT", "http://127.0.0.1.evil.example:PORT", "file://",
        "http://localhost:9999", "http://localhost", "chrome-extension://abcdef", "http://127.0.0.1:PORT",
        "http://localhost:PORT.evil.example", "http://localhost:PORT/", "http://user@localhost:PORT",
        f"{ALLOWED}.evil.example", f"{ALLOWED}/", "https://localhost:3000", "*", "", "localhost:PORT", "data:",
        f"{ALLOWED}, http://evil.example",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_a_foreign_origin_is_refused_and_gets_no_cors_header(door: Address, origin: str, method: str) -> None:
    status, head, body = get(door, "/v1/models", "Host: localhost:PORT", f"Origin: {origin}", method=method)
    assert status == 403
    assert "access-control" not in head
    assert b"tiny" not in body


def test_two_origins_of_which_one_is_foreign_are_refused(door: Address) -> None:
    headers = ["Host: localhost", f"Origin: {ALLOWED}", "Origin: http://evil.example"]
    assert get(door, "/v1/models", *headers)[0] == 403


@pytest.mark.parametrize("origin", [ALLOWED, ALLOWED.upper(), "http://localhost:PORT", "https://LOCALHOST:PORT"])
def test_an_allowed_page_and_the_servers_own_are_answered(door: Address, origin: str) -> None:
    status, head, _ = get(door, "/v1/models", "Host: localhost:PORT", f"Origin: {origin}")
    assert status == 200
    assert f"access-control-allow-origin: {origin.lower().replace('port', str(door[1]))}" in head
    assert "vary: origin" in head
    assert "access-control-allow-credentials" not in head


@pytest.mark.parametrize(
    ("mode", "site", "status"),
    [("no-cors", "cross-site", 403), ("navigate", "cross-site", 200), ("cors", "same-origin", 200)],
)
def test_what_a_foreign_page_embeds_is_refused_where_the_browser_says_so(
    door: Address, mode: str, site: str, status: int
) -> None:
    headers = ["Host: localhost", f"Sec-Fetch-Mode: {mode}", f"Sec-Fetch-Site: {site}"]
    assert get(door, "/v1/models", *headers)[0] == status


def preflight(door: Address, origin: str, *headers: str) -> tuple[int, str]:
    asked = ["Host: localhost", f"Origin: {origin}", "Access-Control-Request-Method: POST", *headers]
    return get(door, "/v1/chat/completions", *asked, method="OPTIONS")[:2]


def test_a_preflight_of_an_allowed_page_is_granted_what_it_asks_for(door: Address) -> None:
    status, head = preflight(door, ALLOWED, "Access-Control-Request-Headers: authorization, x-stainless-os")
    assert status == 204
    assert "access-control-allow-headers: authorization, x-stainless-os" in head
    assert "access-control-allow-methods: get, post, delete, options" in head
    assert "private-network" not in head


def test_headers_that_are_no_names_are_not_given_back(door: Address) -> None:
    _, head = preflight(door, ALLOWED, "Access-Control-Request-Headers: a<b>:c")
    assert "access-control-allow-headers: authorization, content-type, x-api-key" in head


def test_private_network_access_is_granted_to_allowed_pages_only(door: Address) -> None:
    asks = "Access-Control-Request-Private-Network: true"
    assert "access-control-allow-private-network: true" in preflight(door, ALLOWED, asks)[1]
    status, head = preflight(door, "http://evil.example", asks)
    assert status == 403
    assert "access-control" not in head


@pytest.mark.parametrize("host", ["a b", "http://box.local", "box.local:8080", "*", ""])
def test_an_allowed_host_that_is_no_name_is_refused_at_the_start(host: str) -> None:
    with pytest.raises(ValueError, match="without scheme and port"):
        ServerOptions(allowed_hosts=frozenset({host}))


@pytest.mark.parametrize("origin", ["*", "null", "localhost:3000", "http://a/b", "http://a/", ""])
def test_an_allowed_origin_that_is_no_pages_address_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ValueError, match="scheme://host:port"):
        ServerOptions(allowed_origins=frozenset({origin}))
