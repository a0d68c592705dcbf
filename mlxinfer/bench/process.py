"""Server processes: our own, started and stopped by pid, and what any of them on this machine holds in memory."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from mlxinfer.errors import EngineError, InvalidRequestError, ModelNotFoundError, WontFitError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HOST = "127.0.0.1"
POLL_S = 0.05
STOP_S = 20.0
"""For the server to drain after SIGTERM; then it is killed."""
MESSAGE_CHARS = 500


class OwnServer:
    """`mlxinfer serve` in a child process, on a port that was free."""

    def __init__(self, model: str, flags: Sequence[str] = (), *, start_s: float = 600.0) -> None:
        """`flags` are options of `serve`; `start_s` bounds the time until it answers."""
        self.port = _free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.command = [sys.executable, "-m", "mlxinfer", "serve", model, "--host", HOST, "--port", str(self.port)]
        self.command += flags
        self._start_s = start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start it and wait until it is ready. Raises what it ended with, or EngineError when it takes too long."""
        assert self._process is None, "it runs already"
        # The child listens to this machine only and needs no key; ours may be meant for another server.
        env = {key: value for key, value in os.environ.items() if key != "MLXINFER_API_KEY"}
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._log, env=env
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self._end_process)
            wait_ready(self.url, self._check_alive, self._start_s)
            undo.pop_all()

    def _check_alive(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            kind = {2: InvalidRequestError, 3: ModelNotFoundError, 4: WontFitError}.get(code, EngineError)
            raise kind(f"the server ended with {code}: {self._last_words()}")

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return (lines[-1] if lines else "without a word")[-MESSAGE_CHARS:].removeprefix("Error: ")

    def restart(self) -> None:
        """Stop it, start it again on the same port, and wait until it is ready."""
        self._end_process()
        self.start()

    def stop(self) -> None:
        """Stop it and let go of its log; harmless when it never ran."""
        self._end_process()
        self._log.close()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> OwnServer:
        try:
            self.start()
        except BaseException:
            self._log.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def wait_ready(url: str, check_alive: Callable[[], None], bound_s: float) -> None:
    """Return when GET /ready answers 200; on a server without it (404), when /health does.

    `check_alive` raises when waiting is in vain. Raises EngineError after `bound_s` seconds.
    """
    deadline = time.monotonic() + bound_s
    with httpx.Client(timeout=5.0, trust_env=False) as http:
        while time.monotonic() < deadline:
            check_alive()
            with contextlib.suppress(httpx.HTTPError):
                reply = http.get(f"{url}/ready")
                if reply.status_code == 404:
                    reply = http.get(f"{url}/health")
                if reply.status_code == 200:
                    return
            time.sleep(POLL_S)
    raise EngineError(f"the server at {url} is not ready after {bound_s:g} s")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def find_pid(url: str) -> int | None:
    """The process that listens at a loopback `url`; None elsewhere, or where it isn't ours to look at."""
    parts = urllib.parse.urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return process.pid
    return None


def command_line(pid: int | None) -> str | None:
    """How a process was started, with the values of options that sound secret left out; None if it can't be seen."""
    if pid is None:
        return None
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return None
    return " ".join(without_secrets(words)) or None


def without_secrets(words: Sequence[str]) -> list[str]:
    """`--api-key X` and `--hf-token=X` become `--api-key …` and `--hf-token=…`."""
    kept: list[str] = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and any(part in name.lower() for part in ("key", "token", "secret", "password"))
        kept.append("…" if hide else f"{name}=…" if secret and equals else word)
        hide = secret and not equals and not hide
    return kept


class PeakMemory:
    """The most that a process and its children held while the block ran, in bytes: resident sets, sampled.

    Pages they share count in each. On macOS the resident set holds what Metal has wired only in part.
    """

    def __init__(self, pid: int | None, *, every_s: float = 0.2) -> None:
        self.peak: int | None = None
        self._pid = pid
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._sample()
        if self.peak is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._sample()

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self._sample()

    def _sample(self) -> None:
        held = resident_bytes(self._pid) if self._pid is not None else None
        if held is not None:
            self.peak = max(self.peak or 0, held)


def resident_bytes(pid: int) -> int | None:
    """Of a process and all its children; None when it is gone or not ours to look at."""
    try:
        root = psutil.Process(pid)
        total = root.memory_info().rss
        children = root.children(recursive=True)
    except psutil.Error:
        return None
    for child in children:
        with contextlib.suppress(psutil.Error):
            total += child.memory_info().rss
    return total
