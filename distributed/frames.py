"""Messages between the agents of a cluster: JSON in frames that only holders of the secret can make.

A connection begins with a fresh nonce from each side; the key of its frames is made of both and the secret, and every
frame carries its number and a MAC over direction, number and body. So nothing from another connection, another
direction or another moment is accepted, and nothing is parsed before its MAC is right. What is said is not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from typing import Any, NoReturn

from mlxinfer.errors import MlxinferError

MAGIC = b"mlxinfer-cluster-1\n"
NONCE = 32
MAC = 32
MAX_BYTES = 64 << 20
"""Of one body: a step of many long prompts."""
MIN_SECRET = 16
HANDSHAKE_S = 5.0
_HEAD = struct.Struct(">BIQ")
"""Kind, bytes of the body, number of the frame."""
_JSON, _RAW = 0, 1


class ChannelError(MlxinferError):
    """The other side has gone, is not who it should be, or sends what can't be."""

    status = 502
    code = "cluster_channel"


class ChannelTimeoutError(ChannelError):
    """Nothing came in time."""


class Channel:
    """One connection, both ways. One thread may send and another receive."""

    def __init__(self, connection: socket.socket, secret: bytes, *, serving: bool) -> None:
        """Shake hands. Raises ChannelError within HANDSHAKE_S, and then the connection is closed."""
        if len(secret) < MIN_SECRET:
            raise ChannelError(f"the cluster's secret has {len(secret)} bytes; at least {MIN_SECRET} are needed")
        self._connection = connection
        self._sending = threading.Lock()
        self._sent = self._received = 0
        self.peer = _name_of(connection)
        self._out, self._in = (b"S", b"C") if serving else (b"C", b"S")
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._key = self._shaken(secret, serving=serving)
            undo.pop_all()

    def send(self, body: Any) -> None:
        """A JSON value, or bytes as they are. Raises ChannelError when the other side has gone."""
        raw = isinstance(body, bytes)
        data = body if raw else json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        if len(data) > MAX_BYTES:
            raise ChannelError(f"a message of {len(data):,} bytes is too long; at most {MAX_BYTES:,} go")
        with self._sending:
            head = _HEAD.pack(_RAW if raw else _JSON, len(data), self._sent)
            self._sent += 1
            self._write(head + self._mac(self._out, head, data) + data)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message, as it was sent. `timeout` is for its beginning: one that has begun has HANDSHAKE_S a piece.

        Raises ChannelTimeoutError, after which the channel may be used on, or ChannelError, after which it is closed.
        """
        head = self._read(_HEAD.size, timeout, begun=False)
        kind, length, number = _HEAD.unpack(head)
        if length > MAX_BYTES or number != self._received:
            self._refuse(f"frame {number} of {length:,} bytes where frame {self._received} is due")
        mac = self._read(MAC, HANDSHAKE_S)
        data = self._read(length, HANDSHAKE_S)
        if not hmac.compare_digest(mac, self._mac(self._in, head, data)):
            self._refuse("a frame that the secret does not sign")
        self._received += 1
        if kind == _RAW:
            return data
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            self._refuse(f"a frame that is no JSON: {error}")

    def close(self) -> None:
        """Harmless when it is closed."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    # Underneath

    def _shaken(self, secret: bytes, *, serving: bool) -> bytes:
        """The key of this connection; each side has proved that it has it before anything else is said."""
        own = secrets.token_bytes(NONCE)
        self._write(MAGIC + own)
        heard = self._read(len(MAGIC) + NONCE, HANDSHAKE_S)
        if not heard.startswith(MAGIC):
            self._refuse("a beginning that is no agent's of this version")
        other = heard[len(MAGIC) :]
        nonces = own + other if serving else other + own
        key = hmac.digest(secret, MAGIC + nonces, hashlib.sha256)
        self._write(hmac.digest(key, b"proof" + self._out, hashlib.sha256))
        proof = self._read(MAC, HANDSHAKE_S)
        if not hmac.compare_digest(proof, hmac.digest(key, b"proof" + self._in, hashlib.sha256)):
            self._refuse("another secret")
        return key

    def _mac(self, direction: bytes, head: bytes, data: bytes) -> bytes:
        return hmac.digest(self._key, direction + head + data, hashlib.sha256)

    def _write(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError as error:
            self.close()
            raise ChannelError(f"{self.peer} has gone: {error}") from error

    def _read(self, count: int, timeout: float | None, *, begun: bool = True) -> bytes:
        parts: list[bytes] = []
        left, ends = count, None if timeout is None else time.monotonic() + timeout
        while left:
            try:
                # Not the socket's own timeout, which a thread that sends would share.
                ready = _readable(self._connection, ends)
                part = self._connection.recv(min(left, 1 << 20)) if ready else None
            except (OSError, ValueError) as error:
                self.close()
                raise ChannelError(f"{self.peer} has gone: {error}") from error
            if part is None and not parts and not begun:
                raise ChannelTimeoutError(f"nothing from {self.peer} for {timeout} s")
            if part is None:
                self._refuse("a message that stops in the middle")
            if not part:
                self.close()
                raise ChannelError(f"{self.peer} has gone")
            parts.append(part)
            left -= len(part)
            if ends is None:
                ends = time.monotonic() + HANDSHAKE_S
        return b"".join(parts)

    def _refuse(self, what: str) -> NoReturn:
        self.close()
        raise ChannelError(f"{self.peer} sent {what}")


def _readable(connection: socket.socket, ends: float | None) -> bool:
    """Whether something can be read before `ends`."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if ends is None else max(0.0, ends - time.monotonic()) * 1000))


def _name_of(connection: socket.socket) -> str:
    try:
        host, port = connection.getpeername()[:2]
    except (OSError, ValueError):
        return "the other side"
    return f"{host}:{port}"
