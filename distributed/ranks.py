"""The ranks of a running model, as the process with the scheduler has them: started, fed, watched, ended.

mlx can't leave a group or enter one again, and a collective that nobody answers never ends. So ranks are processes,
and when one is lost all are ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets as random_secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import psutil

from mlxinfer.distributed import wire
from mlxinfer.distributed.frames import Channel, ChannelError, ChannelTimeoutError
from mlxinfer.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlxinfer.engine.rows import Outputs

log = logging.getLogger(__name__)

SILENT_S = 2.5
"""A rank that gives no sign of life for so long is lost; it gives one every half second."""
CONNECT_S = 30.0
LOAD_S = 600.0
LOOK_S = 0.25
STILL_S = 1.0
"""Between two signs of life to the ranks: one whose coordinator's network is gone would wait for ever."""
ALIKE = ("tier", "view", "fused", "needs_checkpoints")
"""What each rank finds out for itself, and all must find alike."""


class RanksLostError(EngineError):
    """A rank is gone, and with it what all of them held."""


class Place(Protocol):
    """Where a rank runs."""

    host: str
    """Where the other ranks reach it."""

    def free_port(self, host: str = "") -> int:
        """For the collectives, at an address of its own; without one, at `host`."""
        ...

    def spawn(
        self, arguments: Sequence[str], environment: Mapping[str, str], files: Mapping[str, str], secret: str
    ) -> Handle:
        """Start a rank's process. `files` are contents, by the variable that is to name the file."""
        ...


class Handle(Protocol):
    """A rank's process."""

    def kill(self) -> None:
        """At once, and reaped."""
        ...

    def ended(self) -> str:
        """How it ended, in words; "" while it runs."""
        ...

    def resident(self) -> int:
        """Bytes of memory it has; 0 where that isn't known."""
        ...


class Here:
    """This machine."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host

    def free_port(self, host: str = "") -> int:
        where = host or self.host
        try:
            with socket.create_server((where, 0)) as free:
                return int(free.getsockname()[1])
        except OSError as error:
            raise RanksLostError(f"{where} is no address of this machine: {error.strerror}") from error

    def spawn(
        self, arguments: Sequence[str], environment: Mapping[str, str], files: Mapping[str, str], secret: str
    ) -> Handle:
        return _Process(arguments, environment, files, secret)


class _Process:
    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], files: Mapping[str, str], secret: str
    ) -> None:
        self._files: dict[str, Path] = {}
        for name, content in files.items():
            with tempfile.NamedTemporaryFile("w", prefix="mlxinfer-ranks-", suffix=".json", delete=False) as file:
                file.write(content)
            self._files[name] = Path(file.name)
        command = [sys.executable, "-m", "mlxinfer.distributed.rank", *arguments]
        held = os.environ | dict(environment) | {name: str(path) for name, path in self._files.items()}
        # A process group of its own: Ctrl-C in a terminal is for the coordinator, which ends them in order.
        self._process = subprocess.Popen(command, env=held, stdin=subprocess.PIPE, start_new_session=True)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{secret}\n".encode())
            self._process.stdin.close()
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for path in self._files.values():
            path.unlink(missing_ok=True)

    def ended(self) -> str:
        code = self._process.poll()
        return "" if code is None else f"its process ended with {code}"

    def resident(self) -> int:
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return 0


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank: where it runs, and the folder there with its part."""

    place: Place
    folder: str
    host: str = ""
    """Where the rank before it reaches it for collectives, on the link between the two; else its place's."""
    devices: tuple[str | None, ...] = ()
    """Of RDMA, towards each rank, None for itself: what JACCL goes over in the place of TCP."""


