"""Whether a link still carries anything: each rank asks the next one of the ring, over the link, twice a second.

A link that is cut leaves both ends waiting in a collective for ever, and each of them alive to whoever asks over
another network. So the link itself is asked, by UDP: a datagram that comes back with the right MAC.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from pathlib import Path

ASK_S = 0.5
_HEAD = struct.Struct(">4sBQ")
_MAGIC = b"mlxp"
_ASKED, _ANSWERED = 0, 1
_SUM = 16


class Pulse:
    """Of one rank. It answers from the start, and asks once it is told whom."""

    def __init__(self, host: str) -> None:
        """Listen at an address of this machine. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.bind((host, 0))
        self._key = b""
        self._next: tuple[str, int] | None = None
        self._heard = 0.0
        self._number = 0

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def begin(self, secret: bytes, session: str, host: str, port: int) -> None:
        """Ask the one at `host` and `port`, who has the same secret and session."""
        self._key = hmac.digest(secret, f"pulse {session}".encode(), hashlib.sha256)
        self._next = host, port
        for work in (self._listen, self._ask):
            threading.Thread(target=work, name="pulse", daemon=True).start()

    def deaf_s(self) -> float:
        """Seconds since the last answer; 0 before the first: a network may carry no UDP at all."""
        return time.monotonic() - self._heard if self._heard else 0.0

    def _ask(self) -> None:
        while True:
            self._number += 1
            with contextlib.suppress(OSError):  # no way there, for now
                self._socket.sendto(self._sealed(_ASKED, self._number), self._next or ("", 0))
            time.sleep(ASK_S)

    def _listen(self) -> None:
        while True:
            try:
                data, sender = self._socket.recvfrom(256)
            except OSError:  # as a refusal comes back
                time.sleep(ASK_S / 10)
                continue
            if len(data) != _HEAD.size + _SUM or not hmac.compare_digest(self._sum(data[:-_SUM]), data[-_SUM:]):
                continue
            _, kind, number = _HEAD.unpack(data[:-_SUM])
            if kind == _ASKED:
                with contextlib.suppress(OSError):
                    self._socket.sendto(self._sealed(_ANSWERED, number), sender)
            elif 0 <= self._number - number <= 1:
                # An old answer, sent again by somebody, is none.
                self._heard = time.monotonic()

    def _sealed(self, kind: int, number: int) -> bytes:
        head = _HEAD.pack(_MAGIC, kind, number)
        return head + self._sum(head)

    def _sum(self, head: bytes) -> bytes:
        return hmac.digest(self._key, head, hashlib.sha256)[:_SUM]


def ring() -> list[tuple[str, str]]:
    """(host, port) by rank, of the ring that mlx is told of; [] where there is none."""
    name = os.environ.get("MLX_HOSTFILE")
    hosts = json.loads(Path(name).read_text()) if name else []
    return [(host.strip("[]"), port) for host, _, port in (one[0].rpartition(":") for one in hosts)]
