"""`mlxinfer ps` and `stop`, and the options of `serve` that run a server."""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.server.announce import FOLDER, RunningServer, announced
from mlxinfer.server.keys import ApiKey
from tests.unit.cli.conftest import error_of
from tests.unit.cli.test_serve import FakeServer, server

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.cli.conftest import FakeLLM, Invoke

__all__ = ["server"]


def test_without_a_server_ps_says_so_and_stop_ends_with_3(invoke: Invoke) -> None:
    assert "No server runs" in invoke("ps").stderr
    assert json.loads(invoke("ps", "--json").stdout) == {"servers": []}
    assert invoke("stop").exit_code == 3
    assert invoke("stop", "8080").exit_code == 3
    assert error_of(invoke("stop", "tiny", "--json"))["code"] == "model_not_found"
    assert invoke("stop", "--all").exit_code == 0
    assert invoke("stop", "--all", "8080").exit_code == 2


def answer_once(listener: socket.socket, body: str) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


@pytest.mark.parametrize(
    ("health", "status", "running"),
    [
        ({"status": "ok", "models": {"tiny": {"status": "loaded", "running": 2, "waiting": 1}}}, "ok", 2),
        ([], "silent", 0),
        ("x" * 10, "silent", 0),
    ],
)
def test_ps_shows_what_the_server_says_of_itself(
    invoke: Invoke, tmp_path: Path, health: Any, status: str, running: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=answer_once, args=(listener, json.dumps(health)))
        thread.start()
        with announced(tmp_path / "cache", RunningServer.this("0.0.0.0", port, ("tiny",), 1.0)):
            (shown,) = json.loads(invoke("ps", "--json").stdout)["servers"]
        thread.join(20)
    assert shown["url"] == f"http://127.0.0.1:{port}"
    assert (shown["status"], shown["running"]) == (status, running)
    assert shown["resident_bytes"] > 1 << 20
    assert list(shown["models"]) == ["tiny"]


def test_a_server_that_does_not_answer_is_shown_as_silent_in_the_table(invoke: Invoke, tmp_path: Path) -> None:
    with announced(tmp_path / "cache", RunningServer.this("127.0.0.1", 1, ("tiny",), 1.0)):
        header, row = invoke("ps").stdout.splitlines()
    assert header.split() == ["PID", "URL", "STATUS", "MEMORY", "RUNNING", "WAITING", "MODELS"]
    assert "http://127.0.0.1:1 " in row
    assert "silent" in row


def test_stop_takes_a_port_a_model_or_the_only_one(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [
        RunningServer(i, 0.0, "127.0.0.1", 9000 + i, models, 1.0) for i, models in ((1, ("a", "b")), (2, ("b",)))
    ]
    stopped: list[int] = []
    monkeypatch.setattr("mlxinfer.server.announce.running", lambda folder: servers)
    monkeypatch.setattr("mlxinfer.server.announce.stop", lambda folder, one, timeout: stopped.append(one.port) or True)
    assert invoke("stop", "9002").exit_code == 0
    assert invoke("stop", "a").exit_code == 0
    assert stopped == [9002, 9001]
    several = invoke("stop", "b")
    assert several.exit_code == invoke("stop").exit_code == 2
    assert "9001: a, b; 9002: b" in several.stderr
    assert len(stopped) == 2
    assert json.loads(invoke("stop", "--all", "--json").stdout) == {
        "stopped": [{"pid": 1, "port": 9001, "ended": True}, {"pid": 2, "port": 9002, "ended": True}]
    }


def test_a_server_that_outlives_its_grace_ends_stop_with_1(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    one = RunningServer(77, 0.0, "127.0.0.1", 9001, ("a",), 1.0)
    monkeypatch.setattr("mlxinfer.server.announce.running", lambda folder: [one])
    monkeypatch.setattr("mlxinfer.server.announce.stop", lambda folder, one, timeout: False)
    result = invoke("stop")
    assert result.exit_code == 1
    assert "process 77" in result.stderr


def test_a_server_is_known_to_ps_while_it_serves(
    invoke: Invoke, llm: FakeLLM, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[int] = []
    real = server.serve

    def serve(models: Any, **rest: Any) -> int:
        ended = real(models, **rest)
        known.append(len(list((tmp_path / "cache" / FOLDER).glob("*.json"))))
        return ended

    monkeypatch.setattr("mlxinfer.server.run.serve", serve)
    assert invoke("serve", "m").exit_code == 0
    assert known == [1]
    assert not list((tmp_path / "cache" / FOLDER).iterdir())


def test_serve_takes_its_access_rules_from_the_file_and_flags_come_first(
    invoke: Invoke, llm: FakeLLM, server: FakeServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "anna"\nkey = "sesame"\n')
    keys.chmod(0o600)
    (tmp_path / "config.toml").write_text(
        'allow_hosts = ["a.local"]\nallow_origins = ["http://a:1"]\nkeys_file = "keys.toml"\naccess_log = "off"\n'
        "metrics_open = true\nmax_body_mb = 2\nbody_timeout = 7\ngrace = 9\n"
    )
    assert invoke("serve", "m").exit_code == 0
    flags = ("--allow-host", "b.local", "--access-log", "x.log", "--grace", "1")
    assert invoke("serve", "m", *flags).exit_code == 0
    first, second = server.calls
    assert first["allowed_hosts"] == {"a.local"}
    assert first["allowed_origins"] == {"http://a:1"}
    assert first["keys"] == (ApiKey.of("anna", "sesame"),)
    assert (first["access_log"], first["metrics_open"], first["grace_s"]) == (None, True, 9.0)
    assert (first["max_body_bytes"], first["body_timeout_s"]) == (2 << 20, 7.0)
    assert (second["allowed_hosts"], second["access_log"], second["grace_s"]) == ({"b.local"}, "x.log", 1.0)
    assert second["allowed_origins"] == {"http://a:1"}


def test_keys_that_others_can_read_are_refused_before_anything_is_loaded(
    invoke: Invoke, llm: FakeLLM, server: FakeServer, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "anna"\nkey = "sesame"\n')
    keys.chmod(0o644)
    result = invoke("serve", "m", "--keys", str(keys))
    assert result.exit_code == 2
    assert "chmod 600" in result.stderr
    assert not llm.loaded_with
