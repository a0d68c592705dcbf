"""On real sockets: broken HTTP, bursts, stalled and departing clients, and the end of the server."""

from __future__ import annotations

import contextlib
import json
import os
import select
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
    stalled = [socket.create_connection(address, 30) for _ in range(500)]
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


def test_stalled_bodies_take_nobodys_place_and_requests_at_work_do() -> None:
    code = SERVE.format(endless=True, grace=0.3).replace("port=0", "port=0, max_requests=2")
    process, address = start(code)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
    stalled = [socket.create_connection(address, 20) for _ in range(5)]
    streams = [socket.create_connection(address, 20) for _ in range(2)]
    try:
        for connection in stalled:
            connection.sendall(head)
        for connection in streams:
            connection.sendall(request(BODY | {"stream": True, "max_tokens": 4000}))
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert exchange(address, request(BODY)).startswith(b"HTTP/1.1 429")
        streams.pop().close()
        time.sleep(0.5)
        assert exchange(address, request(BODY | {"max_tokens": 1})).startswith(b"HTTP/1.1 200")
    finally:
        for connection in [*stalled, *streams]:
            connection.close()
        process.terminate()
        process.communicate(timeout=30)


def test_headers_that_trickle_in_end_with_the_time_they_have(address: Address) -> None:
    start = time.perf_counter()
    with socket.create_connection(address, 30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        with contextlib.suppress(ConnectionError):
            while not select.select([connection], [], [], 0.2)[0] and time.perf_counter() - start < 20:
                connection.sendall(b"X: y\r\n")
            assert connection.recv(10) == b""
    assert 4 < time.perf_counter() - start < 20  # body_timeout_s is 5


def test_chunks_without_an_end_are_timed_out_and_those_beyond_the_limit_refused(address: Address) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert exchange(address, head + b"1\r\n{\r\n").startswith(b"HTTP/1.1 408")
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    assert exchange(address, head + chunk * 11 + b"0\r\n\r\n").startswith(b"HTTP/1.1 413")
    assert exchange(address, head + b"zz\r\n").startswith(b"HTTP/1.1 400")
    assert good(address)


def test_requests_sent_in_one_piece_are_answered_in_their_order(address: Address) -> None:
    get = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
    reply = exchange(address, get % b"/health" + get % b"/nothing" + get % b"/ready" + request(BODY))
    assert [int(part[:3]) for part in reply.split(b"HTTP/1.1 ")[1:]] == [200, 404, 200, 200]


def test_a_client_that_waits_for_leave_to_send_gets_it_or_the_refusal(address: Address) -> None:
    body = json.dumps(BODY).encode()
    head = "POST {} HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    with socket.create_connection(address, 20) as connection:
        connection.sendall(head.format("/v1/chat/completions", "localhost", len(body)).encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    with socket.create_connection(address, 20) as connection:
        connection.sendall(head.format("/v1/chat/completions", "evil.example", 1 << 30).encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 421")


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


DRIPPED = {
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HTTP/1.1\r\nX: ": b"HTTP/1.1 200",
    b"POST /v1/nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n": b"HTTP/1.1 404",
    b"POST /v1/completions HTTP/1.1\r\nHost: evil\r\nContent-Length: 99999\r\n\r\n": b"HTTP/1.1 421",
}


def test_clients_that_drip_bytes_after_an_answer_are_closed(address: Address) -> None:
    dripping = [socket.create_connection(address, 10) for _ in DRIPPED]
    for connection, (first, answer) in zip(dripping, DRIPPED.items(), strict=True):
        connection.sendall(first)
        assert connection.recv(65536).startswith(answer)
        connection.settimeout(0.05)
    end = time.monotonic() + 9  # the limit is 5 s
    while dripping and time.monotonic() < end:
        for connection in tuple(dripping):
            try:
                connection.sendall(b"a")
                closed = connection.recv(65536) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                closed = True
            if closed:
                dripping.remove(connection)
                connection.close()
        time.sleep(0.05)
    assert not dripping


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"\xff\xfe\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000, 431),
    ],
)
def test_broken_http_gets_the_error_shape_of_every_other_failure(address: Address, data: bytes, status: int) -> None:
    head, _, body = exchange(address, data).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status}".encode())
    assert b"application/json" in head
    assert json.loads(body)["error"]["code"] in ("invalid_http", "wrong_host")


