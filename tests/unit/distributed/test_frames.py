"""The channel between agents: what arrives, what is refused."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from mlxinfer.distributed.frames import MAC, MAGIC, NONCE, Channel, ChannelError, ChannelTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = b"sixteen bytes or more"
_open: list[socket.socket] = []


def wire() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection, closed after the test."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    _open.extend((left, right))
    return left, right


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def shake(left: socket.socket, right: socket.socket, theirs: bytes = SECRET) -> tuple[Any, Any]:
    """(client, server), or their errors."""
    found: dict[bool, Any] = {}

    def run(end: socket.socket, secret: bytes, serving: bool) -> None:
        try:
            found[serving] = Channel(end, secret, serving=serving)
        except ChannelError as error:
            found[serving] = error

    thread = threading.Thread(target=run, args=(right, theirs, True))
    thread.start()
    run(left, SECRET, False)
    thread.join(10)
    return found[False], found[True]


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    client, server = shake(*wire())
    yield client, server
    client.close()
    server.close()


def test_messages_arrive_in_order_both_ways(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    for number in range(50):
        client.send({"number": number, "text": "ä" * number})
        server.send([number])
    assert [server.receive(1)["number"] for _ in range(50)] == list(range(50))
    assert [client.receive(1)[0] for _ in range(50)] == list(range(50))


def test_a_large_message_arrives_whole(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    ids = list(range(400_000))
    sender = threading.Thread(target=client.send, args=(ids,))
    sender.start()
    assert server.receive(10) == ids
    sender.join()


def test_bytes_go_as_they_are(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    for data in (b"", b"\0\xff" * 1000, b'{"not": "json"}'):
        client.send(data)
        assert server.receive(1) == data


def test_waiting_for_nothing_ends_and_the_channel_goes_on(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    with pytest.raises(ChannelTimeoutError, match="nothing from"):
        server.receive(0.01)
    client.send("late")
    assert server.receive(1) == "late"


def test_one_side_sends_while_the_same_side_waits(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    heard: list[Any] = []
    waiting = threading.Thread(target=lambda: heard.append(client.receive(5)))
    waiting.start()
    client.send("first")
    server.send("second")
    waiting.join(5)
    assert (server.receive(1), heard) == ("first", ["second"])


def test_a_peer_that_goes_is_told_of_at_once(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    client.close()
    began = time.monotonic()
    with pytest.raises(ChannelError, match="gone"):
        server.receive(30)
    assert time.monotonic() - began < 5


def test_another_secret_is_refused_on_both_sides() -> None:
    client, server = shake(*wire(), theirs=b"another secret of length")
    assert isinstance(client, ChannelError)
    assert isinstance(server, ChannelError)
    assert "secret" in f"{client}{server}"


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ChannelError, match="at least 16"):
        Channel(wire()[0], b"short", serving=True)


def recorded() -> tuple[bytes, Channel, socket.socket]:
    """A frame as it went over the wire, the channel that made it, and the wire."""
    left, right = wire()
    client, server = shake(left, right)
    client.send({"do": "something"})
    length = struct.unpack(">BIQ", right.recv(13, socket.MSG_PEEK))[1]
    return right.recv(13 + MAC + length), server, left


def test_a_frame_is_accepted_once_only() -> None:
    frame, server, wire = recorded()
    wire.sendall(frame + frame)
    assert server.receive(1) == {"do": "something"}
    with pytest.raises(ChannelError, match="frame 0"):
        server.receive(1)


def test_a_frame_of_another_connection_is_refused() -> None:
    frame, _, _ = recorded()
    _, server, wire = recorded()
    wire.sendall(frame)
    with pytest.raises(ChannelError, match="does not sign"):
        server.receive(1)


def test_a_frame_sent_back_to_its_maker_is_refused() -> None:
    left, right = wire()
    client, _ = shake(left, right)
    client.send("hello")
    right.sendall(right.recv(1000))
    with pytest.raises(ChannelError, match="does not sign"):
        client.receive(1)


def test_changed_frames_are_refused_and_nothing_else_happens() -> None:
    rng = random.Random(5)
    for _ in range(300):
        frame, server, wire = recorded()
        data = bytearray(frame)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if bytes(data) == frame:
            continue
        wire.sendall(data)
        wire.close()
        with pytest.raises(ChannelError):
            server.receive(2)


@pytest.mark.parametrize("junk", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, MAGIC, MAGIC + b"x" * NONCE + b"y" * MAC])
def test_junk_in_place_of_a_handshake_is_refused(junk: bytes) -> None:
    left, right = wire()
    left.sendall(junk)
    left.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelError):
        Channel(right, SECRET, serving=True)


def test_a_peer_that_stays_silent_does_not_hold_a_handshake_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxinfer.distributed.frames.HANDSHAKE_S", 0.05)
    _left, right = wire()
    with pytest.raises(ChannelError, match="stops in the middle"):
        Channel(right, SECRET, serving=True)


def test_a_message_that_is_no_json_value_is_our_own_bug(pair: tuple[Channel, Channel]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        pair[0].send(float("nan"))
