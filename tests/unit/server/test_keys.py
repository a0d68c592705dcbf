"""Keys with names and limits: the file, who is let in, how often, and to which models."""

from __future__ import annotations

import hashlib
import stat
from typing import TYPE_CHECKING

import pytest
from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotations)
from starlette.responses import Response
from starlette.testclient import TestClient

from mlxinfer.errors import InvalidRequestError
from mlxinfer.server.app import create_app
from mlxinfer.server.errors import HttpError
from mlxinfer.server.keys import Allowance, ApiKey, Keyring, load_keys
from mlxinfer.server.options import ServerOptions
from mlxinfer.server.state import state_of
from mlxinfer.types import Usage
from tests.unit.server.conftest import BASE
from tests.unit.server.fake import FakeLLM

if TYPE_CHECKING:
    from pathlib import Path

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def write(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def client_with(*keys: ApiKey, **options) -> TestClient:
    app = create_app({"tiny": FakeLLM(), "other": FakeLLM("other")}, ServerOptions(keys=keys, **options))  # pyright: ignore[reportArgumentType]
    return TestClient(app, base_url=BASE)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def test_a_file_holds_keys_and_hashes_with_their_limits(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sesame").hexdigest()
    text = f"""
    [[key]]
    name = "anna"
    sha256 = "{digest}"
    requests_per_minute = 60
    models = ["tiny"]
    [[key]]
    name = "ben"
    key = "open"
    max_concurrent = 2
    max_tokens_per_minute = 1000
    """
    anna, ben = load_keys(write(tmp_path, text))
    assert anna == ApiKey.of("anna", "sesame", requests_per_minute=60, models=frozenset({"tiny"}))
    assert ben == ApiKey.of("ben", "open", max_concurrent=2, max_tokens_per_minute=1000)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_others_can_read_or_write_is_refused_with_the_command_that_mends_it(
    tmp_path: Path, mode: int
) -> None:
    path = write(tmp_path, '[[key]]\nname = "a"\nkey = "k"\n', mode)
    with pytest.raises(InvalidRequestError, match="chmod 600") as error:
        load_keys(path)
    assert oct(stat.S_IMODE(mode))[2:] in str(error.value)


def test_a_credential_of_systemds_may_show_its_acl_as_the_groups_right_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, '[[key]]\nname = "a"\nkey = "k"\n', 0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "another"))
    with pytest.raises(InvalidRequestError, match="chmod 600"):
        load_keys(path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert [key.name for key in load_keys(path)] == ["a"]
    path.chmod(0o444)
    with pytest.raises(InvalidRequestError, match="chmod 600"):
        load_keys(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must hold 1 to"),
        ("key = 5", "must hold 1 to"),
        ("key = [5]", "must be a table"),
        ("keys = []", "unknown entry 'keys'"),
        ("[[key]", "TOML"),
        ('[[key]]\nname = "a"', "either key or sha256"),
        ('[[key]]\nname = "a"\nkey = "k"\nsha256 = "00"', "either key or sha256"),
        ('[[key]]\nname = "a"\nkey = ""', "printable ASCII"),
        ('[[key]]\nname = "a"\nkey = "é"', "printable ASCII"),
        ('[[key]]\nname = "a"\nsha256 = "00"', "64 hexadecimal"),
        ('[[key]]\nname = "a b"\nkey = "k"', "name must be"),
        ('[[key]]\nname = "a\\n"\nkey = "k"', "name must be"),
        ('[[key]]\nkey = "k"', "name must be"),
        ('[[key]]\nname = "a"\nkey = "k"\nmax_concurrent = 0', "max_concurrent must be"),
        ('[[key]]\nname = "a"\nkey = "k"\nmax_concurrent = true', "max_concurrent must be"),
        ('[[key]]\nname = "a"\nkey = "k"\nmodels = []', "models must be"),
        ('[[key]]\nname = "a"\nkey = "k"\nmodel = "x"', "unknown field 'model'"),
        ('[[key]]\nname = "a"\nkey = "k"\n[[key]]\nname = "a"\nkey = "l"', "same name"),
        ('[[key]]\nname = "a"\nkey = "k"\n[[key]]\nname = "b"\nkey = "k"', "same key"),
    ],
)
def test_a_broken_file_is_refused_and_no_key_is_shown(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as error:
        load_keys(write(tmp_path, text.replace('"k"', '"hushhush"')))
    assert "keys.toml" in str(error.value)
    assert "hushhush" not in str(error.value)


def test_a_missing_file_a_folder_and_a_huge_one_are_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        load_keys(tmp_path / "none")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        load_keys(tmp_path)
    with pytest.raises(InvalidRequestError, match="at most"):
        load_keys(write(tmp_path, "#" * (2 << 20)))


def test_any_key_is_found_and_all_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = Keyring(ApiKey.of(f"k{i}", f"secret{i}") for i in range(5))
    compared: list[bytes] = []
    real = __import__("hmac").compare_digest
    monkeypatch.setattr("mlxinfer.server.keys.hmac.compare_digest", lambda a, b: (compared.append(a), real(a, b))[1])
    for secret, name in (("secret0", "k0"), ("secret4", "k4"), ("wrong", None), ("", None), ("\xff\u20ac", None)):
        compared.clear()
        found = ring.find(secret)
        assert (found and found.key.name) == name
        assert len(compared) == 5


def test_a_key_comes_as_a_bearer_token_or_as_anthropics_clients_send_it() -> None:
    client = client_with(ApiKey.of("anna", "sesame"), ApiKey.of("ben", "open"), api_key="third")
    for headers in (bearer("sesame"), bearer("open"), bearer("third"), {"x-api-key": "open"}):
        assert client.get("/v1/models", headers=headers).status_code == 200
    for headers in ({}, bearer("sesam"), {"x-api-key": "wrong"}, bearer("wrong") | {"x-api-key": "open"}):
        assert client.get("/v1/models", headers=headers).status_code == 401


def test_a_key_beyond_its_rate_is_a_429_that_says_when_and_others_go_on() -> None:
    client = client_with(ApiKey.of("anna", "sesame", requests_per_minute=2), ApiKey.of("ben", "open"))
    assert [client.get("/v1/models", headers=bearer("sesame")).status_code for _ in range(2)] == [200, 200]
    answer = client.get("/v1/models", headers=bearer("sesame"))
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "key_limit"
    assert 1 <= int(answer.headers["retry-after"]) <= 31
    assert "requests_per_minute" in answer.json()["error"]["message"]
    assert client.get("/v1/models", headers=bearer("open")).status_code == 200


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_rate_fills_up_again_and_never_beyond_a_minutes_worth() -> None:
    clock = Clock()
    allowance = Allowance(ApiKey.of("a", "k", requests_per_minute=6), clock)
    clock.now += 3600
    for _ in range(6):
        allowance.enter()
    with pytest.raises(HttpError) as refused:
        allowance.enter()
    assert refused.value.headers["retry-after"] == "11"
    clock.now += 10.5
    allowance.enter()


def test_requests_at_a_time_are_counted_and_given_back() -> None:
    allowance = Allowance(ApiKey.of("a", "k", max_concurrent=2), Clock())
    allowance.enter()
    allowance.enter()
    with pytest.raises(HttpError, match="2 requests at a time"):
        allowance.enter()
    allowance.leave()
    allowance.enter()


def test_a_refused_request_gives_nothing_back_and_failed_ones_do() -> None:
    client = client_with(ApiKey.of("anna", "sesame", max_concurrent=1))
    for body in ({}, CHAT, {"messages": 5}, CHAT):
        answer = client.post("/v1/chat/completions", json=body, headers=bearer("sesame"))
        assert answer.status_code in (200, 400)
    assert client.get("/nothing", headers=bearer("sesame")).status_code == 404
    assert client.get("/v1/models", headers=bearer("sesame")).status_code == 200


def test_tokens_are_spent_when_a_request_ends_and_may_be_overdrawn_once() -> None:
    clock = Clock()
    allowance = Allowance(ApiKey.of("a", "k", max_tokens_per_minute=60), clock)
    allowance.enter()
    allowance.spend(90)
    with pytest.raises(HttpError, match="60 tokens a minute") as refused:
        allowance.enter()
    assert refused.value.headers["retry-after"] == "32"
    clock.now += 31.5
    allowance.enter()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_model_the_key_may_not_use_does_not_exist_for_it(path: str) -> None:
    client = client_with(ApiKey.of("anna", "sesame", models=frozenset({"tiny"})), ApiKey.of("ben", "open"))
    body = {"messages": CHAT["messages"]} if "chat" in path else {"prompt": "x"}
    refused = client.post(path, json=body | {"model": "other"}, headers=bearer("sesame"))
    unknown = client.post(path, json=body | {"model": "nobody"}, headers=bearer("sesame"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert refused.json()["error"]["message"] == unknown.json()["error"]["message"].replace("nobody", "other")
    assert "tiny" in refused.json()["error"]["message"]
    assert client.post(path, json=body, headers=bearer("sesame")).status_code == 200  # its only model
    assert client.post(path, json=body | {"model": "other"}, headers=bearer("open")).status_code == 200
    assert client.get("/v1/models/other", headers=bearer("sesame")).status_code == 404


def test_a_tag_does_not_tell_a_model_the_key_may_not_use_from_one_that_does_not_exist() -> None:
    client = client_with(ApiKey.of("anna", "sesame", models=frozenset({"tiny"})))
    found = [
        client.post(path, json={"model": f"{name}:latest", **more}, headers=bearer("sesame"))
        for path, more in (("/api/show", {}), ("/api/generate", {"prompt": "x"}), ("/api/embed", {"input": "x"}))
        for name in ("other", "nobody")
    ]
    assert {answer.status_code for answer in found} == {404}
    assert len({answer.text.replace("other", "nobody") for answer in found}) == 1
    assert "other:latest" in found[0].text


def test_a_key_for_a_model_nobody_serves_stops_the_start() -> None:
    with pytest.raises(InvalidRequestError, match="'anna' may use nothing-like-it"):
        client_with(ApiKey.of("anna", "sesame", models=frozenset({"nothing-like-it", "tiny"})))


def test_a_route_sees_its_key_as_tenant_and_what_it_used_is_charged() -> None:
    router = APIRouter()

    @router.post("/spend")
    async def spend(request: Request) -> Response:
        state = state_of(request)
        state.observe("tiny", Usage(prompt_tokens=50, completion_tokens=11), None, "stop")
        return Response(state.tenant)

    client = client_with(ApiKey.of("anna", "sesame", max_tokens_per_minute=60), ApiKey.of("ben", "open"))
    client.app.include_router(router)  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    assert client.post("/spend", headers=bearer("sesame")).text == "anna"
    assert client.post("/spend", headers=bearer("sesame")).status_code == 429
    assert client.post("/spend", headers=bearer("open")).text == "ben"


def test_a_name_that_stands_twice_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="rename"):
        ServerOptions(api_key="x", keys=(ApiKey.of("default", "y"),))


def test_one_key_without_limits_and_with_them_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="also a key of the file"):
        ServerOptions(api_key="same", keys=(ApiKey.of("anna", "same", max_concurrent=1),))


def test_keys_of_a_file_are_enough_to_listen_beyond_loopback() -> None:
    assert ServerOptions(host="0.0.0.0", keys=(ApiKey.of("a", "k"),)).host == "0.0.0.0"