def test_a_large_prompt_is_refused_at_once_and_holds_nobody_up(address: Address) -> None:
    big = request({"messages": [{"role": "user", "content": "a" * 9_000_000}]})
    replies: list[bytes] = []
    threads = [threading.Thread(target=lambda: replies.append(exchange(address, big, 60))) for _ in range(8)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    good(address)
    assert time.perf_counter() - start < 5
    for thread in threads:
        thread.join()
    assert time.perf_counter() - start < 20
    assert all(b"context_length_exceeded" in reply for reply in replies)


def test_many_prompts_of_which_the_last_cannot_fit_are_refused_before_any_is_encoded(
    address: Address, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = llm.tokenizer.encode
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, **kw: (encoded.append(text), encode(text, **kw))[1])
    reply = exchange(address, request({"prompt": ["a", "b", "c" * 1_000_000]}, path="/v1/completions"))
    assert b"context_length_exceeded" in reply
    assert encoded == []


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
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", code]
    process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True)
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


def test_sigterm_while_a_body_is_sent_and_another_client_does_not_read_ends_in_time_and_quietly() -> None:
    process, address = start(SERVE.format(endless=True, grace=0.5).replace("0.02", "0.0005"))
    blocked = socket.socket()
    blocked.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    with socket.create_connection(address, 20) as sending, blocked:
        blocked.settimeout(20)
        blocked.connect(address)
        blocked.sendall(request(BODY | {"stream": True, "max_tokens": 4000, "n": 8}))
        sending.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
        time.sleep(1.5)
        begin = time.perf_counter()
        process.terminate()
        reply = read_all(sending)
        assert time.perf_counter() - begin < 1
        _, errors = process.communicate(timeout=30)
        assert time.perf_counter() - begin < 4
    assert reply.startswith(b"HTTP/1.1 503")
    assert json.loads(reply.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "shutting_down"
    assert process.returncode == 0
    assert errors == ""


def test_a_second_signal_ends_what_runs_at_once() -> None:
    process, address = start(SERVE.format(endless=True, grace=60))
    with socket.create_connection(address, 20) as connection:
        connection.sendall(request(BODY | {"stream": True, "max_tokens": 4000}))
        assert connection.recv(10)
        process.terminate()
        time.sleep(0.5)
        assert process.poll() is None
        process.terminate()
        reply = read_all(connection)
    process.communicate(timeout=30)
    assert b"engine_closed" in reply
    assert process.returncode == 0


def test_connections_beyond_the_files_a_process_may_open_are_told_so() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))"
    process, address = start(limit + SERVE.format(endless=False, grace=0.3))
    taken = [socket.create_connection(address, 20) for _ in range(100)]
    try:
        time.sleep(0.3)
        with socket.create_connection(address, 20) as connection:
            reply = read_all(connection)
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert b"too_many_connections" in reply
        taken.pop().close()
        time.sleep(0.3)
        assert good(address)
    finally:
        for connection in taken:
            connection.close()
        process.terminate()
        process.communicate(timeout=30)


def test_clients_that_leave_and_upgrades_nobody_offers_leave_no_trace_in_the_log() -> None:
    process, address = start(SERVE.format(endless=True, grace=0.3).replace("0.02", "0.0005"))
    for _ in range(5):
        connection = socket.create_connection(address, 20)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        connection.sendall(request(BODY | {"stream": True, "max_tokens": 4000, "n": 8}))
        assert connection.recv(10)
        connection.close()
    upgrade = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    with socket.create_connection(address, 20) as connection:
        connection.sendall(upgrade)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
    time.sleep(0.3)
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert errors == ""
