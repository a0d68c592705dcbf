"""A TCP relay that counts what goes to its target."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Counted:
    """`port` to connect to; `total` bytes went to the target, over all connections."""

    def __init__(self, port: int) -> None:
        self.port, self.total = port, 0


@contextlib.contextmanager
def counted(target: int) -> Iterator[Counted]:
    """A relay to a port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = Counted(int(server.getsockname()[1]))

        def pump(source: socket.socket, sink: socket.socket, *, counts: bool) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 20):
                    made.total += len(data) if counts else 0
                    sink.sendall(data)
                sink.shutdown(socket.SHUT_WR)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = server.accept()
                    other = socket.create_connection(("127.0.0.1", target))
                    for ends, counts in (((one, other), True), ((other, one), False)):
                        threading.Thread(target=pump, args=ends, kwargs={"counts": counts}, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield made
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
