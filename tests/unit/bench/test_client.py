"""One request: what is read off a stream, whatever the server's habits, and what becomes of failures."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.bench.client import Endpoint, EventReader, Record, ask, new_http
from tests.unit.bench.fake import BOUND_S, DONE, STOP, RefusalError, chunk, event, serving, usage

if TYPE_CHECKING:
    from collections.abc import Iterator

HI = [{"role": "user", "content": "hi"}]


def read(*parts: tuple[float, bytes]) -> Record:
    record = Record("x", "p", 0, 0)
    reader = EventReader(record)
    for now, data in parts:
        reader.feed(data, now)
    reader.close()
    return record


def asked(url: str, *, timeout_s: float = BOUND_S, **fields: Any) -> Record:
    async def go() -> Record:
        async with new_http(url) as http:
            return await ask(http, Endpoint(url, "m", **fields), HI, 8, Record("x", "p", 0, 0), timeout_s=timeout_s)

    return asyncio.run(go())


def test_chunks_get_the_moment_their_last_byte_came_and_usage_is_read() -> None:
    hello = chunk("hello", system_fingerprint="v1")
    record = read((1.0, hello[:20]), (2.0, hello[20:]), (3.0, chunk(" you") + STOP + usage(7, 2, 3) + DONE))
    assert record.events == [(2.0, "hello"), (3.0, " you")]
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (7, 2, 3)
    assert (record.finish_reason, record.fingerprint, record.error) == ("stop", "v1", None)
    assert record.text == "hello you"


def test_what_is_no_text_is_no_event() -> None:
    opening = event({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None})
    odd = event({"choices": [{"delta": {"content": None}}]}) + event({"choices": [{}]}) + event({"choices": None})
    record = read((1.0, b": keep-alive\n\n" + opening + odd), (2.0, chunk("a") + STOP + DONE))
    assert record.events == [(2.0, "a")]
    assert (record.completion_tokens, record.error) == (None, None)


def test_thinking_is_text_too() -> None:
    thinking = event({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    assert read((1.0, thinking), (2.0, chunk("a") + STOP)).events == [(1.0, "hm"), (2.0, "a")]


def test_carriage_returns_and_missing_spaces_are_taken() -> None:
    payload = json.dumps({"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}).encode()
    record = read((1.0, b"event: x\r\ndata:" + payload + b"\r\n\r\ndata: [DONE]\r\n\r\n"))
    assert (record.events, record.finish_reason, record.error) == ([(1.0, "a")], "length", None)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (chunk("a"), "the stream broke off"),
        (b'{"choices": []}', "no events came: it does not stream"),
        (chunk("a") + event({"error": {"message": "out of\nmemory"}}), "error event: out of memory"),
        (b"data: {nonsense\n\n" + DONE, "an event is no JSON object"),
        (b"data: [1]\n\n" + DONE, "an event is no JSON object"),
        # A server that is the first to fail, then closes properly.
        (event({"error": "no"}) + DONE, "error event: no"),
    ],
)
def test_a_stream_that_goes_wrong_is_an_error_that_says_how(data: bytes, wanted: str) -> None:
    assert wanted in (read((1.0, data)).error or "")


def test_a_stream_without_done_but_with_a_finish_reason_is_whole() -> None:
    assert read((1.0, chunk("a") + STOP)).error is None


def test_odd_usage_counts_as_none() -> None:
    record = read(
        (1.0, chunk("a") + STOP + event({"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": "2"}}))
    )
    assert (record.prompt_tokens, record.completion_tokens) == (None, None)
    assert read((1.0, event({"choices": [], "usage": [1]}) + STOP)).error is None


def test_a_request_is_greedy_and_streams_and_carries_its_extra_fields_and_headers() -> None:
    with serving() as server:
        record = asked(server.url, headers={"authorization": "Bearer k"}, extra={"ignore_eos": True})
        asked(server.url, include_usage=False)
    assert record.error is None
    assert (record.completion_tokens, len(record.events)) == (8, 8)
    assert 0 < record.start < record.events[0][0] <= record.end
    first, second = server.asked
    assert first == {
        "model": "m",
        "messages": HI,
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert "stream_options" not in second
    assert server.headers[0]["authorization"] == "Bearer k"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"error": {"message": "slow down"}}, "HTTP 429: slow down"),
        ({"error": "busy"}, "HTTP 429: busy"),
        ({"detail": "queue"}, "HTTP 429: queue"),
        (["x"], "HTTP 429: ['x']"),
    ],
)
def test_an_error_response_is_told_by_status_and_message(body: Any, wanted: str) -> None:
    def refuse(_: dict[str, Any]) -> Iterator[bytes]:
        raise RefusalError(429, body)
        yield b""

    with serving(refuse) as server:
        assert asked(server.url).error == wanted


def test_a_server_that_is_not_there_is_an_error_and_not_an_exception() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        assert (asked(url).error or "").startswith("ConnectError")


def test_a_request_that_does_not_end_is_cut_off_at_its_timeout() -> None:
    over = threading.Event()

    def hang(_: dict[str, Any]) -> Iterator[bytes]:
        yield chunk("a")
        over.wait(BOUND_S)

    with serving(hang) as server:
        record = asked(server.url, timeout_s=0.3)
        over.set()
    assert record.error == "no end within 0.3 s"
    assert len(record.events) == 1
