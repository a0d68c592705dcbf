"""The files of running servers: found while their process lives, and nothing else is ever sent a signal."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from mlxinfer.server.announce import FOLDER, RunningServer, announced, running, stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CODE = """
import signal, sys, threading
from pathlib import Path
from mlxinfer.server.announce import RunningServer, announced
done = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: {on_term})
with announced(Path(sys.argv[1]), RunningServer.this("127.0.0.1", int(sys.argv[2]), ("tiny",), 1.0)):
    print("up", flush=True)
    while not done.wait(0.05):
        pass
"""
Start = "Callable[..., subprocess.Popen[str]]"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[subprocess.Popen[str]] = []

    def run(port: int, on_term: str = "done.set()") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CODE.format(on_term=on_term), str(tmp_path), str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        return process

    yield run
    for process in made:
        process.kill()
        process.communicate(timeout=20)


def test_servers_are_found_by_port_while_they_live(tmp_path: Path, start: Start) -> None:
    assert running(tmp_path) == []
    second, first = start(9002), start(9001)
    assert [(s.port, s.pid, s.models) for s in running(tmp_path)] == [
        (9001, first.pid, ("tiny",)),
        (9002, second.pid, ("tiny",)),
    ]
    path = tmp_path / FOLDER / f"{first.pid}.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    first.kill()
    first.wait(20)
    assert [s.port for s in running(tmp_path)] == [9002]
    assert not path.exists(), "what a killed server left is removed"


def test_a_server_that_is_stopped_has_ended(tmp_path: Path, start: Start) -> None:
    process = start(9001)
    (server,) = running(tmp_path)
    assert stop(tmp_path, server, 20)
    assert process.wait(20) == 0
    assert running(tmp_path) == []
    assert stop(tmp_path, server, 20), "it has ended"


def test_a_server_that_goes_on_is_said_to(tmp_path: Path, start: Start) -> None:
    process = start(9001, on_term="None")
    (server,) = running(tmp_path)
    assert not stop(tmp_path, server, 0.3)
    assert process.poll() is None


def test_another_process_with_the_number_of_a_server_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr("mlxinfer.server.announce.os.kill", lambda pid, sig: sent.append(pid))
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    created = psutil.Process(bystander.pid).create_time()
    honest = RunningServer(bystander.pid, created, "127.0.0.1", 9001, ("tiny",), 1.0)
    folder = tmp_path / FOLDER
    folder.mkdir()
    path = folder / f"{bystander.pid}.json"
    try:
        # A file that is left over: nobody holds its lock.
        path.write_text(json.dumps(dataclasses.asdict(honest)))
        assert stop(tmp_path, honest, 0.1)
        assert running(tmp_path) == []
        # A held lock, and a process that began at another time.
        with announced(tmp_path, dataclasses.replace(honest, started=created - 3600)):
            assert running(tmp_path) == []
        # A server that isn't the one that was listed.
        with announced(tmp_path, honest):
            assert [s.pid for s in running(tmp_path)] == [bystander.pid]
            assert stop(tmp_path, dataclasses.replace(honest, port=9002), 0.1)
        assert sent == []
        assert bystander.poll() is None
    finally:
        bystander.communicate(b"\n", timeout=20)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"pid": "x"}', '{"models": 5}', "\xff" * 100])
def test_files_that_say_nothing_are_passed_over(tmp_path: Path, text: str) -> None:
    import fcntl

    (tmp_path / FOLDER).mkdir()
    with open(tmp_path / FOLDER / "1.json", "w", encoding="latin-1") as file:
        file.write(text)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert running(tmp_path) == []


def test_its_file_goes_with_the_server(tmp_path: Path) -> None:
    with announced(tmp_path, RunningServer.this("127.0.0.1", 1, (), 1.0)):
        assert [s.pid for s in running(tmp_path)] == [os.getpid()]
    assert not list((tmp_path / FOLDER).iterdir())
