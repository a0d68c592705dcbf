"""What runs on every machine of a cluster: starts and ends ranks there, keeps parts of models, says what it finds.

One coordinator at a time talks to it, over a channel that only holders of the cluster's secret can open. When that
connection ends, so do the ranks that were started over it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from mlxinfer.distributed import machine
from mlxinfer.distributed.frames import Channel, ChannelError
from mlxinfer.distributed.ranks import Here
from mlxinfer.errors import InvalidRequestError, MlxinferError
from mlxinfer.formats.files import sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mlxinfer.distributed.ranks import Handle

log = logging.getLogger(__name__)

CHUNK = 4 << 20
"""Bytes of a file in one message."""
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}/[a-z]+-[a-z0-9-]+-rank-[0-9]+-of-[0-9]+")
"""Model and part, the name of a folder below the agent's."""
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}\.(?:safetensors|json|jinja)")
_HOST = re.compile(r"[A-Za-z0-9.:_-]{1,253}")
_ADDRESS = re.compile(r"\[?[A-Za-z0-9.:_-]{1,253}\]?:[0-9]{1,5}")
FILES = {"MLX_HOSTFILE", "MLX_IBV_DEVICES"}
"""What mlx is told of the ranks, by the variable that names the file."""


class Agent:
    """Listens until `close`."""

    def __init__(self, host: str, port: int, secret: str, parts: Path) -> None:
        """Bind. Raises InvalidRequestError where that can't be. `parts` is where parts of models are kept."""
        try:
            self._server = socket.create_server((host, port), backlog=8)
        except OSError as error:
            raise InvalidRequestError(f"the agent cannot listen on {host}:{port}: {error}", param="host") from error
        self._secret, self._parts = secret, parts
        self._here = Here(host)
        self.coordinator: _Session | None = None
        self._claiming = threading.Lock()
        self._closed = False

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def run(self) -> None:
        """Serve connections, each on a thread, until `close`."""
        while not self._closed:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="agent", daemon=True).start()

    def close(self) -> None:
        """Its ranks end, too."""
        self._closed = True
        if self.coordinator is not None:
            self.coordinator.end()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def claim(self, session: _Session) -> None:
        """The one coordinator is `session` from now on. Raises InvalidRequestError while there is another."""
        with self._claiming:
            if self.coordinator not in (None, session):
                raise InvalidRequestError("another coordinator is at work here")
            self.coordinator = session

    def _serve(self, connection: socket.socket) -> None:
        try:
            channel = Channel(connection, self._secret.encode(), serving=True)
        except ChannelError as error:
            log.warning("refused: %s", error)
            return
        session = _Session(self, channel, self._here, self._secret, self._parts)
        try:
            session.run()
        finally:
            session.end()
            with self._claiming:
                if self.coordinator is session:
                    self.coordinator = None


