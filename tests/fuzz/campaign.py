"""Sends the requests and judges the answers."""

from __future__ import annotations

import collections
import contextlib
import json
import random
import time
from typing import TYPE_CHECKING, Any

import httpx

from tests import tiny
from tests.fuzz.bodies import GOOD, mutated, raw
from tests.serving import served
from tests.unit.encoders import tiny as encoders

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHATS, EMBEDS = "tiny", "encoder"
SLOW_S = 5.0
CANARY_EVERY = 20
CANARY = {"messages": [{"role": "user", "content": "what is the capital of france?"}], "max_tokens": 12,
          "temperature": 0, "seed": 1}  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH")
HEADERS: list[dict[str, str]] = [
    {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}, {"accept": "text/html"},
    {"x-request-id": "a" * 500}, {"x-request-id": "ok-1"}, {"anthropic-version": "2023-06-01"},
    {"authorization": "Bearer x"}, {"x-api-key": "~!"}, {"accept-encoding": "br"}, {"expect": "100-continue"},
]  # fmt: skip


@contextlib.contextmanager
def server(home: Path) -> Iterator[str]:
    """A server on a tiny model and a tiny encoder."""
    models = (f"{CHATS}={tiny.write_folder(home / CHATS)}", f"{EMBEDS}={encoders.write_folder(home / EMBEDS)}")
    with served(models, home, "--access-log", "off") as url:
        yield url


class Campaign:
    """One run with a seed. `findings` are what must not be."""

    def __init__(self, url: str, seed: int) -> None:
        self._client = httpx.Client(base_url=url, timeout=SLOW_S * 4)
        self._drawn = random.Random(seed)
        self.findings: list[dict[str, Any]] = []
        self.statuses: collections.Counter[int] = collections.Counter()
        self.sent = 0
        self._expected = self._canary()

    def close(self) -> None:
        self._client.close()

    def run(self, requests: int) -> None:
        """Send so many, canaries not counted."""
        for i in range(requests):
            method, path, body = self._drawn.choice(GOOD)
            data = None if body is None else raw(self._body(path, body), self._drawn)
            headers = dict(self._drawn.choice(HEADERS)) if self._drawn.random() < 0.1 else {}
            if self._drawn.random() < 0.03:
                method = self._drawn.choice(METHODS)
            if self._drawn.random() < 0.03:
                path += self._drawn.choice(("/", "/x", "?a=b", "/%2e%2e/x", "%00", "/" + "a" * 3000))
            found = self._one(method, path, data, headers)
            if found or i % CANARY_EVERY == 0:
                self._check_canary()
        counted = [line for line in self._client.get("/metrics").text.splitlines() if "internal_error" in line]
        if counted:
            self._found({}, f"counted by the server: {counted}")

    def _body(self, path: str, body: dict[str, Any]) -> Any:
        fits = EMBEDS if path.endswith(("/embeddings", "/rerank", "/embed")) else CHATS
        named = {"model": fits if self._drawn.random() < 0.9 else self._drawn.choice((CHATS, EMBEDS)), **body}
        return named if self._drawn.random() < 0.1 else mutated(named, self._drawn)

    def _one(self, method: str, path: str, data: bytes | None, headers: dict[str, str]) -> bool:
        start = time.monotonic()
        request = {"method": method, "path": path[:200], "body": (data or b"")[:600].decode("utf-8", "replace")}
        self.sent += 1
        try:
            answer = self._client.request(method, path, content=data, headers=headers)
        except httpx.HTTPError as error:
            return self._found(request, f"{type(error).__name__}: {error}")
        took = time.monotonic() - start
        self.statuses[answer.status_code] += 1
        if answer.status_code >= 500 and answer.status_code != 503:
            return self._found(request, f"{answer.status_code}: {answer.text[:300]}")
        if took > SLOW_S:
            return self._found(request, f"took {took:.1f} s, then {answer.status_code}")
        if answer.status_code >= 400 and method != "HEAD" and not self._is_error(answer):
            return self._found(request, f"{answer.status_code} without an error object: {answer.text[:200]}")
        if "internal error; the server's log" in answer.text:
            return self._found(request, f"an internal error in a stream: {answer.text[-300:]}")
        return False

    @staticmethod
    def _is_error(answer: httpx.Response) -> bool:
        try:
            return "error" in answer.json()
        except ValueError:
            return False

    def _canary(self) -> tuple[int, str]:
        try:
            answer = self._client.post("/v1/chat/completions", json={"model": CHATS, **CANARY})
            return answer.status_code, answer.json()["choices"][0]["message"]["content"]
        except (httpx.HTTPError, ValueError, LookupError) as error:
            return 0, f"{type(error).__name__}: {error}"

    def _check_canary(self) -> None:
        found = self._canary()
        if found != self._expected:
            self._found({"canary": True}, f"{found} instead of {self._expected}")

    def _found(self, request: dict[str, Any], what: str) -> bool:
        self.findings.append({"what": what, **request})
        print(json.dumps(self.findings[-1]), flush=True)
        return True

    def summary(self) -> str:
        """One line of JSON."""
        return json.dumps({"sent": self.sent, "findings": len(self.findings), "statuses": dict(self.statuses)})
