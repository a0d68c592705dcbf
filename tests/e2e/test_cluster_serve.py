"""`mlxinfer cluster`: two machines' worth of processes on this one, and a server that outlives one of them."""

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
from typing import TYPE_CHECKING, Any

import httpx

from tests import tiny
from tests.adapters import write_adapter
from tests.serving import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ASKED = {
    "model": "m",
    "messages": [{"role": "user", "content": "the quick brown fox"}],
    "temperature": 0,
    "max_tokens": 200,
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def process(home: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`mlxinfer …` with a home of its own and a log beside it."""
    environment = os.environ | {"MLXINFER_CACHE_DIR": str(home / "cache"), "PYTHONUNBUFFERED": "1"}
    with (home / f"{arguments[1]}.log").open("ab") as log:
        made = subprocess.Popen([sys.executable, "-m", "mlxinfer", *arguments], env=environment, stdout=log, stderr=log)
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.terminate()
        try:
            made.wait(30)
        except subprocess.TimeoutExpired:
            made.kill()
            made.wait()


def ready(url: str, server: subprocess.Popen[bytes], home: Path) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError((home / "serve.log").read_text()[-3000:])


def text_of(url: str, at_token: Any = None, model: str = "m") -> str:
    """The reply, streamed; `at_token` is called once, after some of it has come."""
    text, seen = "", 0
    asked = {**ASKED, "model": model, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=120) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            body = json.loads(line[6:])
            assert "error" not in body, body
            for choice in body["choices"]:
                text += choice["delta"].get("content") or ""
            seen += 1
            if at_token is not None and seen == 20:
                at_token()
    return text


def cluster(home: Path) -> tuple[Path, list[str]]:
    """A cluster.toml of two nodes on this machine, and its node arguments."""
    file = home / "cluster.toml"
    nodes = [f"one=127.0.0.1:4:50:{free_port()}", f"two=127.0.0.1:4:50:{free_port()}"]
    flags = [part for node in nodes for part in ("--node", node)]
    made = subprocess.run(
        [sys.executable, "-m", "mlxinfer", "cluster", "init", *flags, "--link", "loopback", "-o", str(file)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "2 machines" in made.stdout
    return file, nodes


def test_a_machine_that_is_lost_in_mid_stream_costs_no_character(tmp_path: Path) -> None:
    source = tiny.write_folder(tmp_path / "m")
    alone = tmp_path / "alone"
    alone.mkdir()
    adapter = ("--adapter", f"mine={write_adapter(tmp_path / 'mine', source, seed=1)}")
    with served([f"m={source}", *adapter], alone) as url:
        wanted, adapted = text_of(url), text_of(url, model="m:mine")
    assert wanted != adapted
    file, _ = cluster(tmp_path)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ["--cluster", str(file), "--port", str(port), "--kind", "tensor", "--access-log", "off", *adapter]
    with process(tmp_path, "cluster", "agent", "--cluster", str(file), "--node", "two") as agent:
        log = tmp_path / "agent.log"
        until = time.monotonic() + 60
        while "listens" not in log.read_text() and time.monotonic() < until:
            time.sleep(0.05)
        with process(tmp_path, "cluster", "serve", str(source), *arguments) as server:
            ready(url, server, tmp_path)
            assert "Plan: tensor over one, two" in (tmp_path / "serve.log").read_text()
            assert text_of(url) == wanted
            again = httpx.post(f"{url}/v1/chat/completions", json=ASKED, timeout=120).json()
            assert again["choices"][0]["message"]["content"] == wanted
            assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["usage"]["prompt_tokens"] - 1

            def lose() -> None:
                # With its ranks: a machine that loses power.
                agent.kill()
                agent.wait()

            with_loss: list[str] = []
            other = threading.Thread(target=lambda: with_loss.append(text_of(url, model="m:mine")))
            other.start()
            assert text_of(url, lose) == wanted
            other.join(120)
            assert with_loss == [adapted]
            assert "Plan: one" in (tmp_path / "serve.log").read_text()
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