class _Session:
    """One connection. Any may look; the first that has something done is the coordinator until it ends."""

    def __init__(self, agent: Agent, channel: Channel, here: Here, secret: str, parts: Path) -> None:
        self._agent = agent
        self._channel, self._here, self._secret, self._parts = channel, here, secret, parts
        self.ranks: dict[int, tuple[int, float, Handle]] = {}
        """By the number of the start: which rank, since when, and its process."""
        self._made = 0

    def run(self) -> None:
        verbs: dict[str, Callable[[Any], Any]] = {
            "hello": lambda _: machine.about(),
            "clock": lambda _: time.time(),
            "ranks": self._running,
            "port": self._port,
            "folder": lambda body: str(self._folder(body["part"])),
            "have": self._have,
            "put": self._put,
            "spawn": self._spawn,
            "kill": self._kill,
            "ended": self._ended,
        }
        while True:
            try:
                message = self._channel.receive()
                verb = verbs.get(str(message.get("do"))) if isinstance(message, dict) else None
                if verb is None:
                    raise InvalidRequestError(f"the agent knows no {message!r:.80}")
                answer = {"ok": verb(message)}
            except ChannelError as error:
                log.info("the coordinator has gone: %s", error)
                return
            except (MlxinferError, OSError, KeyError, TypeError, ValueError) as error:
                answer = {
                    "error": f"{type(error).__name__}: {error}" if not isinstance(error, MlxinferError) else str(error)
                }
            try:
                self._channel.send(answer)
            except ChannelError:
                return

    def end(self) -> None:
        """The ranks end with their coordinator."""
        for _, _, handle in self.ranks.values():
            handle.kill()
        self._channel.close()

    # Verbs

    def _running(self, _: Any) -> list[dict[str, Any]]:
        """Ranks of whoever coordinates: number, seconds since their start, resident bytes, how they ended."""
        coordinator = self._agent.coordinator
        held = [] if coordinator is None else list(coordinator.ranks.values())
        return [
            {
                "rank": rank,
                "for_s": round(time.monotonic() - since, 1),
                "bytes": handle.resident(),
                "ended": handle.ended(),
            }
            for rank, since, handle in held
        ]

    def _port(self, body: Any) -> int:
        host = str(body.get("host") or "")
        if host and not _HOST.fullmatch(host):
            raise InvalidRequestError(f"{host!r:.100} is no address")
        return self._here.free_port(host)

    def _folder(self, part: Any) -> Path:
        if not isinstance(part, str) or not _PART.fullmatch(part) or ".." in part:
            raise InvalidRequestError(f"{part!r:.100} is no name of a part")
        return self._parts / part

    def _have(self, body: Any) -> dict[str, Any]:
        """Of each file of a part: its bytes, and their SHA-256; of one that is still coming: the bytes there are."""
        folder = self._folder(body["part"])
        return dict(_found(folder)) if folder.is_dir() else {}

    def _put(self, body: Any) -> int:
        """The next bytes of a file, at `offset`; `last` moves it to its name if the sum is right."""
        # Whatever is wrong with the rest: they come next.
        data = self._channel.receive(30.0)
        self._agent.claim(self)
        name, offset = body["file"], int(body["offset"])
        if not isinstance(name, str) or not _FILE.fullmatch(name):
            raise InvalidRequestError(f"{name!r:.100} is no name of a file of a part")
        folder = self._folder(body["part"])
        folder.mkdir(parents=True, exist_ok=True)
        if not isinstance(data, bytes) or len(data) > CHUNK:
            raise InvalidRequestError("the file's bytes are missing")
        coming = folder / f"{name}.part"
        with open(coming, "r+b" if coming.exists() else "w+b") as file:
            if file.seek(0, os.SEEK_END) < offset:
                raise InvalidRequestError(f"{name}: bytes at {offset} come before those ahead of them")
            file.seek(offset)
            file.write(data)
            file.truncate()
            file.flush()
            if body.get("sum"):
                os.fsync(file.fileno())
        if wanted := body.get("sum"):
            if (found := sha256_of(coming)) != wanted:
                coming.unlink()
                raise InvalidRequestError(f"{name} arrived damaged: {found[:12]}… where {str(wanted)[:12]}… was sent")
            os.replace(coming, folder / name)
        return offset + len(data)

    def _spawn(self, body: Any) -> int:
        connect, rank, coordinator = str(body["connect"]), int(body["rank"]), str(body.get("coordinator") or "")
        files = {str(name): str(content) for name, content in body["files"].items()}
        fine = not coordinator or _ADDRESS.fullmatch(coordinator)
        if not _ADDRESS.fullmatch(connect) or not 0 <= rank < 1024 or not fine or not files.keys() <= FILES:
            raise InvalidRequestError(f"no rank can be started with {body!r:.200}")
        self._agent.claim(self)
        environment = {"MLX_RANK": str(rank)} | ({"MLX_JACCL_COORDINATOR": coordinator} if coordinator else {})
        self._made += 1
        handle = self._here.spawn(("--connect", connect, "--rank", str(rank)), environment, files, self._secret)
        self.ranks[self._made] = (rank, time.monotonic(), handle)
        return self._made

    def _kill(self, body: Any) -> None:
        found = self.ranks.pop(int(body["id"]), None)
        if found is not None:
            found[2].kill()

    def _ended(self, body: Any) -> str:
        found = self.ranks.get(int(body["id"]))
        return "it was ended" if found is None else found[2].ended()


def _found(folder: Path) -> Iterator[tuple[str, Any]]:
    for file in sorted(folder.iterdir()):
        if file.suffix == ".part":
            yield file.name.removesuffix(".part"), {"bytes": file.stat().st_size, "sum": ""}
        elif _FILE.fullmatch(file.name):
            yield file.name, {"bytes": file.stat().st_size, "sum": sha256_of(file)}
