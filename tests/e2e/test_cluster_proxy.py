"""`mlxinfer cluster proxy` with the real HAProxy in front of three real servers."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from mlxinfer.config import load_settings
from tests import tiny

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HAPROXY = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/bin")
pytestmark = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed: apt-get install haproxy")

REPLICAS, CONVERSATIONS, TURNS, AT_ONCE = 3, 40, 4, 8
RUNS, WAITS = 4, 4
"""Of each replica at a time; together what the proxy sends it."""
SYSTEM = {"role": "system", "content": "the quick brown fox is the only one who answers here. " * 8}
CHAT = "/v1/chat/completions"
MARK = "x-mlxinfer-replica"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Replicas:
    """Three servers and the proxy, which can lose one and get it back."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.model = tiny.write_folder(home / "m", max_position_embeddings=8192)
        self.ports = [free_port() for _ in range(REPLICAS)]
        self.servers = [self.start(index) for index in range(REPLICAS)]
        for index in range(REPLICAS):
            self.wait(index)
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.config = home / "haproxy.cfg"
        named = [f"--replica=r{index}=127.0.0.1:{at}" for index, at in enumerate(self.ports)]
        options = ["--port", str(port), "--max-requests", str(RUNS + WAITS), "-o", str(self.config), "--json"]
        command = [sys.executable, "-m", "mlxinfer", "cluster", "proxy", *named, *options]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        self.socket = json.loads(made.stdout)["socket"]
        assert HAPROXY is not None
        with (home / "haproxy.log").open("wb") as log:
            self.proxy = subprocess.Popen([HAPROXY, "-f", str(self.config)], stdout=log, stderr=log)
        until = time.monotonic() + 30
        while not os.path.exists(self.socket) and time.monotonic() < until:
            time.sleep(0.05)

    def start(self, index: int) -> subprocess.Popen[bytes]:
        kernels = os.environ.get("MLXINFER_KERNELS_DIR") or str(load_settings().cache_dir / "kernels")
        environment = os.environ | {
            "MLXINFER_CONFIG": os.devnull,
            "MLXINFER_CACHE_DIR": str(self.home / f"cache{index}"),
            "MLXINFER_KERNELS_DIR": kernels,
            "MLXINFER_PREFIX_DISK_MB": "0",
            "MLXINFER_MAX_NUM_SEQS": str(RUNS),
            "MLXINFER_MAX_QUEUE": str(WAITS),
        }
        command = [sys.executable, "-m", "mlxinfer", "serve", f"m={self.model}", "--port", str(self.ports[index])]
        with (self.home / f"replica{index}.log").open("ab") as log:
            return subprocess.Popen([*command, "--access-log", "off"], env=environment, stdout=log, stderr=log)

    def wait(self, index: int) -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until and self.servers[index].poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{self.ports[index]}/ready").status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError((self.home / f"replica{index}.log").read_text()[-3000:])

    def runtime(self, command: str) -> str:
        """An answer of HAProxy's runtime API."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(self.socket)
            connection.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def states(self) -> dict[str, str]:
        rows = [line.split(",") for line in self.runtime("show stat").splitlines() if line.startswith("replicas,r")]
        return {row[1]: row[17].split()[0] for row in rows}

    def until_up(self, wanted: int = REPLICAS) -> None:
        until = time.monotonic() + 30
        while list(self.states().values()).count("UP") != wanted:
            assert time.monotonic() < until, self.states()
            time.sleep(0.1)

    def running(self, index: int) -> int:
        model = httpx.get(f"http://127.0.0.1:{self.ports[index]}/health").json()["models"]["m"]
        return model["running"] + model["waiting"]

    def end(self) -> None:
        for process in (self.proxy, *self.servers):
            process.terminate()
        for process in (self.proxy, *self.servers):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    made = Replicas(tmp_path_factory.mktemp("p"))
    try:
        made.until_up()
        yield made
    finally:
        made.end()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), "temperature": 0, "max_tokens": 8, **fields}


def test_haproxy_takes_the_configuration_without_a_warning(replicas: Replicas) -> None:
    checked = subprocess.run([HAPROXY or "", "-c", "-f", replicas.config], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "WARNING" not in checked.stdout + checked.stderr
    assert os.stat(replicas.socket).st_mode & 0o777 == 0o600


def test_nine_turns_of_ten_land_on_the_prefix_that_the_conversation_has_computed(replicas: Replicas) -> None:
    landed, elsewhere = [], collections.Counter[str]()

    def talk(number: int) -> None:
        messages: list[Any] = [SYSTEM, user(f"conversation {number}: what is the capital of france?")]
        known = 0
        with httpx.Client(base_url=replicas.url, timeout=120) as client:
            for turn in range(TURNS):
                reply = client.post(CHAT, json=body(*messages))
                assert reply.status_code == 200, reply.text
                usage, told = reply.json()["usage"], reply.json()["choices"][0]["message"]["content"]
                if turn:
                    landed.append(usage["prompt_tokens_details"]["cached_tokens"] >= known - 4)
                known = usage["prompt_tokens"]
                elsewhere[reply.headers[MARK]] += 1
                messages += [{"role": "assistant", "content": told}, user(f"and turn {turn}?")]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(talk, range(CONVERSATIONS)))
    assert len(landed) == CONVERSATIONS * (TURNS - 1)
    share = sum(landed) / len(landed)
    print(f"{share:.1%} of turns on their prefix; requests {dict(elsewhere)}")
    assert share >= 0.9
    assert min(elsewhere[f"r{index}"] for index in range(REPLICAS)) >= CONVERSATIONS * TURNS / REPLICAS / 4


PARTS = [{"type": "text", "text": "<context>the same for all</context>"}, {"type": "text", "text": "question NUMBER"}]
LONG = "what is the capital of france? " * 20
FORMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (CHAT, body(SYSTEM, user("question NUMBER")), "messages"),
    "no system message": (CHAT, body(user("question NUMBER")), "messages"),
    "two system messages": (CHAT, body(SYSTEM, {"role": "developer", "content": "x"}, user("NUMBER")), "messages"),
    "parts": (CHAT, body(SYSTEM, {"role": "user", "content": PARTS}), "messages"),
    "escapes": (CHAT, body(SYSTEM, user('"\\ud83d\\n\u6771\u4eac" \\ NUMBER {[')), "messages"),
    "content before role": (CHAT, body({"content": 'NUMBER {"role": "x"}', "role": "user"}), "messages"),
    "anthropic": ("/v1/messages", body(user("NUMBER"), system=[{"type": "text", "text": "SALT"}]), "messages"),
    "responses": ("/v1/responses", {"model": "m", "input": [user("NUMBER")], "max_output_tokens": 8}, "input"),
    "ollama": (
        "/api/chat",
        {"model": "m", "stream": False, "messages": [SYSTEM, user("NUMBER")], "options": {"num_predict": 8}},
        "messages",
    ),
    "deep tools in front": (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"input": {}}}}}]}
        | body(user("NUMBER")),
        "messages",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_turn_goes_where_the_first_went_however_the_client_writes_it(replicas: Replicas, form: str) -> None:
    """Alone: what is at work elsewhere moves nothing."""
    path, sent, field = FORMS[form]
    seen = collections.Counter[str]()
    with httpx.Client(base_url=replicas.url, timeout=60) as client:
        # Where none comes to a replica is chance: one in fifty thousand runs.
        for number in range(30):
            first = json.loads(json.dumps(sent).replace("NUMBER", f"{number} {LONG[number:]}"))
            where = set[str]()
            # The third is larger than what is looked into, the last than what can be sent again.
            for more in ("", "and more", "x" * (400 << 10), "x" * (1200 << 10)):
                messages = [*first[field]]
                if more:
                    messages += [{"role": "assistant", "content": "yes"}, user(more)]
                text = json.dumps(first | {field: messages}).replace("SALT", f"{time.time_ns()}")
                reply = client.post(path, content=text, headers={"content-type": "application/json"})
                assert reply.status_code in (200, 400), reply.text
                where.add(reply.headers[MARK])
                if number:
                    break
            assert len(where) == 1, (number, where)
            seen[where.pop()] += 1
    assert len(seen) == REPLICAS, seen


@pytest.mark.parametrize("header", ["x-session-id", "session_id", "x-claude-code-session-id"])
def test_a_session_header_comes_before_what_is_in_the_body(replicas: Replicas, header: str) -> None:
    with httpx.Client(base_url=replicas.url, timeout=60) as client:

        def asked(session: str, text: str) -> str:
            return client.post(CHAT, json=body(user(text), max_tokens=1), headers={header: session}).headers[MARK]

        assert len({asked("one", f"text {number}") for number in range(8)}) == 1
        assert len({asked(f"{number}", "same text") for number in range(16)}) == REPLICAS


def test_a_stored_response_is_continued_where_it_is(replicas: Replicas) -> None:
    with httpx.Client(base_url=replicas.url, timeout=60) as client:
        seen = set[str]()
        for number in range(12):
            asked = {"model": "m", "input": f"response {number}", "max_output_tokens": 4}
            first = client.post("/v1/responses", json=asked | {"stream": number % 2 == 1})
            lines = [line[6:] for line in first.text.splitlines() if line.startswith("data: ")]
            made = json.loads(lines[0])["response"] if lines else first.json()
            more = asked | {"previous_response_id": made["id"], "input": "and then?"}
            second = client.post("/v1/responses", json=more)
            assert second.status_code == 200, second.text
            assert client.get(f"/v1/responses/{second.json()['id']}").status_code == 200
            assert first.headers[MARK] == second.headers[MARK]
            seen.add(first.headers[MARK])
        assert len(seen) == REPLICAS


def test_more_than_a_replica_takes_waits_in_the_proxy(replicas: Replicas) -> None:
    """All of them of one conversation: a replica takes eight, and alone it would answer 429."""
    with ThreadPoolExecutor(40) as pool:
        asked = body(SYSTEM, user("hot"))
        waiting = [pool.submit(httpx.post, f"{replicas.url}{CHAT}", json=asked, timeout=120) for _ in range(40)]
        replies = [one.result() for one in waiting]
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.headers[MARK] for reply in replies}) > 1, "a hot prefix is one machine's alone"


class Told:
    """One request's end."""

    def __init__(self) -> None:
        self.status = 0
        self.events = 0
        self.silences = 0
        self.whole = False
        self.replica = ""
        self.error = ""


