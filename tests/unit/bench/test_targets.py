"""Servers on the command line, and what they are asked before the work begins."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.bench.targets import Address, check_names, connect, parse_address
from mlxinfer.errors import EngineError, InvalidRequestError, ModelNotFoundError, OfflineError
from tests.unit.bench.fake import RefusalError, echo, serving

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("http://127.0.0.1:8081", Address("127.0.0.1:8081", "http://127.0.0.1:8081", None)),
        ("http://h:1/v1/", Address("h:1", "http://h:1", None)),
        ("https://h/api/v1", Address("h", "https://h/api", None)),
        ("mlx-lm=http://h:1", Address("mlx-lm", "http://h:1", None)),
        ("x=http://h:1/v1#org/m=4bit", Address("x", "http://h:1", "org/m=4bit")),
        ("http://h:1#a=b", Address("h:1", "http://h:1", "a=b")),
        ("http://[::1]:8", Address("[::1]:8", "http://[::1]:8", None)),
    ],
)
def test_a_name_and_a_model_may_stand_around_the_url(text: str, wanted: Address) -> None:
    assert parse_address(text, option="--against") == wanted


@pytest.mark.parametrize(
    "text", ["127.0.0.1:8080", "x=h:1", "ftp://h", "http://", "http://h:x", "=http://h", "", "http://h?a=1", "x="]
)
def test_what_is_no_url_is_refused_and_named(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="--against"):
        parse_address(text, option="--against")


def test_two_servers_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="'a'"):
        check_names(["a", "b", "a"])


def test_the_only_model_a_server_lists_is_taken_and_what_it_says_is_kept() -> None:
    with serving() as server:
        server.models = {"data": [{"id": "m1", "owned_by": "me", "quantization": "4bit"}]}
        server.pages["/version"] = (200, {"version": "1.2"})
        target = connect(Address("x", server.url, None))
    assert (target.endpoint.model, target.ours) == ("m1", False)
    assert target.facts["version"] == "1.2"
    assert target.facts["quantization"] == "4bit"
    assert target.facts["system_fingerprint"] == "fake-1"
    assert "BaseHTTP" in target.facts["server"]
    assert "repetition_penalty" not in server.asked[0]


@pytest.mark.parametrize(
    ("owner", "ours", "honours"), [("mlxinfer", True, True), ("llamacpp", False, True), ("somebody", False, False)]
)
def test_ignore_eos_goes_only_where_it_is_honoured(owner: str, ours: bool, honours: bool) -> None:
    with serving() as server:
        server.models = {"data": [{"id": "m", "owned_by": owner}]}
        target = connect(Address("x", server.url, None), ignore_eos=True)
        connect(Address("x", server.url, None))
    assert target.ours is ours
    assert ("ignore_eos" in server.asked[0]) is honours
    assert "ignore_eos" not in server.asked[1]
    assert ("repetition_penalty" in server.asked[0]) is ours


@pytest.mark.parametrize("names", [[], ["a", "b"]])
def test_none_or_several_models_must_be_named(names: list[str]) -> None:
    with serving() as server:
        server.models = {"data": [{"id": name} for name in names]}
        with pytest.raises(InvalidRequestError, match=f"x={server.url}#MODEL"):
            connect(Address("x", server.url, None))
        assert connect(Address("x", server.url, "b")).endpoint.model == "b"


@pytest.mark.parametrize("models", [["x"], {"data": 3}, {"data": [1, {"no": "id"}]}, "text"])
def test_a_list_of_models_in_another_shape_counts_as_none(models: Any) -> None:
    with serving() as server:
        server.models = models
        with pytest.raises(InvalidRequestError, match="does not list its models"):
            connect(Address("x", server.url, None))


def test_a_server_that_refuses_stream_options_is_measured_without_usage() -> None:
    def strict(body: dict[str, Any]) -> Iterator[bytes]:
        if "stream_options" in body:
            raise RefusalError(422, {"error": {"message": "unknown field stream_options"}})
        yield from echo(body)

    with serving(strict) as server:
        assert connect(Address("x", server.url, None)).endpoint.include_usage is False


@pytest.mark.parametrize(("status", "kind"), [(404, ModelNotFoundError), (500, EngineError), (400, EngineError)])
def test_a_server_that_cannot_answer_is_found_out_before_the_work(status: int, kind: type[Exception]) -> None:
    def refuse(_: dict[str, Any]) -> Iterator[bytes]:
        raise RefusalError(status, {"error": {"message": "never"}})
        yield b""

    with serving(refuse) as server, pytest.raises(kind, match=r"(?s)x at .*never"):
        connect(Address("x", server.url, "wrong"))


def test_where_nobody_answers_the_message_says_so_in_one_line() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(OfflineError, match="nothing answers at") as caught:
            connect(Address("x", url, None))
    assert "\n" not in str(caught.value)
