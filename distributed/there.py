"""Another machine of the cluster, by its agent."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

from mlxinfer.distributed.agent import CHUNK
from mlxinfer.distributed.frames import Channel, ChannelError
from mlxinfer.distributed.ranks import RanksLostError
from mlxinfer.distributed.shards import MANIFEST
from mlxinfer.errors import EngineError
from mlxinfer.formats.files import sha256_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from mlxinfer.distributed.cluster_file import Node

ANSWER_S = 30.0
"""An agent that takes longer for an answer is gone; sums of large files are made as they arrive."""
CONNECT_S = 5.0
PROMPT_S = 2.0
"""For what takes an agent no time."""


class AgentError(EngineError):
    """An agent can't be reached, or says no."""


class There:
    """One agent. Thread-safe; a Place for ranks."""

    def __init__(self, node: Node, secret: str, *, ended: Callable[[], None] = lambda: None) -> None:
        """Connect. `ended` is called when this is closed. Raises AgentError."""
        self.node = node
        self._ended = ended
        self.host = node.host
        self._lock = threading.Lock()
        try:
            connection = socket.create_connection((node.host, node.port), timeout=CONNECT_S)
            connection.settimeout(None)
            self._channel = Channel(connection, secret.encode(), serving=False)
        except (OSError, ChannelError) as error:
            raise AgentError(
                f"the agent of {node.name} ({node.host}:{node.port}) cannot be reached: {error}; "
                f"start it there: mlxinfer cluster agent --node {node.name}"
            ) from error

    def close(self) -> None:
        """The ranks there end."""
        self._channel.close()
        self._ended()

    def ask(self, do: str, *, data: bytes | None = None, timeout: float = ANSWER_S, **body: Any) -> Any:
        """Raises AgentError with what the agent says, or where it says nothing for `timeout` seconds."""
        with self._lock:
            try:
                self._channel.send({"do": do, **body})
                if data is not None:
                    self._channel.send(data)
                answer = self._channel.receive(timeout)
            except ChannelError as error:
                # An answer that comes late would be taken for that of the next question.
                self._channel.close()
                raise AgentError(f"{self.node.name}: {error}") from error
        if not isinstance(answer, dict) or "ok" not in answer:
            said = answer.get("error") if isinstance(answer, dict) else answer
            raise AgentError(f"{self.node.name}: {said}")
        return answer["ok"]

    def free_port(self, host: str = "") -> int:
        try:
            return int(self.ask("port", host=host))
        except AgentError as error:
            raise RanksLostError(str(error)) from error

    def spawn(
        self, arguments: Sequence[str], environment: Mapping[str, str], files: Mapping[str, str], secret: str
    ) -> RemoteRank:
        about = {"connect": arguments[1], "rank": int(arguments[3]), "files": dict(files)}
        if "MLX_JACCL_COORDINATOR" in environment:
            about["coordinator"] = environment["MLX_JACCL_COORDINATOR"]
        try:
            return RemoteRank(self, self.ask("spawn", **about))
        except AgentError as error:
            raise RanksLostError(str(error)) from error

    def bring(self, part: str, folder: Path, progress: Callable[[int, int], None] | None = None) -> str:
        """See to it that the part in `folder` is there whole; the folder's name there. Goes on where it broke off."""
        have: dict[str, Any] = self.ask("have", part=part)
        # The manifest comes last: a part that is not whole is none.
        files = sorted(folder.iterdir(), key=lambda file: (file.name == MANIFEST, file.name))
        total, done = sum(file.stat().st_size for file in files), 0
        for file in files:
            done = self._bring_file(part, file, have.get(file.name) or {"bytes": 0, "sum": ""}, done, total, progress)
        return str(self.ask("folder", part=part))

    def _bring_file(self, part: str, path: Path, have: Mapping[str, Any], done: int, total: int, progress: Any) -> int:
        size, wanted = path.stat().st_size, sha256_of(path)
        if have["sum"] == wanted:
            return done + size
        with path.open("rb") as file:
            at = have["bytes"] if not have["sum"] and have["bytes"] <= size else 0
            file.seek(at)
            while True:
                data = file.read(CHUNK)
                last = at + len(data) >= size
                self.ask("put", data=data, part=part, file=path.name, offset=at, sum=wanted if last else "")
                at += len(data)
                if progress is not None:
                    progress(done + at, total)
                if last:
                    return done + size


class RemoteRank:
    """A rank's process on another machine."""

    def __init__(self, there: There, number: int) -> None:
        self._there, self._number = there, number

    def kill(self) -> None:
        """Harmless where the agent has gone: its ranks go with the connection."""
        try:
            self._there.ask("kill", timeout=PROMPT_S, id=self._number)
        except AgentError:
            return

    def ended(self) -> str:
        try:
            return str(self._there.ask("ended", timeout=PROMPT_S, id=self._number))
        except AgentError as error:
            return str(error)

    def resident(self) -> int:
        return 0