def ask(url: str, number: int, told: Told, *, stream: bool, tokens: int = 200) -> None:
    asked = body(SYSTEM, user(f"under load {number}"), max_tokens=tokens, ignore_eos=True, stream=stream)
    try:
        with httpx.stream("POST", f"{url}{CHAT}", json=asked, timeout=240) as reply:
            told.status, told.replica = reply.status_code, reply.headers.get(MARK, "")
            if stream:
                for line in reply.iter_lines():
                    told.events += line.startswith("data: {")
                    told.silences += line.startswith(":")
                    told.whole |= line == "data: [DONE]"
            else:
                told.whole = json.loads(reply.read())["usage"]["completion_tokens"] == tokens
    except (httpx.TransportError, ValueError, KeyError) as error:
        told.error = repr(error)


def test_a_replica_that_is_killed_under_load_loses_nothing_that_has_not_streamed(replicas: Replicas) -> None:
    asked = [(Told(), number % 2 == 0) for number in range(36)]
    threads = [
        threading.Thread(target=ask, args=(replicas.url, number, told), kwargs={"stream": stream})
        for number, (told, stream) in enumerate(asked)
    ]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60
    while replicas.running(0) < RUNS + 1 or not any(told.replica == "r0" and told.events > 1 for told, _ in asked):
        assert time.monotonic() < until
        time.sleep(0.005)
    replicas.servers[0].send_signal(signal.SIGKILL)
    replicas.servers[0].wait()
    for thread in threads:
        thread.join(240)
    cut = [told for told, _ in asked if not told.whole]
    retried = replicas.runtime("show stat")
    # The first event says the role; it comes with the second.
    assert all((told.events > 1 or told.silences) and told.replica == "r0" for told in cut), [
        vars(told) for told in cut
    ]
    assert cut, "none was streaming there: nothing was tried"
    row = next(line.split(",") for line in retried.splitlines() if line.startswith("replicas,BACKEND"))
    assert int(row[16]) > 0, "none was sent again"
    until = time.monotonic() + 20
    while replicas.states()["r0"] != "DOWN":
        assert time.monotonic() < until
        time.sleep(0.1)
    # It comes back by itself.
    replicas.servers[0] = replicas.start(0)
    replicas.wait(0)
    replicas.until_up()


