"""The servers that this user runs on this machine: each keeps a file of its own locked for as long as it lives.

A lock goes with its process, however that ends, so a file that can be locked is left over. Before a signal is sent the
process must also be this user's, and as old as the file says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from mlxinfer import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER = "servers"
MAX_FILES = 1000
MAX_BYTES = 1 << 18
CLOCK_SLACK_S = 60.0
"""A process's start is told by the clock, which may be set meanwhile."""
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RunningServer:
    """What a server says of itself."""

    pid: int
    started: float
    """When its process began, in seconds since 1970."""
    host: str
    port: int
    models: tuple[str, ...]
    grace_s: float
    version: str = __version__

    @classmethod
    def this(cls, host: str, port: int, models: tuple[str, ...], grace_s: float) -> RunningServer:
        pid = os.getpid()
        return cls(pid, psutil.Process(pid).create_time(), host, port, models, grace_s)


@contextlib.contextmanager
def announced(cache_dir: Path, server: RunningServer) -> Iterator[None]:
    """Keep the file of a server for the length of a `with` block. Raises OSError when it cannot be written."""
    folder = cache_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path, fresh = folder / f"{server.pid}.json", folder / f"{server.pid}.new"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps(dataclasses.asdict(server)).encode("ascii"))
        fresh.rename(path)  # it is never seen without its lock
        yield
    finally:
        for name in (path, fresh):
            name.unlink(missing_ok=True)
        os.close(descriptor)


def running(cache_dir: Path) -> list[RunningServer]:
    """The servers that live, by port. Files that were left over are removed."""
    found: list[RunningServer] = []
    for path in sorted((cache_dir / FOLDER).glob("*.json"))[:MAX_FILES]:
        server = _read(path)
        if server is not None and _is_its_process(server):
            found.append(server)
    return sorted(found, key=lambda server: server.port)


def stop(cache_dir: Path, server: RunningServer, timeout_s: float) -> bool:
    """Have a server drain and end; whether it has within `timeout_s`. Nothing is sent to a process that isn't it."""
    path = cache_dir / FOLDER / f"{server.pid}.json"
    if _read(path) != server or not _is_its_process(server):
        return True
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGTERM)
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if not _is_its_process(server):
            return True
        time.sleep(POLL_S)
    return False


def _read(path: Path) -> RunningServer | None:
    """What a file says whose lock is held; one that is left over is removed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _parse(os.read(descriptor, MAX_BYTES))
    except OSError:
        return None
    else:
        path.unlink(missing_ok=True)
        return None
    finally:
        os.close(descriptor)


def _parse(data: bytes) -> RunningServer | None:
    try:
        fields: dict[str, Any] = json.loads(data)
        models = tuple(str(name) for name in fields["models"])
        return RunningServer(
            int(fields["pid"]), float(fields["started"]), str(fields["host"]), int(fields["port"]), models,
            float(fields["grace_s"]), str(fields["version"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):  # of another version of this program
        return None


def _is_its_process(server: RunningServer) -> bool:
    try:
        process = psutil.Process(server.pid)
        alive = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return (
            alive and process.uids().real == os.getuid() and abs(process.create_time() - server.started) < CLOCK_SLACK_S
        )
    except psutil.Error:
        return False
