"""On real sockets: broken HTTP, bursts, stalled and departing clients, and the end of the server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.unit.server.fake import FakeLLM, wait_for

Address = tuple[str, int]
BODY = {"messages": [{"role": "user", "content": "hi"}], "seed": 1}


def request(body: dict, *, path: str = "/v1/chat/completions", extra: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\nConnection: close\r\n{extra}\r\n"
    return head.encode() + data


def exchange(address: Address, data: bytes, timeout_s: float = 20) -> bytes:
    with socket.create_connection(address, timeout_s) as connection:
        connection.sendall(data)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def good(address: Address) -> str:
    reply = exchange(address, request(BODY))
    assert reply.startswith(b"HTTP/1.1 200"), reply
    return json.loads(reply.split(b"\r\n\r\n", 1)[1])["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "data",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    ],
)
def test_broken_http_is_answered_with_a_4xx(address: Address, data: bytes) -> None:
    before = good(address)
    assert exchange(address, data).startswith(b"HTTP/1.1 4")
    assert good(address) == before


def test_a_header_that_does_not_end_closes_that_connection_only(address: Address) -> None:
    before = good(address)
    with contextlib.suppress(ConnectionError):  # the server does not read it to the end
        reply = exchange(address, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 5_000_000)
        assert reply.startswith(b"HTTP/1.1 4")
    assert good(address) == before


def test_a_body_of_100_megabytes_is_answered_with_a_413(address: Address) -> None:
    before = good(address)
    size = 100 << 20
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n".encode()
    with socket.create_connection(address, 60) as connection:
        connection.sendall(head)
        block = b"x" * (1 << 20)
        for _ in range(100):
            connection.sendall(block)
        assert read_all(connection).startswith(b"HTTP/1.1 413")
    assert good(address) == before


def test_a_body_of_a_terabyte_is_refused_before_it_is_sent(address: Address) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
    assert exchange(address, head).startswith(b"HTTP/1.1 413")


def test_200_connections_at_once_are_all_answered_alike(address: Address) -> None:
    wanted = good(address)
    sockets = [socket.create_connection(address, 30) for _ in range(200)]
    try:
        for connection in sockets:
            connection.sendall(request(BODY))
        replies = [read_all(connection) for connection in sockets]
    finally:
        for connection in sockets:
            connection.close()
    assert all(r.startswith(b"HTTP/1.1 200") and f'"{wanted}"'.encode() in r for r in replies)


def test_stalled_bodies_hold_nobody_up_and_are_timed_out(address: Address) -> None:
    wanted = good(address)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
    stalled = [socket.create_connection(address, 30) for _ in range(300)]
    silent = socket.create_connection(address, 30)
    try:
        for connection in stalled:
            connection.sendall(head)
        start = time.perf_counter()
        assert good(address) == wanted
        assert time.perf_counter() - start < 3
        assert read_all(stalled[0]).startswith(b"HTTP/1.1 408")
        assert read_all(silent) == b""
    finally:
        for connection in [*stalled, silent]:
            connection.close()
    assert good(address) == wanted


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_generations(address: Address, llm: FakeLLM, stream: bool) -> None:
    llm.endless, llm.delay_s = True, 0.01
    connection = socket.create_connection(address, 10)
    connection.sendall(request(BODY | {"max_tokens": 4000, "stream": stream, "n": 2}))
    assert wait_for(lambda: len(llm.made) == 2)
    if stream:
        assert b"data:" in connection.recv(4096) + connection.recv(4096)
    connection.close()
    assert wait_for(lambda: all(g.cancelled.is_set() for g in llm.made), 5)


def test_a_client_that_leaves_before_the_first_token_cancels_too(address: Address, llm: FakeLLM) -> None:
    llm.endless, llm.delay_s = True, 30
    connection = socket.create_connection(address, 10)
    connection.sendall(request(BODY | {"stream": True}))
    assert wait_for(lambda: len(llm.made) == 1)
    time.sleep(0.1)
    connection.close()
    assert wait_for(lambda: llm.made[0].cancelled.is_set(), 5)


def test_streams_of_many_clients_do_not_mix(address: Address, llm: FakeLLM) -> None:
    llm.delay_s = 0.005
    replies: dict[int, bytes] = {}

    def ask(seed: int) -> None:
        replies[seed] = exchange(address, request(BODY | {"seed": seed, "stream": True}))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    llm.delay_s = 0
    for seed, reply in replies.items():
        alone = json.loads(exchange(address, request(BODY | {"seed": seed})).split(b"\r\n\r\n", 1)[1])
        chunks = [line[6:] for line in reply.decode().splitlines() if line.startswith("data: {")]
        text = "".join(json.loads(c)["choices"][0]["delta"].get("content", "") for c in chunks)
        assert text == alone["choices"][0]["message"]["content"]


SERVE = """
import sys
from mlxinfer.server.run import serve
from tests.unit.server.fake import FakeLLM
llm = FakeLLM()
llm.endless, llm.delay_s = {endless}, 0.02
serve({{"tiny": llm}}, port=0, grace_s={grace}, on_started=lambda host, port: print(port, flush=True))
print("drained", flush=True)
"""


def start(code: str) -> tuple[subprocess.Popen, Address]:
    process = subprocess.Popen([sys.executable, "-W", "error::RuntimeWarning", "-c", code], stdout=-1, text=True)
    assert process.stdout is not None
    return process, ("127.0.0.1", int(process.stdout.readline()))


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_stream_finish_and_exits_with_0(sig: int) -> None:
    process, address = start(SERVE.format(endless=False, grace=20))
    with socket.create_connection(address, 20) as connection:
        connection.sendall(request(BODY | {"stream": True}))
        assert connection.recv(10)
        os.kill(process.pid, sig)
        reply = read_all(connection)
    out, _ = process.communicate(timeout=30)
    assert reply.rstrip().endswith(b"data: [DONE]") or b"[DONE]" in reply
    assert process.returncode == 0
    assert out == "drained\n"


def test_sigterm_ends_a_stream_that_does_not_finish_with_an_error_event() -> None:
    process, address = start(SERVE.format(endless=True, grace=0.3))
    with socket.create_connection(address, 20) as connection:
        connection.sendall(request(BODY | {"stream": True, "max_tokens": 4000}))
        assert connection.recv(10)
        process.terminate()
        reply = read_all(connection)
    process.communicate(timeout=30)
    last = [line for line in reply.decode().splitlines() if line.startswith("data: ")][-1]
    assert json.loads(last[6:])["error"]["code"] == "engine_closed"
    assert process.returncode == 0


def test_sigterm_with_an_idle_and_a_stalled_connection_exits_with_0() -> None:
    process, address = start(SERVE.format(endless=False, grace=0.3))
    with socket.create_connection(address, 20), socket.create_connection(address, 20) as stalled:
        stalled.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        time.sleep(0.2)
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0
