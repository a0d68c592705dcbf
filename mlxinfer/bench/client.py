"""One streamed chat completion, timed chunk by chunk. Whatever goes wrong becomes the record's error, never a zero."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_ERROR_CHARS = 200
TEXT_FIELDS = ("content", "reasoning_content", "reasoning")
"""Of a delta: what a reader sees appear; thinking is text too."""


@dataclass(slots=True)
class Record:
    """What happened to one request; moments are seconds of `time.perf_counter`."""

    label: str
    phase: str
    client: int
    turn: int
    start: float = 0.0
    end: float = 0.0
    events: list[tuple[float, str]] = field(default_factory=list)
    """(moment, text) of each chunk that has text."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """The three are what the server's usage says; None where it doesn't."""
    finish_reason: str | None = None
    fingerprint: str | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.events)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how to ask."""

    url: str
    """Without /v1."""
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields beside those of every request, such as ignore_eos."""
    include_usage: bool = True

    def body(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            **self.extra,
        }
        if self.include_usage:
            fields["stream_options"] = {"include_usage": True}
        return json.dumps(fields, separators=(",", ":")).encode()


def new_http(url: str) -> httpx.AsyncClient:
    """A client for `url` without a pool's limits, proxies or timeouts of its own: `ask` bounds the whole request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # Reading the certificates takes 30 ms that plain HTTP has no use for.
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, verify=url.startswith("https:"))


async def ask(
    http: httpx.AsyncClient,
    endpoint: Endpoint,
    messages: Sequence[Mapping[str, str]],
    max_tokens: int,
    record: Record,
    *,
    timeout_s: float,
    on_text: Callable[[int], None] | None = None,
) -> Record:
    """Send one request and fill `record` in. `on_text(n)` is called after the n-th chunk with text."""
    body = endpoint.body(messages, max_tokens)
    headers = {"content-type": "application/json", "accept": "text/event-stream", **endpoint.headers}
    url = f"{endpoint.url}/v1/chat/completions"
    record.start = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s), http.stream("POST", url, content=body, headers=headers) as response:
            if response.status_code == 200:
                await _read(response, record, on_text)
            else:
                record.error = f"HTTP {response.status_code}: {_message(await response.aread())}"
    except TimeoutError:
        record.error = f"no end within {timeout_s:g} s"
    except httpx.HTTPError as error:
        record.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS].rstrip(": ")
    record.end = time.perf_counter()
    return record


async def _read(response: httpx.Response, record: Record, on_text: Callable[[int], None] | None) -> None:
    reader = EventReader(record)
    async for data in response.aiter_bytes():
        before = len(record.events)
        reader.feed(data, time.perf_counter())
        if on_text is not None and len(record.events) > before:
            on_text(len(record.events))
        if reader.done:
            break
    reader.close()


class EventReader:
    """Bytes of an event stream, with the moments they came at, into a record. Knows no sockets and no clock."""

    def __init__(self, record: Record) -> None:
        self.done = False
        self._record = record
        self._rest = b""
        self._seen = False

    def feed(self, data: bytes, now: float) -> None:
        """Take the next bytes; all events that they complete came `now`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def close(self) -> None:
        """The stream is over; was it whole?"""
        if self._record.error is None and not self.done and self._record.finish_reason is None:
            self._record.error = "the stream broke off" if self._seen else "no events came: it does not stream"

    def _event(self, payload: bytes, now: float) -> None:
        self._seen = True
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(payload)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self._fail(f"an event is no JSON object: {payload[:60]!r}")
        elif event.get("error"):
            self._fail(f"error event: {_message(payload)}")
        else:
            self._chunk(event, now)

    def _chunk(self, event: dict[str, Any], now: float) -> None:
        record = self._record
        if usage := event.get("usage"):
            _take_usage(record, usage)
        if record.fingerprint is None and isinstance(name := event.get("system_fingerprint"), str):
            record.fingerprint = name
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = "".join(part for name in TEXT_FIELDS if isinstance(part := delta.get(name), str))
            if text:
                record.events.append((now, text))
            if reason := choice.get("finish_reason"):
                record.finish_reason = str(reason)

    def _fail(self, message: str) -> None:
        self._record.error = self._record.error or message


def _take_usage(record: Record, usage: Any) -> None:
    if not isinstance(usage, dict):
        return
    details = usage.get("prompt_tokens_details")
    record.prompt_tokens = _count(usage.get("prompt_tokens"))
    record.completion_tokens = _count(usage.get("completion_tokens"))
    record.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _message(raw: bytes) -> str:
    """The message of an error body, in whatever shape it comes, on one line."""
    text = raw.decode("utf-8", "replace")
    try:
        body = json.loads(text)
    except ValueError:
        body = text
    if isinstance(body, dict):
        body = body.get("error") or body.get("detail") or body.get("message") or text
    if isinstance(body, dict):
        body = body.get("message") or text
    return " ".join(str(body).split())[:MAX_ERROR_CHARS]