def test_a_drained_replica_ends_its_stream_and_gets_nothing_new(replicas: Replicas) -> None:
    replicas.until_up()
    told = Told()
    stream = threading.Thread(target=ask, args=(replicas.url, 7, told), kwargs={"stream": True, "tokens": 1500})
    stream.start()
    until = time.monotonic() + 60
    while not told.replica:
        assert time.monotonic() < until
        time.sleep(0.005)
    drained = told.replica
    assert replicas.runtime(f"set server replicas/{drained} state drain").strip() == ""
    assert replicas.states()[drained] == "DRAIN"
    asked = body(SYSTEM, user("under load 7"))
    others = {httpx.post(f"{replicas.url}{CHAT}", json=asked, timeout=60).headers[MARK] for _ in range(3)}
    assert stream.is_alive(), "it was over before: nothing was tried"
    stream.join(120)
    assert told.whole
    assert drained not in others
    assert replicas.runtime(f"set server replicas/{drained} state ready").strip() == ""
    replicas.until_up()
    assert httpx.post(f"{replicas.url}{CHAT}", json=asked, timeout=60).headers[MARK] == drained


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place(replicas: Replicas, stream: bool) -> None:
    asked = body(SYSTEM, user("leaves"), max_tokens=6000, ignore_eos=True, stream=stream)
    with socket.create_connection(("127.0.0.1", int(replicas.url.rsplit(":", 1)[1]))) as client:
        text = json.dumps(asked)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
        )
        client.sendall(f"{head}\r\n\r\n{text}".encode())
        until = time.monotonic() + 30
        while not sum(map(replicas.running, range(REPLICAS))):
            assert time.monotonic() < until
            time.sleep(0.01)
    until = time.monotonic() + 5
    while sum(map(replicas.running, range(REPLICAS))):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_replica_is_asked_by_the_clients_host_and_its_refusal_comes_back(replicas: Replicas) -> None:
    reply = httpx.get(f"{replicas.url}/v1/models", headers={"host": "evil.example"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (421, "wrong_host")
    assert httpx.get(f"{replicas.url}/v1/models", headers={"origin": "http://evil.example"}).status_code == 403
    assert httpx.get(f"{replicas.url}/ready").status_code == 200
