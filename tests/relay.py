"""A slow link: a TCP relay with a delay each way and a rate, in a process of its own, and ranks that are joined by it.

`python -m tests.relay DELAY_US MB_S LISTEN:TARGET …`, ports of 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from mlxinfer.distributed.ranks import Here

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlxinfer.distributed.ranks import Handle


class SlowRing:
    """Places for the ranks of one ring, each joined to the next over a relay. A context manager."""

    def __init__(self, delay_us: float, mb_s: float) -> None:
        self.delay_us, self.mb_s = delay_us, mb_s
        self._relays: list[subprocess.Popen[bytes]] = []

    def place(self, rank: int) -> Here:
        return _Place(self, rank)

    def relayed(self, rank: int, hostfile: str) -> str:
        """A rank's own hostfile: the next one's address is a relay's."""
        hosts: list[list[str]] = json.loads(hostfile)
        following = (rank + 1) % len(hosts)
        target = int(hosts[following][0].rpartition(":")[2])
        listen = Here().free_port()
        command = [sys.executable, "-m", "tests.relay", str(self.delay_us), str(self.mb_s), f"{listen}:{target}"]
        relay = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._relays.append(relay)
        assert relay.stdout is not None
        assert relay.stdout.readline() == b"ready\n"
        hosts[following] = [f"127.0.0.1:{listen}"]
        return json.dumps(hosts)

    def __enter__(self) -> SlowRing:
        return self

    def __exit__(self, *_: object) -> None:
        for relay in self._relays:
            relay.kill()
            relay.wait()
            assert relay.stdout is not None
            relay.stdout.close()


class _Place(Here):
    def __init__(self, ring: SlowRing, rank: int) -> None:
        super().__init__()
        self._ring, self._rank = ring, rank

    def spawn(
        self, arguments: Sequence[str], environment: Mapping[str, str], files: Mapping[str, str], secret: str
    ) -> Handle:
        relayed = {name: self._ring.relayed(self._rank, hostfile) for name, hostfile in files.items()}
        return super().spawn(arguments, environment, relayed, secret)


def _pump(source: socket.socket, target: socket.socket, delay: float, rate: float) -> None:
    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def out() -> None:
        free = 0.0
        while True:
            came, data = waiting.get()
            if not data:
                with contextlib.suppress(OSError):
                    target.shutdown(socket.SHUT_WR)
                return
            # It is on the wire once what came before is through, and then takes the way.
            free = max(came, free) + len(data) / rate
            due = free + delay
            # It oversleeps by about 0.1 ms; waiting that out in a loop would take the ranks' cores.
            if (left := due - time.perf_counter()) > 0:
                time.sleep(left)
            with contextlib.suppress(OSError):
                target.sendall(data)

    threading.Thread(target=out, daemon=True).start()
    while True:
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        waiting.put((time.perf_counter(), data))
        if not data:
            return


def _serve(listen: int, target: int, delay: float, rate: float, ready: threading.Event) -> None:
    with socket.create_server(("127.0.0.1", listen)) as server:
        ready.set()
        while True:
            one, _ = server.accept()
            other = _connected(target)
            for end in (one, other):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for pair in ((one, other), (other, one)):
                threading.Thread(target=_pump, args=(*pair, delay, rate), daemon=True).start()


def _connected(port: int) -> socket.socket:
    for _ in range(300):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"nothing listens on {port}")


def main() -> None:
    delay, rate, *ports = sys.argv[1:]
    ready: list[Any] = []
    for pair in ports:
        listen, target = map(int, pair.split(":"))
        ready.append(threading.Event())
        arguments = (listen, target, float(delay) * 1e-6, float(rate) * 1e6, ready[-1])
        threading.Thread(target=_serve, args=arguments, daemon=True).start()
    for event in ready:
        event.wait()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