class RankSet:
    """Ranks that run. Any thread may send; outputs come in order from `output`."""

    def __init__(
        self,
        seats: Sequence[Seat],
        secret: str,
        *,
        listen: str = "127.0.0.1",
        dtype: str = "auto",
        begin: Literal["load", "probe"] = "load",
    ) -> None:
        """Start them and load their parts, or measure the link between them. Raises RanksLostError, and then
        none is left."""
        self.size = len(seats)
        self._backend = "jaccl" if all(seat.devices for seat in seats) else "ring"
        self.told: dict[int, dict[str, Any]] = {}
        """What each rank tells of its part of the model, or of the link."""
        self.spare_bytes: int | None = None
        """What each rank may take for idle prefixes; None: nobody has said."""
        self._digests: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[tuple[int, Outputs] | None] = queue.SimpleQueue()
        self.cut: tuple[int, int] | None = None
        """Two ranks whose link carries nothing any more."""
        self._lost = ""
        self._closed = False
        self._ready = [threading.Event() for _ in seats]
        self._seen = [time.monotonic() + CONNECT_S] * self.size
        self._channels: dict[int, Channel] = {}
        self._pulses: dict[int, int] = {}
        self._handles: list[Handle] = []
        self._session = random_secrets.token_hex(16)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            with contextlib.closing(socket.create_server((listen, 0), backlog=self.size)) as server:
                self._spawn(seats, secret, f"{listen}:{server.getsockname()[1]}")
                self._accept(server, secret)
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
            for rank in range(self.size):
                threading.Thread(target=self._listen, args=(rank,), name=f"rank-{rank}", daemon=True).start()
            for rank in range(self.size):
                self.send(rank, {"next": {"session": self._session, "port": self._pulses[(rank + 1) % self.size]}})
            self.load([seat.folder for seat in seats], dtype=dtype, begin=begin)
            undo.pop_all()

    def load(self, folders: Sequence[str], *, dtype: str = "auto", begin: Literal["load", "probe"] = "load") -> None:
        """Have the ranks load the parts in `folders`, in the place of what they held. Raises RanksLostError."""
        for event in self._ready:
            event.clear()
        for rank, folder in enumerate(folders):
            self.send(rank, {begin: {"folder": folder, "dtype": dtype, "backend": self._backend, "size": self.size}})
        self._wait_ready()
        ways = [{key: told[key] for key in ALIKE} for told in self.told.values()] if begin == "load" else []
        if any(way != ways[0] for way in ways):
            raise RanksLostError(f"the ranks would not drive the model alike: {ways}")

    @property
    def facts(self) -> dict[str, Any]:
        """What rank 0 tells of the model."""
        return self.told[0]

    def digests(self, number: int) -> list[dict[str, Any]]:
        """What each rank holds, without arrays, once it has done all that it was told. Raises RanksLostError."""
        self.send_all({"digest": number})
        found: dict[int, dict[str, Any]] = {}
        while len(found) < self.size:
            try:
                rank, digest = self._digests.get(timeout=LOOK_S)
            except queue.Empty:
                self._check()
                continue
            if digest.pop("asked") == number:
                found[rank] = digest
        return [found[rank] for rank in range(self.size)]

    @property
    def _all_ready(self) -> bool:
        return all(event.is_set() for event in self._ready)

    @property
    def lost(self) -> str:
        """Why there are no ranks any more; "" while there are."""
        return self._lost

    @property
    def pids(self) -> list[int]:
        """Of those on this machine."""
        return [handle.pid for handle in self._handles if isinstance(handle, _Process)]

    def send(self, rank: int, message: Any) -> None:
        """Raises RanksLostError."""
        self._check()
        try:
            self._channels[rank].send(message)
        except ChannelError as error:
            self._lose(f"rank {rank}: {error}")
            self._check()

    def send_all(self, message: Any) -> None:
        """To each rank, rank 0 last: it gives the answer. Raises RanksLostError."""
        for rank in reversed(range(self.size)):
            self.send(rank, message)

    def output(self) -> tuple[int, Outputs]:
        """(number of the step, what it gave), waited for. Raises RanksLostError."""
        found = self._outputs.get()
        if found is None:
            # For whoever asks again.
            self._outputs.put(None)
            self._check()
            raise RanksLostError("the ranks were ended")
        return found

    def close(self) -> None:
        """End them all, at once."""
        self._closed = True
        for channel in list(self._channels.values()):
            channel.close()
        for handle in self._handles:
            handle.kill()
        self._outputs.put(None)

    # Inside

    def _spawn(self, seats: Sequence[Seat], secret: str, address: str) -> None:
        environment: dict[str, str] = {}
        if self._backend == "jaccl":
            files = {"MLX_IBV_DEVICES": json.dumps([seat.devices for seat in seats])}
            first = seats[0].place
            environment["MLX_JACCL_COORDINATOR"] = f"{first.host}:{first.free_port()}"
        else:
            hosts = [(seat.host or seat.place.host, seat.place.free_port(seat.host)) for seat in seats]
            files = {"MLX_HOSTFILE": json.dumps([[f"{host}:{port}"] for host, port in hosts])}
        for rank, seat in enumerate(seats):
            arguments = ("--connect", address, "--rank", str(rank))
            held = {**environment, "MLX_RANK": str(rank)}
            self._handles.append(seat.place.spawn(arguments, held, files, secret))

    def _accept(self, server: socket.socket, secret: str) -> None:
        ends = time.monotonic() + CONNECT_S
        while len(self._channels) < self.size:
            server.settimeout(LOOK_S)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                self._check_started(ends)
                continue
            try:
                channel = Channel(connection, secret.encode(), serving=True)
                said = channel.receive(timeout=5.0)
                rank, pulse = int(said["rank"]), int(said["pulse"])
            except (ChannelError, TypeError, KeyError, ValueError) as error:
                log.warning("a connection to the ranks' port was refused: %s", error)
                continue
            if not 0 <= rank < self.size or rank in self._channels:
                log.warning("a connection to the ranks' port says it is rank %s", rank)
                channel.close()
                continue
            self._channels[rank], self._pulses[rank] = channel, pulse

    def _check_started(self, ends: float) -> None:
        for rank, handle in enumerate(self._handles):
            if rank not in self._channels and (how := handle.ended()):
                raise RanksLostError(f"rank {rank} did not start: {how}")
        if time.monotonic() > ends:
            missing = [str(rank) for rank in range(self.size) if rank not in self._channels]
            raise RanksLostError(f"ranks {', '.join(missing)} did not connect within {CONNECT_S:.0f} s")

    def _wait_ready(self) -> None:
        ends = time.monotonic() + LOAD_S
        while not self._all_ready:
            self._check()
            self._look()
            if time.monotonic() > ends:
                raise RanksLostError(f"the ranks did not load within {LOAD_S:.0f} s")
            time.sleep(0.01)

    def _listen(self, rank: int) -> None:
        channel = self._channels[rank]
        while True:
            try:
                message = channel.receive()
                self._seen[rank] = time.monotonic()
                if self._all_ready and float(message.get("deaf", 0)) > SILENT_S:
                    self.cut = rank, (rank + 1) % self.size
                    raise ChannelError(f"its link to rank {(rank + 1) % self.size} carries nothing")
                if "failed" in message:
                    raise ChannelError(str(message["failed"]))
                if "ready" in message:
                    self._take_ready(rank, message["ready"])
                if "digest" in message:
                    self._digests.put((rank, dict(message["digest"])))
                if "out" in message and rank == 0:
                    self._outputs.put((int(message["number"]), wire.outputs_in(message["out"])))
            except ChannelTimeoutError:
                continue
            except (ChannelError, TypeError, KeyError, ValueError) as error:
                self._lose(f"rank {rank}: {error}")
                return

    def _take_ready(self, rank: int, facts: dict[str, Any]) -> None:
        self.told[rank] = facts
        self._ready[rank].set()

    def _watch(self) -> None:
        said = 0.0
        while not self._closed and not self._lost:
            time.sleep(LOOK_S)
            self._look()
            if time.monotonic() - said > STILL_S:
                said = time.monotonic()
                with contextlib.suppress(RanksLostError):
                    self.send_all({"still": 0})

    def _look(self) -> None:
        for rank, handle in enumerate(self._handles):
            if how := handle.ended():
                self._lose(f"rank {rank}: {how}")
            silent = time.monotonic() - self._seen[rank]
            # A rank that waits for the others to join the group can't speak.
            if silent > (SILENT_S if self._all_ready else CONNECT_S):
                self._lose(f"rank {rank} has been silent for {silent:.1f} s")

    def _lose(self, why: str) -> None:
        if self._closed or self._lost:
            return
        self._lost = why
        log.warning("the ranks are lost: %s", why)
        self._outputs.put(None)

    def _check(self) -> None:
        if self._lost:
            raise RanksLostError(self._lost)
