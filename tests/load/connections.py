"""Many connections to a served tiny model: `python -m tests.load.connections`. Prints one JSON object.

Three parts: 10,000 requests over 256 connections that stay open (none may be reset or fail), a burst beyond the queue
(each is a 200 or a 429; how long the 429s took), and good requests beside 500 bodies that stall (how long they took
without and with them). Exits with 1 when a connection broke or an answer was neither.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

from tests import tiny

STALLED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{"


class Connection:
    """One keep-alive connection."""

    def __init__(self, host: str, port: int) -> None:
        self._where = (host, port)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._where)

    async def post(self, body: dict[str, object]) -> int:
        """The status; the body is read to its end."""
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in answer.lower().split(b"\r\n")[1:] if line)
        await self._reader.readexactly(int(fields[b"content-length"]))
        return int(answer.split()[1])

    def close(self) -> None:
        self._writer.close()


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(seconds)
    picked = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 95, 99)} if ordered else {}
    return {name: round(value * 1000, 1) for name, value in picked.items()} | (
        {"max": round(ordered[-1] * 1000, 1)} if ordered else {}
    )


async def steady(host: str, port: int, connections: int, requests: int) -> dict[str, object]:
    """All connections work through one pile of requests."""
    statuses: collections.Counter[str] = collections.Counter()
    left, took = iter(range(requests)), []

    async def work() -> None:
        connection = Connection(host, port)
        await connection.open()
        for i in left:
            begin = time.perf_counter()
            try:
                status = str(await connection.post({"prompt": f"the quick {i}", "max_tokens": 4, "temperature": 0}))
            except (OSError, asyncio.IncompleteReadError) as error:
                status = type(error).__name__
                await connection.open()
            statuses[status] += 1
            took.append(time.perf_counter() - begin)
        connection.close()

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(connections)))
    wall = time.perf_counter() - begin
    return {"answers": dict(statuses), "requests_per_s": round(requests / wall, 1), "ms": quantiles(took)}


async def burst(host: str, port: int, connections: int) -> dict[str, object]:
    """All at once, more than run and wait together, and long enough that the queue stays full; then one by one."""
    statuses: collections.Counter[str] = collections.Counter()
    made = await _opened(host, port, connections + 20)

    async def ask(connection: Connection, refused: list[float]) -> None:
        begin = time.perf_counter()
        try:
            status = str(await connection.post({"prompt": "the quick", "max_tokens": 200, "ignore_eos": True}))
        except (OSError, asyncio.IncompleteReadError) as error:
            status = type(error).__name__
        statuses[status] += 1
        if status == "429":
            refused.append(time.perf_counter() - begin)
        connection.close()

    together: list[float] = []
    alone: list[float] = []
    crowd = [asyncio.create_task(ask(one, together)) for one in made[:connections]]
    while len(together) < connections // 3:
        await asyncio.sleep(0.05)
    for one in made[connections:]:
        await ask(one, alone)
    await asyncio.gather(*crowd)
    return {
        "answers": dict(statuses),
        "ms_of_429_in_the_burst": quantiles(together),
        "ms_of_429_beside_a_full_queue": quantiles(alone),
    }


async def _opened(host: str, port: int, count: int) -> list[Connection]:
    made = [Connection(host, port) for _ in range(count)]
    await asyncio.gather(*(one.open() for one in made))
    return made


async def stalled(host: str, port: int, count: int) -> dict[str, object]:
    """Good requests, alone and beside bodies that do not come."""

    async def good() -> dict[str, float]:
        connection = Connection(host, port)
        await connection.open()
        took = []
        for i in range(50):
            begin = time.perf_counter()
            assert await connection.post({"prompt": f"a fox {i}", "max_tokens": 4, "temperature": 0}) == 200
            took.append(time.perf_counter() - begin)
        connection.close()
        return quantiles(took)

    before = await good()
    writers = [(await asyncio.open_connection(host, port))[1] for _ in range(count)]
    for writer in writers:
        writer.write(STALLED)
    await asyncio.sleep(0.5)
    beside = await good()
    for writer in writers:
        writer.close()
    return {"ms_alone": before, "ms_beside_them": beside}


async def measure(url: str, connections: int, requests: int) -> dict[str, dict[str, object]]:
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None
    return {
        "steady": await steady(where.hostname, where.port, connections, requests),
        "burst": await burst(where.hostname, where.port, 600),
        "stalled": await stalled(where.hostname, where.port, 500),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--requests", type=int, default=10_000)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.write_folder(Path(folder) / "tiny")
        command = [sys.executable, "-m", "mlxinfer", "serve", str(model), "--port", "0", "--json"]
        env = os.environ | {"MLXINFER_CONFIG": os.devnull, "MLXINFER_PREFIX_DISK_MB": "0"}
        with open(Path(folder) / "log", "w") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
        assert server.stdout is not None
        try:
            url = json.loads(server.stdout.readline())["url"]
            found = asyncio.run(measure(url, chosen.connections, chosen.requests))
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
        print(json.dumps(found | {"exit_code": server.returncode}, indent=1))
    sound = set(found["steady"]["answers"]) == {"200"} and set(found["burst"]["answers"]) <= {"200", "429"}  # pyright: ignore[reportArgumentType]
    return 0 if sound and server.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
