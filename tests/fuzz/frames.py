"""`python -m tests.fuzz.frames [--frames N] [--seed S]`: what an agent makes of bad frames.

Each case is a connection to a real agent: junk in place of the handshake, a handshake with another secret, or a real
one and then a frame that is changed, cut, repeated, of another connection, or of absurd length. The agent must refuse
each, answer the next good coordinator, and never do what a bad frame said. The exit status says whether anything was
found.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

from mlxinfer.distributed.agent import Agent
from mlxinfer.distributed.cluster_file import Node
from mlxinfer.distributed.frames import MAC, MAGIC, NONCE, Channel, ChannelError
from mlxinfer.distributed.there import AgentError, There

SECRET = "a secret of sixteen and more"
CANARY_EVERY = 500
GOOD_S = 10.0


class _Tap:
    """A socket that keeps what is written to it, and can leave it unsent."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.kept, self.holds = connection, b"", False

    def sendall(self, data: bytes) -> None:
        self.kept = data
        if not self.holds:
            self.connection.sendall(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self.connection, name)


def frame(port: int, body: object) -> tuple[socket.socket, bytes]:
    """A connection that has shaken hands, and a signed frame for it that wasn't sent."""
    tap = _Tap(socket.create_connection(("127.0.0.1", port)))
    channel = Channel(tap, SECRET.encode(), serving=False)  # pyright: ignore[reportArgumentType]
    tap.holds = True
    channel.send(body)
    return tap.connection, tap.kept


def bad(rng: random.Random, port: int, old: bytes) -> tuple[socket.socket, bytes]:
    """A connection, and what is to be sent over it."""
    kind = rng.randrange(6)
    if kind == 0:
        made = socket.create_connection(("127.0.0.1", port))
        return made, rng.choice([MAGIC, b""]) + rng.randbytes(rng.randrange(200))
    if kind == 1:
        made = socket.create_connection(("127.0.0.1", port))
        return made, MAGIC + rng.randbytes(NONCE + MAC)
    made, data = frame(port, {"do": "put", "part": "m/tensor-heads-rank-0-of-2", "file": "x.json", "offset": 0})
    if kind == 2:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        data = bytes(changed) if bytes(changed) != data else data[:-1] + bytes([data[-1] ^ 1])
    elif kind == 3:
        data = data[: rng.randrange(1, len(data))]
    elif kind == 4:
        data = old
    else:
        data = struct.pack(">BIQ", rng.randrange(256), rng.randrange(1 << 32), rng.randrange(1 << 64)) + data[13:]
    return made, data


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    rng, findings, began = random.Random(asked.seed), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        agent = Agent("127.0.0.1", 0, SECRET, Path(home) / "parts")
        threading.Thread(target=agent.run, daemon=True).start()
        first, old = frame(agent.port, {"do": "port"})
        first.close()
        for number in range(asked.frames):
            try:
                made, data = bad(rng, agent.port, old)
            except (OSError, ChannelError):
                # The one place is still taken by the case before.
                time.sleep(0.005)
                continue
            with contextlib.suppress(OSError):
                made.sendall(data)
                made.shutdown(socket.SHUT_WR)
                # Until the agent has read it, and closes.
                made.settimeout(GOOD_S)
                while made.recv(4096):
                    pass
            made.close()
            if number % CANARY_EVERY == 0 and not good(agent):
                print(f"after case {number} a good coordinator gets no answer", flush=True)
                findings += 1
        if not good(agent):
            findings += 1
        if written := list(Path(home).rglob("*.json*")):
            print(f"bad frames wrote {written[:5]}")
            findings += 1
        agent.close()
    print(f"{asked.frames:,} cases, {findings} findings, {time.monotonic() - began:.0f} s")
    return 1 if findings else 0


def good(agent: Agent) -> bool:
    """Whether a coordinator with the secret is answered."""
    until = time.monotonic() + GOOD_S
    while time.monotonic() < until:
        try:
            there = There(Node("n", "127.0.0.1", 8, 100, agent.port), SECRET)
        except AgentError:
            continue
        try:
            if there.ask("port") > 0:
                return True
        except AgentError:
            time.sleep(0.01)
        finally:
            there.close()
    return False


if __name__ == "__main__":
    sys.exit(main())
