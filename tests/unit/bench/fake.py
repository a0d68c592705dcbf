"""A small OpenAI-compatible server that answers by script, in threads of the test's own process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BOUND_S = 10.0
"""No wait of a script is longer; a test that runs into it fails by what it then sees."""


def chunk(text: str, **fields: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **fields})


def event(payload: Any) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}})


STOP = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
DONE = b"data: [DONE]\n\n"

Script = Callable[[dict[str, Any]], Iterator[bytes]]
"""From a request's body to the bytes of its answer, piece by piece."""


def echo(body: dict[str, Any]) -> Iterator[bytes]:
    """As many chunks of one token as were asked for, then usage."""
    yield event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": None})
    for i in range(body["max_tokens"]):
        yield chunk(f" w{i}", system_fingerprint="fake-1")
    yield STOP + usage(sum(len(m["content"].split()) for m in body["messages"]), body["max_tokens"], 0) + DONE


class RefusalError(Exception):
    """Raised by a script: an answer other than 200."""

    def __init__(self, status: int, body: Any) -> None:
        self.status, self.body = status, body


class FakeServer(ThreadingHTTPServer):
    """What it was asked, in order, and the script that answers."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, script: Script = echo) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.models: Any = {"data": [{"id": "fake-model", "owned_by": "somebody"}]}
        self.pages: dict[str, tuple[int, Any]] = {}
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    @property
    def fake(self) -> FakeServer:
        assert isinstance(self.server, FakeServer)
        return self.server

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _json(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, self.fake.models)
        else:
            self._json(*self.fake.pages.get(self.path, (404, {"error": "nothing here"})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.fake.lock:
            self.fake.asked.append(body)
            self.fake.headers.append({key.lower(): value for key, value in self.headers.items()})
        pieces = self.fake.script(body)
        try:
            first = next(pieces, b"")
        except RefusalError as refusal:
            self._json(refusal.status, refusal.body)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            self.wfile.write(first)
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()
        except ConnectionError:
            return  # the client left


@contextmanager
def serving(script: Script = echo) -> Iterator[FakeServer]:
    with FakeServer(script) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
